"""Train PyTorch models larger than GPU memory, within a memory budget and bit-identical to plain PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patrickstar import errors, functional, testing
    from patrickstar._distributed.rendezvous import join
    from patrickstar._engine.checkpoint_manager import Checkpoints
    from patrickstar._engine.chunk_optimizer import ChunkOptimizer
    from patrickstar._engine.engine import Engine
    from patrickstar._engine.initialize import Initialized, initialize
    from patrickstar._engine.inspection import ChunkInfo, DiskUsage, Inspection, MomentInfo, ParameterInfo, TierUsage
    from patrickstar._kernels.update_rule import Rule
    from patrickstar._plan.plan import Plan
    from patrickstar._plan.planner import plan
    from patrickstar._step.stats import StepStats
    from patrickstar.config import Config, Delayed, Disk, InBackward, LockFree
    from patrickstar.optim import (
        EMA,
        SGD,
        Adam,
        AdamW,
        AdamW8bit,
        Lion,
        Muon,
        Optimizer,
        ScheduleFreeAdamW,
        TorchOptimizer,
    )

__version__ = "0.1.0"
__all__ = [
    "EMA",
    "SGD",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Checkpoints",
    "ChunkInfo",
    "ChunkOptimizer",
    "Config",
    "Delayed",
    "Disk",
    "DiskUsage",
    "Engine",
    "InBackward",
    "Initialized",
    "Inspection",
    "Lion",
    "LockFree",
    "MomentInfo",
    "Muon",
    "Optimizer",
    "ParameterInfo",
    "Plan",
    "Rule",
    "ScheduleFreeAdamW",
    "StepStats",
    "TierUsage",
    "TorchOptimizer",
    "errors",
    "functional",
    "initialize",
    "join",
    "plan",
    "testing",
]
# Names are imported on first use, so that the command line answers without PyTorch, which takes seconds to load.
_MODULES = {
    "_distributed.rendezvous": ("join",),
    "_engine.checkpoint_manager": ("Checkpoints",),
    "_engine.chunk_optimizer": ("ChunkOptimizer",),
    "_engine.engine": ("Engine",),
    "_engine.initialize": ("Initialized", "initialize"),
    "_engine.inspection": ("ChunkInfo", "DiskUsage", "Inspection", "MomentInfo", "ParameterInfo", "TierUsage"),
    "_kernels.update_rule": ("Rule",),
    "_plan.plan": ("Plan",),
    "_plan.planner": ("plan",),
    "_step.stats": ("StepStats",),
    "config": ("Config", "Delayed", "Disk", "InBackward", "LockFree"),
    "optim": (
        *("EMA", "SGD", "Adam", "AdamW", "AdamW8bit", "Lion", "Muon", "Optimizer", "ScheduleFreeAdamW"),
        "TorchOptimizer",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("errors", "functional", "testing")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"patrickstar.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"patrickstar.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
