"""Train PyTorch models larger than GPU memory, within a memory budget and bit-identical to plain PyTorch."""

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
    "Rule",
    "ScheduleFreeAdamW",
    "StepStats",
    "TierUsage",
    "TorchOptimizer",
    "errors",
    "initialize",
    "join",
    "testing",
]
