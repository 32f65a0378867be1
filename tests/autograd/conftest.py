"""Precision, checkpointing and configuration fixtures for the models of the zoo."""

import pytest

from .zoo import small_chunks


@pytest.fixture(autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture(params=["bf16", "fp32"])
def precision(request):
    return request.param


@pytest.fixture(params=["off", "reentrant", "non-reentrant"])
def checkpointing(request):
    return request.param


@pytest.fixture
def config(precision):
    return small_chunks(precision)
