"""Train PyTorch models larger than the GPU's memory, within a memory budget, bit for bit as plain PyTorch does."""

from patrickstar import errors, testing
from patrickstar.engine.config import Adam, AdamW, Config
from patrickstar.engine.engine import Engine, initialize
from patrickstar.engine.optimizer import ChunkOptimizer
from patrickstar.engine.stats import StepStats

__version__ = "0.1.0"
__all__ = ["Adam", "AdamW", "ChunkOptimizer", "Config", "Engine", "StepStats", "errors", "initialize", "testing"]
