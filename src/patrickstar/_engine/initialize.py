"""Creation of an engine, alone or in a process group."""

from collections.abc import Callable

from torch import nn

from patrickstar._distributed.process_group import World
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.param_init import WeightSource
from patrickstar.config import Config


def initialize(
    model: nn.Module | Callable[[], nn.Module], config: Config | None = None, weights: WeightSource | None = None
) -> tuple[Engine, ChunkOptimizer]:
    """Create an engine that manages a model, and its optimizer.

    If torchrun started several processes, or the script has called `torch.distributed.init_process_group`, every
    process must call it, and each stores a shard of the model data.

    Args:
        model: Function that builds the module, or the module itself.
        config: Budgets, precision and optimizer. Default: `Config()`.
        weights: Returns the value of a parameter by its name, for parameters on the meta device.

    Returns:
        The engine, to be called in place of the model, and the optimizer (`engine.optimizer`).

    Raises:
        BudgetError: The model data exceeds the budgets.
        ConfigError: An option is invalid, or the processes differ in model, options or versions.
        DeviceError: The compute device is not available.
        ModelError: A parameter or buffer cannot be managed.
    """
    config = config if config is not None else Config()
    world = World.find(config.find_device())
    try:
        engine = Engine(model, config, weights, world=world)
    except BaseException as error:
        if world is not None:
            world.abort(error)
        raise
    return engine, engine.optimizer
