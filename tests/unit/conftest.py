"""Fixtures for checkpoint tests."""

import shutil

import pytest
from checkpoint_cases import engine_of, train_steps
from toys import outcome


@pytest.fixture(scope="module")
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
