"""Engines whose iterations are resident, and helpers of their tests."""

import torch
from toys import Shape, batches, mean_square

from patrickstar import testing
from patrickstar._engine.engine import Engine

from .models import config

SHAPE = Shape(("mlp", "attention", "plain"))
PLENTY = 1 << 22


def engine_of(build, options=None, **more):
    torch.manual_seed(0)
    options = options or config("fp32", 256, device_memory=PLENTY)
    return Engine(build, options, meter=testing.NoMeter(), poison=True, **more)


def holds(engine):
    """Return the number of pinned `param16` chunks."""
    return sum(chunk.pins > 0 for chunk in engine.inspect().chunks if chunk.kind == "param16")


def train_until_resident(engine, data=None):
    """Train until the engine knows that everything fits."""
    for batch in data or batches(1) * 3:
        loss = engine(*batch)
        engine.backward(loss if loss.dim() == 0 else mean_square(loss))
        engine.optimizer.step()
    assert holds(engine) == 0


def same(build, script, options=None):
    """Compare a script's results and all parameters with those of plain PyTorch."""
    options = options or config("fp32", 256, device_memory=PLENTY)
    torch.manual_seed(0)
    reference = testing.ReferenceTrainer(build, options)
    expected = script(reference)
    engine = engine_of(build, options)
    found = script(engine)
    testing.assert_same_bits(expected, found, "results")
    testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
    engine.close()
