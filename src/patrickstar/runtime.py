"""The entry point as PatrickStar's paper lists it."""

from collections.abc import Callable

from torch import nn

from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config


def initialize_engine(
    model_func: nn.Module | Callable[[], nn.Module], config: Config | None = None
) -> tuple[Engine, ChunkOptimizer]:
    """`patrickstar.initialize` under the paper's name and with its keywords."""
    return initialize(model_func, config)
