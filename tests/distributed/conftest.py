"""The fork server starts before the first test of this directory, whose time would else be that of its imports."""

import pytest

from . import ranks


def ready() -> None:
    """Do nothing; runs in a process."""


@pytest.fixture(autouse=True, scope="session")
def _fork_server():
    ranks.run(1, ready)
