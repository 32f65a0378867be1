"""Train PyTorch models larger than GPU memory, within a memory budget and bit-identical to plain PyTorch."""

from typing import TYPE_CHECKING, Any

from patrickstar import errors, testing
from patrickstar._distributed.rendezvous import join
from patrickstar._engine.checkpoint_manager import Checkpoints
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import Initialized, initialize
from patrickstar._engine.inspection import ChunkInfo, DiskUsage, Inspection, MomentInfo, ParameterInfo, TierUsage
from patrickstar._kernels.update_rule import Rule
from patrickstar._step.stats import StepStats
from patrickstar.config import Config, Delayed, Disk, LockFree
from patrickstar.optim import EMA, SGD, Adam, AdamW, AdamW8bit, Lion, Muon, Optimizer, ScheduleFreeAdamW, TorchOptimizer

if TYPE_CHECKING:
    from patrickstar._plan.plan import Plan
    from patrickstar._plan.planner import plan

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
    "initialize",
    "join",
    "plan",
    "testing",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: the planner's libraries would add to `import patrickstar`.
    if name == "plan":
        from patrickstar._plan.planner import plan

        return plan
    if name == "Plan":
        from patrickstar._plan.plan import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
