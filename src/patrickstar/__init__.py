"""Train PyTorch models larger than the GPU's memory, within a memory budget, bit for bit as plain PyTorch does."""

from patrickstar import errors, testing
from patrickstar.engine.checkpoints import Checkpoints
from patrickstar.engine.config import Config, Disk
from patrickstar.engine.engine import Engine, initialize
from patrickstar.engine.optimizer import ChunkOptimizer
from patrickstar.engine.optimizers import SGD, Adam, AdamW, Lion, Optimizer, TorchOptimizer
from patrickstar.engine.stats import StepStats
from patrickstar.kernels.rule import Rule

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Checkpoints",
    "ChunkOptimizer",
    "Config",
    "Disk",
    "Engine",
    "Lion",
    "Optimizer",
    "Rule",
    "StepStats",
    "TorchOptimizer",
    "errors",
    "initialize",
    "testing",
]
