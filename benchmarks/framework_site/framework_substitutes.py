"""PatrickStar's classes in place of a framework's, in the processes of `framework_suites.py`.

FRAMEWORK names the framework, and ENGINES a file that gets a line per engine, with the test that created it.
"""

import os
from typing import Any

import torch.distributed as dist
from torch import nn

import patrickstar as ps

BUDGET = ps.Config(chunk_size="64KiB", device_memory="1GiB", host_memory="1GiB")
"""Chunks of a part of a tiny model. They move at each access, whether the budget requires it or not."""
TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


def make_engine(self: Any, model: nn.Module, config: ps.Config) -> ps.Engine:
    """Return an engine, in a single process one that evicts each unused chunk at every access, and note it."""
    with open(os.environ["ENGINES"], "a") as file:
        file.write(os.environ.get("PYTEST_CURRENT_TEST", "no test") + "\n")
    frozen = getattr(self, "frozen_modules", {})
    if dist.is_initialized() and dist.get_world_size() > 1:
        return ps.initialize(model, config, frozen=frozen)[0]
    return ps.Engine(model, config, frozen=frozen, evict_everything=True)


def budgeted(kind: type) -> type:
    """Return a subclass of a class of an integration that has the budget by default."""

    def construct(self: Any, *args: Any, config: ps.Config | None = None, **options: Any) -> None:
        kind.__init__(self, *args, config=config or BUDGET, **options)  # type: ignore[misc]

    made = type(kind.__name__, (kind,), {"__init__": construct, "make_engine": make_engine, "__doc__": kind.__doc__})
    globals()[kind.__name__] = made  # pickle finds a class by its name
    return made


def substitute_trl() -> None:
    import trl

    from patrickstar.integrations import trl as integration

    for name in TRL_TRAINERS:
        setattr(trl, name, budgeted(getattr(integration, name)))


def substitute_accelerate() -> None:
    import accelerate

    from patrickstar.integrations import accelerate as integration

    accelerate.Accelerator = accelerate.accelerator.Accelerator = budgeted(integration.Accelerator)


def substitute_lightning() -> None:
    """Let the Trainer take PatrickStar's strategy where it would choose the one for a single device."""
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from patrickstar.integrations.lightning import PatrickStarStrategy

    choose, strategy = _AcceleratorConnector._choose_strategy, budgeted(PatrickStarStrategy)

    def chosen(self: Any) -> Any:
        found = choose(self)
        return strategy() if type(found) is SingleDeviceStrategy else found

    _AcceleratorConnector._choose_strategy = chosen


def substitute() -> None:
    {"trl": substitute_trl, "accelerate": substitute_accelerate, "lightning": substitute_lightning}[
        os.environ["FRAMEWORK"]
    ]()
