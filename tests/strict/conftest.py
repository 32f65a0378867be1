"""Run these tests on one thread: their models are tiny, and slower on several threads."""

import gc

import pytest
import strict_device


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Apply `one_thread` to every test in this folder."""


@pytest.fixture(autouse=True)
def _default_settings():
    """Restore the device's settings after each test, and free what it has left."""
    yield
    strict_device.configure()
    gc.collect()
