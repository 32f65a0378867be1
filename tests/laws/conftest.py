"""Run these tests on one thread: their models are tiny, and slower on several threads."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Apply `one_thread` to every test in this folder."""
