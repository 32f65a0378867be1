"""Law 6 with a disk: when it fails there is one clear error, and nothing is left behind or computed on."""

import ctypes
import gc
import os
import random
import re
import resource
import time
from contextlib import contextmanager

import pytest
import torch

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import BudgetError, DiskError, MoveError, TrainingError

from .tiers import Room, blocks, descriptors, inputs, mean_square, movers, on_disk, options, pages_of, small_engine

KILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
CHUNK = r"(?:param16|param32|exp_avg|exp_avg_sq|grad32)\[\d+\]"
STEPS = 4


@pytest.fixture(scope="module")
def reference():
    """Losses of each step, and parameters after it, from step 0 on."""
    torch.manual_seed(0)
    trainer = testing.ReferenceTrainer(blocks, options())
    losses, states = [], [trainer.state_dict()]
    for batch in inputs(STEPS):
        loss = mean_square(trainer(*batch))
        trainer.backward(loss)
        trainer.optimizer.step()
        losses.append(loss.item())
        states.append(trainer.state_dict())
    return losses, states


@pytest.fixture
def config(tmp_path):
    return on_disk(blocks, options(), tmp_path, inputs(1)[0], Room(host_bytes=20000))


@pytest.fixture
def engine(config):
    torch.manual_seed(0)
    made = small_engine(blocks, config)
    yield made
    made.close()


def run(engine, losses, before_step=lambda number: None):
    """Train, and note the losses seen."""
    for number, batch in enumerate(inputs(STEPS)):
        before_step(number)
        loss = mean_square(engine(*batch))
        losses.append(loss.item())
        engine.backward(loss)
        engine.optimizer.step()
    engine.state_dict()


# Faults of the system's own making


def open_again(engine, flags):
    """Put the same file, opened in another way, under the descriptor."""
    other = os.open(f"/proc/self/fd/{engine._core.manager.disk_tier.file._fd}", flags | os.O_DIRECT)
    os.dup2(other, engine._core.manager.disk_tier.file._fd)
    os.close(other)


def put(engine, path):
    """Put another open file under the descriptor."""
    other = os.open(path, os.O_RDWR)
    os.dup2(other, engine._core.manager.disk_tier.file._fd)
    os.close(other)


def refuse_writes(engine):
    open_again(engine, os.O_RDONLY)


def refuse_reads(engine):
    open_again(engine, os.O_WRONLY)


def fail(engine):
    put(engine, "/proc/self/mem")


def fill_up(engine):
    """As on a full disk, except that what is read is other bytes too."""
    put(engine, "/dev/full")


def cut(engine):
    os.ftruncate(engine._core.manager.disk_tier.file._fd, 4096)


def cut_off(engine):
    os.ftruncate(engine._core.manager.disk_tier.file._fd, engine._core.manager.disk_tier.file.used_bytes * 3 // 4 - 500)


def damage(engine):
    """Every page, by somebody else."""
    other = os.open(f"/proc/self/fd/{engine._core.manager.disk_tier.file._fd}", os.O_RDWR)
    for at in range(0, engine._core.manager.disk_tier.file.used_bytes, 4096):
        os.pwrite(other, bytes([random.Random(at).randrange(256)]), at + 17)
    os.close(other)


def kill(movers):
    for thread in movers._queue.threads:
        assert KILL(thread.ident, SystemExit, None) == 1


def kill_readers(engine):
    kill(engine._core.manager.disk_tier.readers)


def kill_writers(engine):
    kill(engine._core.manager.disk_tier.writers)


def kill_one(engine):
    thread = engine._core.manager.disk_tier.readers._queue.threads[0]
    KILL(thread.ident, SystemExit, None)


FAULTS = {
    refuse_writes: (DiskError, "write", r"Bad file descriptor"),
    refuse_reads: (DiskError, "read", r"Bad file descriptor"),
    fail: (DiskError, "read|write", r"Input/output error"),
    fill_up: (DiskError, "read|write", r"No space left on device|damaged"),
    cut: (DiskError, "read", r"short read|damaged"),
    cut_off: (DiskError, "read", r"short read|damaged"),
    damage: (DiskError, "read", r"the page is damaged"),
}


def check_message(error, engine, operation, reason):
    """It names the chunk, the file, the operation, and what to do, once."""
    text = str(error)
    path = re.escape(str(engine._core.manager.disk_tier.file.path))
    assert re.search(rf"can't ({operation}) \d+ bytes of {CHUNK} at offset \d+ of .*{path}: ", text), text
    assert re.search(reason, text), text
    check_note(error)


def check_note(error):
    notes = [note for note in getattr(error, "__notes__", ()) if "The engine is closed." in note]
    assert len(notes) == 1, notes


def check_nothing_is_left(engine, folder, before):
    with pytest.raises(TrainingError, match="closed"):
        engine(*inputs(1)[0])
    with pytest.raises(TrainingError, match="closed"):
        engine.state_dict()
    assert movers() == []
    assert not list(folder.iterdir())
    assert descriptors() == before
    assert not engine._core.manager.chunks and engine._core.manager.device_tier.used == 0


def check_parameters(engine, error, states):
    """Each is what it was before or after the last step begun, or NaN and named."""
    named = next(note for note in error.__notes__ if "The engine is closed." in note)
    lost = re.findall(r"[\w.]*\d[\w.]*\.(?:weight|bias)", named)
    assert f"{len(lost)} parameters could not be read back" in named
    for name, param in engine.module.named_parameters():
        if name in lost:
            assert param.isnan().all(), name
        else:
            assert any(torch.equal(param.detach(), state[name]) for state in states), name
    return lost


def check_another_engine_works(config, losses):
    torch.manual_seed(0)
    fresh, seen = small_engine(blocks, config), []
    run(fresh, seen)
    fresh.close()
    assert seen == losses


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("when", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fails_in_training(config, tmp_path, reference, fault, when):
    losses, states = reference
    before = descriptors()
    torch.manual_seed(0)
    engine, seen = small_engine(blocks, config), []
    kind, operation, reason = FAULTS[fault]
    with pytest.raises(kind) as raised:
        run(engine, seen, lambda number: number == when and fault(engine))
    check_message(raised.value, engine, operation, reason)
    assert when <= len(seen) and seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states[when - 1 : len(seen) + 1])
    del raised
    engine.close()
    check_another_engine_works(config, losses)


@pytest.mark.parametrize("fault", [damage, refuse_reads], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    "what",
    [
        lambda engine: engine.state_dict(),
        lambda engine: engine.optimizer.state_dict(),
        lambda engine: engine(*inputs(1)[0]),
        lambda engine: engine.load_state_dict(blocks().state_dict()),
        lambda engine: [param.add(1) for param in engine.module.parameters()],
        lambda engine: engine.module.state_dict()["0.0.weight"].clone(),
    ],
    ids=["state_dict", "optimizer", "forward", "load", "parameters", "module"],
)
def test_a_disk_that_fails_outside_of_training(config, tmp_path, reference, fault, what):
    before = descriptors()
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    run(engine, [])
    fault(engine)
    with pytest.raises(DiskError) as raised:
        for _ in range(3):
            what(engine)
    check_message(raised.value, engine, *FAULTS[fault][1:])
    check_nothing_is_left(engine, tmp_path, before)
    lost = check_parameters(engine, raised.value, reference[1][-1:])
    assert lost


@pytest.mark.parametrize("fault", [damage, fail], ids=lambda fault: fault.__name__)
def test_a_disk_that_fails_under_close(config, tmp_path, reference, fault):
    """Nobody else would tell that parameters are lost."""
    before = descriptors()
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    run(engine, [])
    fault(engine)
    with pytest.raises(DiskError, match=CHUNK):
        engine.close()
    check_nothing_is_left(engine, tmp_path, before)
    states = reference[1][-1]
    lost = [name for name, param in engine.module.named_parameters() if param.isnan().all()]
    assert lost
    for name, param in engine.module.named_parameters():
        assert name in lost or torch.equal(param.detach(), states[name]), name
    engine.close()


def test_damage_to_one_page_costs_who_lies_there(config, reference):
    """All others are read back."""
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    run(engine, [])
    chunk = engine._core.manager["param32", 3]
    assert chunk.disk_valid and not chunk.in_memory
    other = os.open(f"/proc/self/fd/{engine._core.manager.disk_tier.file._fd}", os.O_RDWR)
    os.pwrite(other, b"\x55" * 64, chunk.disk_offset + 4096)
    os.close(other)
    there = [
        managed
        for managed in engine._core.data.by_chunk[3]
        if 1 in pages_of(managed.location.offset, managed.location.numel, 1024)
    ]
    with pytest.raises(DiskError, match=r"can't read 4096 bytes of param32\[3\].*damaged") as raised:
        engine.state_dict()
    assert check_parameters(engine, raised.value, reference[1][-1:]) == [managed.name for managed in there]


def test_an_optimizer_of_an_engine_that_was_closed_by_a_fault(engine):
    fail(engine)
    with pytest.raises(DiskError):
        run(engine, [])
    for what in (engine.optimizer.step, engine.optimizer.zero_grad, engine.optimizer.state_dict):
        with pytest.raises(TrainingError, match="closed"):
            what()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [kill_readers, kill_writers, kill_one], ids=lambda fault: fault.__name__)
def test_threads_that_die(config, tmp_path, reference, fault):
    losses, states = reference
    before = descriptors()
    torch.manual_seed(0)
    engine, seen = small_engine(blocks, config), []
    began = time.monotonic()
    with pytest.raises(MoveError, match=rf"{CHUNK}.*a worker thread (died|was told to end)") as raised:
        run(engine, seen, lambda number: number == 1 and fault(engine))
        run(engine, [], lambda number: None)
    assert time.monotonic() - began < 20
    check_note(raised.value)
    assert seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states)
    del raised
    check_another_engine_works(config, losses)


# No room


@contextmanager
def files_no_larger_than(nbytes):
    """The system refuses what lies beyond, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_what_lies_far_back(config, tmp_path):
    """Reads go on, and so do some writes."""
    before = descriptors()
    torch.manual_seed(0)
    engine, seen = small_engine(blocks, config), []
    run(engine, seen)
    with files_no_larger_than(engine._core.manager.disk_tier.file.used_bytes // 2), pytest.raises(DiskError) as raised:
        run(engine, [])
    check_message(raised.value, engine, "write", r"File too large.*free space there")
    check_nothing_is_left(engine, tmp_path, before)


def refused(config, kind):
    """What making an engine raises; nothing is left of it."""
    before = descriptors()
    with pytest.raises(kind) as raised:
        small_engine(blocks, config)
    text = str(raised.value)
    del raised
    gc.collect()
    assert movers() == [] and descriptors() == before
    return text


def test_a_disk_without_room_for_the_reservation(config, tmp_path):
    with files_no_larger_than(100000):
        text = refused(config, DiskError)
    assert re.match(
        rf"the file needs \d+ more bytes .* on the disk, and {tmp_path} has \d+ bytes.*File too large", text
    )
    assert not list(tmp_path.iterdir())


def test_directories_that_cannot_be_used(config, tmp_path):
    (tmp_path / "taken").write_text("")
    for directory in (tmp_path / "none", tmp_path / "taken"):
        text = refused(config.model_copy(update={"disk": ps.Disk(directory=directory)}), DiskError)
        assert text.startswith(f"the disk tier's directory {directory} "), text
    # Nobody makes files there, not even root; it says that it has no room at all.
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys")}), (DiskError, BudgetError))
    assert "disk" in text
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys", capacity="1GiB")}), DiskError)
    assert re.match(r"the disk tier's directory /sys can't be written", text)


@pytest.mark.parametrize("how", ["capacity", "system"])
def test_no_room_for_accumulated_gradients(config, tmp_path, how):
    """They are what may need more of the disk later."""
    before = descriptors()
    used = 0
    if how == "capacity":
        with_all = small_engine(blocks, config)
        used = with_all._core.manager.disk_tier.file.nbytes
        with_all.close()
        config = config.model_copy(update={"disk": ps.Disk(directory=tmp_path, capacity=used)})
    engine = small_engine(blocks, config)
    limit = files_no_larger_than(
        engine._core.manager.disk_tier.file.nbytes if how == "system" else resource.RLIM_INFINITY
    )
    kind = BudgetError if how == "capacity" else DiskError
    with limit, pytest.raises(kind, match=r"grad32\[\d+\]") as raised:
        for batch in inputs(2):
            engine.backward(mean_square(engine(*batch)))
    del raised
    if how == "capacity":
        engine.optimizer.zero_grad()
        run(engine, [])
    engine.close()
    assert movers() == [] and descriptors() == before and not list(tmp_path.iterdir())
