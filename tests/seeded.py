"""Engines and references that begin with the same parameters, and comparisons of what they have trained."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine

Model = nn.Module | Callable[[], nn.Module]


def reference_of(build: Model, config: ps.Config, *optimizer: type) -> testing.ReferenceTrainer:
    """Create the reference in plain PyTorch, from seed 0."""
    torch.manual_seed(0)
    return testing.ReferenceTrainer(build, config, *optimizer)


def engine_of(build: Model, config: ps.Config, **hooks: Any) -> Engine:
    """Create an engine from seed 0 that counts no non-model data and fills freed memory with NaN."""
    torch.manual_seed(0)
    return Engine(build, config, **{"meter": testing.NoMeter(), "poison": True} | hooks)


def assert_same_model(expected: Any, found: Any, label: str = "") -> None:
    """Assert that two trainers have the same bits in parameters, buffers and optimizer states."""
    testing.assert_same_bits(expected.state_dict(), found.state_dict(), f"{label}parameters")
    testing._assert_same_states(expected.optimizer.state_dict(), found.optimizer.state_dict())


@contextmanager
def compared(
    build: Model, config: ps.Config, script: Callable[[Any], Any], label: str = "", **hooks: Any
) -> Iterator[Engine]:
    """Run a training loop in plain PyTorch and with an engine, compare all bits, and yield the engine."""
    reference = reference_of(build, config)
    expected = script(reference)
    with engine_of(build, config, **hooks) as engine:
        testing.assert_same_bits(expected, script(engine), f"{label}results")
        assert_same_model(reference, engine, label)
        yield engine


def compare(*args: Any, **hooks: Any) -> ps.StepStats:
    """Run and compare as `compared`; return the engine's statistics."""
    with compared(*args, **hooks) as engine:
        return engine.stats.total


def run_step(trainer: Any, batch: Any, **options: Any) -> None:
    """Run one step, and wait for nothing."""
    trainer.backward(mean_square(trainer(*batch)), **options)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
