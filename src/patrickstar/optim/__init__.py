"""Optimizers: their options, the chunk lists of their states, and their update rules."""

from patrickstar.optim.adam import Adam, AdamW, AdamW8bit
from patrickstar.optim.ema import EMA
from patrickstar.optim.lion import Lion
from patrickstar.optim.muon import Muon
from patrickstar.optim.optimizer import Optimizer
from patrickstar.optim.schedule_free import ScheduleFreeAdamW
from patrickstar.optim.sgd import SGD
from patrickstar.optim.torch_optimizer import TorchOptimizer

__all__ = [
    "EMA",
    "SGD",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Muon",
    "Optimizer",
    "ScheduleFreeAdamW",
    "TorchOptimizer",
]
