"""Run these tests on one thread: their models are tiny, and slower on several threads."""

import shutil

import pytest
from toys import outcome

from .checkpoint_cases import engine_of, train_steps


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Apply `one_thread` to every test in this folder."""


@pytest.fixture(scope="session")
def saved_checkpoint(tmp_path_factory):
    """Path of a checkpoint, and the state of the engine that wrote it."""
    engine = engine_of()
    train_steps(engine)
    path = tmp_path_factory.mktemp("saved") / "one"
    engine.save(path, {"note": [1, 2], "fill": " " * 200})  # forged text may be longer
    return path, outcome(engine)


@pytest.fixture
def checkpoint_copy(saved_checkpoint, tmp_path):
    """Copy of the checkpoint for a test to damage."""
    return shutil.copytree(saved_checkpoint[0], tmp_path / "copy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Provide an empty directory, and check that it is empty at the end."""
    directory = tmp_path_factory.mktemp("disk")
    yield directory
    assert not list(directory.iterdir())
