"""Engines whose iterations are resident, and helpers of their tests."""

import seeded
from toys import Shape, batches, train

from .models import config

SHAPE = Shape(("mlp", "attention", "plain"))
PLENTY = 1 << 22
ROOMY = config("fp32", 256, device_memory=PLENTY)


def engine_of(build, options=ROOMY, **hooks):
    return seeded.engine_of(build, options, **hooks)


def holds(engine):
    """Return the number of pinned `param16` chunks."""
    return sum(chunk.pins > 0 for chunk in engine.inspect().chunks if chunk.kind == "param16")


def train_until_resident(engine, data=None):
    """Train until the engine knows that everything fits."""
    train(engine, data or batches(1) * 3)
    assert holds(engine) == 0


def same(build, script, options=ROOMY, **hooks):
    """Compare a script's results and all parameters with those of plain PyTorch."""
    seeded.compare(build, options, script, **hooks)
