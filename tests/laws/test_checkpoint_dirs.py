"""Checkpoint folders: atomicity, deletion of old checkpoints, full and failing disks."""

import errno
import os
import resource
import shutil
from collections import Counter

import pytest

import patrickstar as ps
from patrickstar._checkpoint import atomic_dir
from patrickstar.errors import CheckpointError, ConfigError, TrainingError

from .checkpoint_cases import IDS, engine_of, train_steps


def test_failed_saves_leave_no_files(tmp_path):
    engine = engine_of()
    engine.backward(engine(IDS))
    with pytest.raises(TrainingError, match="gradient that no step has used"):
        engine.save(tmp_path / "one")
    engine.optimizer.zero_grad()
    engine.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="exists"):
        engine.save(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_keep_limits_the_number_of_checkpoints(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path / "run", keep=2)
    engine = engine_of()
    assert checkpoints.load(engine) is None and checkpoints.newest() is None
    for step in (1, 2, 10, 9):
        assert checkpoints.save(engine, step, {"step": step}, wait=step % 2 == 0)
    engine.close()
    assert [path.name for path in checkpoints.all()] == ["step-10", "step-9"], "ordered by time of writing"
    engine = engine_of()
    assert checkpoints.load(engine) == {"step": 9}
    checkpoints.save(engine, 9, {"step": 9})
    assert [path.name for path in checkpoints.all()] == ["step-9", "step-9-2"], "checkpoints are never replaced"
    with pytest.raises(ConfigError, match="keep=0"):
        ps.Checkpoints(tmp_path, keep=0)


def test_leftovers_are_ignored_and_removed(tmp_path, saved_checkpoint):
    leftover = tmp_path / ".step-3.abc.patrickstar-partial"
    shutil.copytree(saved_checkpoint[0], leftover)
    locked = tmp_path / ".step-4.abc.patrickstar-partial"
    locked.mkdir()
    lock = os.open(locked, os.O_RDONLY)
    atomic_dir.fcntl.flock(lock, atomic_dir.fcntl.LOCK_SH)
    checkpoints = ps.Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    engine = engine_of()
    checkpoints.save(engine, 5)
    assert not leftover.exists() and locked.exists(), "folders of running processes are kept"
    os.close(lock)


def test_two_asynchronous_saves_of_one_step(tmp_path):
    (tmp_path / ".download.partial").mkdir()
    engine, checkpoints = engine_of(), ps.Checkpoints(tmp_path)
    assert checkpoints.save(engine, 1, wait=False) and checkpoints.save(engine, 1, wait=False)
    engine.close()  # waits for both
    assert (tmp_path / ".download.partial").is_dir(), "a foreign folder is kept"
    assert [path.name for path in checkpoints.all()] == ["step-1", "step-1-2"]


def test_full_disk_warns_and_keeps_the_old_checkpoint(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path, keep=1)
    engine = engine_of()
    checkpoints.save(engine, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for wait in (True, False):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.warns(UserWarning, match=r"training continues: can't write .*free") as warned:
                checkpoints.save(engine, 2, wait=wait)
                train_steps(engine, 1)
                engine.finish_saving()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(warned) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert checkpoints.save(engine, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_disk_error_during_a_save(tmp_path, monkeypatch):
    engine = engine_of()
    calls = Counter()

    def failing(fd, memory, offset):
        calls["pwritev"] += 1
        if calls["pwritev"] > 3:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, memory, offset)

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        engine.save(tmp_path / "one")
    monkeypatch.undo()
    assert calls["pwritev"] > 3 and not list(tmp_path.iterdir())
    train_steps(engine)
    engine.save(tmp_path / "one")
