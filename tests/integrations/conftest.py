"""Settings for integration tests: no downloads, one thread, no engine that outlives its test."""

import functools
import os
import weakref

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads this at import

import pytest
import rates
from accelerate.state import AcceleratorState, GradientState
from fixed_machine import same_machine  # noqa: F401

from patrickstar import Engine


@pytest.fixture(autouse=True)
def _alone(one_thread):
    return one_thread


@pytest.fixture(autouse=True)
def _fast_fp32(monkeypatch):
    """Let arguments that name no precision select fp32, as in the frameworks that results are compared with."""
    monkeypatch.setattr(rates.MEASURED, rates.fixed(fp32=2e9))


def reset_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _new_accelerate():
    """accelerate keeps its settings for the life of the process."""
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.fixture(autouse=True)
def _close_engines(monkeypatch):
    """Close the engines that a test has left open: they limit what the allocator of the whole process caches."""
    made, create = weakref.WeakSet(), Engine.__init__

    @functools.wraps(create)
    def create_noted(engine, *args, **options):
        create(engine, *args, **options)
        made.add(engine)

    monkeypatch.setattr(Engine, "__init__", create_noted)
    yield
    for engine in list(made):
        engine.close(keep=False)
