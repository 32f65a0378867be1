"""The laws are tested on tiny models, which are slower on several threads than on one."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """For every test here."""
