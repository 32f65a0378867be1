"""Entry point with the name and keywords of the PatrickStar paper."""

from collections.abc import Callable

from torch import nn

from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config


def initialize_engine(
    model_func: nn.Module | Callable[[], nn.Module], config: Config | None = None
) -> tuple[Engine, ChunkOptimizer]:
    """Create an engine and its optimizer, as `patrickstar.initialize`.

    Args:
        model_func: Function that builds the model, or the model itself.
        config: Configuration; default `Config()`.

    Returns:
        The engine, called in place of the model, and its optimizer.

    Raises:
        ConfigError: An option does not suit the model or the other processes.
        DeviceError: The compute device is not available.
        ModelError: A parameter can't be managed.
        BudgetError: The memory budgets are too small for the model.
        DiskError: The directory of the disk tier can't be used.
    """
    return initialize(model_func, config)
