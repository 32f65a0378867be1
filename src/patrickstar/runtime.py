"""Entry points with the names and arguments that the papers of PatrickStar and Angel-PTM print."""

from collections.abc import Callable

import torch
from torch import nn

from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize as ps_initialize
from patrickstar.config import Config
from patrickstar.integrations._optimizers import convert
from patrickstar.optim import Optimizer


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
    return ps_initialize(model_func, config)


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer | Optimizer, config: Config | None = None) -> Engine:
    """Create an engine as Angel-PTM's paper does (Figure 6): it takes the place of the model and steps by itself.

    Args:
        model: The model.
        optimizer: Optimizer of torch over its parameters, before its first step, or one of this package.
        config: Configuration, whose optimizer is replaced; default `Config()`.

    Returns:
        The engine, with `backward(loss)` and `step()`.

    Raises:
        ConfigError: The optimizer has trained before, or an option does not suit the model or the other processes.
        DeviceError: The compute device is not available.
        ModelError: A parameter can't be managed.
        BudgetError: The memory budgets are too small for the model.
        DiskError: The directory of the disk tier can't be used.
    """
    chosen = optimizer if isinstance(optimizer, Optimizer) else convert(optimizer, model)
    return ps_initialize(model, (config or Config()).model_copy(update={"optimizer": chosen})).engine
