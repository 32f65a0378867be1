"""Precision, checkpointing and configuration fixtures for the models of the zoo."""

import gc
from types import SimpleNamespace

import pytest

from .zoo import small_chunks


@pytest.fixture(autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture(autouse=True, scope="module")
def _collected_once():
    """Collect what a file's engines leave once: tensors of these tests count for no engine of another test of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar.testing.gc", SimpleNamespace(collect=lambda: None))
        yield
    gc.collect()


@pytest.fixture(params=["bf16", "fp32"])
def precision(request):
    return request.param


WAYS = ["off", "reentrant", "non-reentrant"]


@pytest.fixture(params=WAYS)
def checkpointing(request):
    return request.param


@pytest.fixture(params=WAYS)
def recomputing(request):
    """Return the way of checkpointing, for tests with many models: `make test` takes one way for each."""
    return request.param


@pytest.fixture
def config(precision):
    return small_chunks(precision)
