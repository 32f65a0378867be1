"""Law 6 with a disk: a failing disk raises one clear error, leaves nothing behind, and no computation continues."""

import os
import random
import re
import time

import pytest
import torch
from probes import kill_workers, manager_of, optimizer_step_of, swap_file_descriptor
from toys import mean_square, train

from patrickstar import testing
from patrickstar.errors import DiskError, MoveError, TrainingError

from .tiers import (
    Room,
    blocks,
    files_no_larger_than,
    inputs,
    on_disk,
    open_files,
    options,
    pages_of,
    small_engine,
    worker_threads,
)

CHUNK = r"(?:param16|param32|exp_avg|exp_avg_sq|grad32|delayed16)\[\d+\]"
STEPS = 4


def reference_run(config):
    """Return the losses of each step, and the masters before the first and after each step."""
    torch.manual_seed(0)
    trainer = testing.ReferenceTrainer(blocks, config)
    losses, states = [], [trainer.state_dict()]
    for batch in inputs(STEPS):
        losses += train(trainer, [batch])
        states.append(trainer.state_dict())
    return losses, states


@pytest.fixture(scope="module")
def reference():
    return reference_run(options())


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
    """Train, and append the losses."""
    for number, batch in enumerate(inputs(STEPS)):
        before_step(number)
        loss = mean_square(engine(*batch))
        losses.append(loss.item())
        engine.backward(loss)
        engine.optimizer.step()
    engine.state_dict()


# I/O faults injected into the system


def open_again(engine, flags):
    """Replace the descriptor by the same file, opened with other flags."""
    replace_file(engine, f"/proc/self/fd/{swap_file_descriptor(engine)}", flags | os.O_DIRECT)


def replace_file(engine, path, flags=os.O_RDWR):
    """Replace the descriptor by another file."""
    other = os.open(path, flags)
    os.dup2(other, swap_file_descriptor(engine))
    os.close(other)


def refuse_writes(engine):
    open_again(engine, os.O_RDONLY)


def refuse_reads(engine):
    open_again(engine, os.O_WRONLY)


def fail(engine):
    replace_file(engine, "/proc/self/mem")


def fill_up(engine):
    """Simulate a full disk; reads return other bytes as well."""
    replace_file(engine, "/dev/full")


def cut(engine):
    os.ftruncate(swap_file_descriptor(engine), 4096)


def cut_off(engine):
    os.ftruncate(swap_file_descriptor(engine), engine.inspect().disk.used_bytes * 3 // 4 - 500)


def damage(engine):
    """Overwrite a byte of every page."""
    other = os.open(f"/proc/self/fd/{swap_file_descriptor(engine)}", os.O_RDWR)
    for offset in range(0, engine.inspect().disk.used_bytes, 4096):
        os.pwrite(other, bytes([random.Random(offset).randrange(256)]), offset + 17)
    os.close(other)


def kill_readers(engine):
    kill_workers(engine, "readers")


def kill_writers(engine):
    kill_workers(engine, "writers")


def kill_one(engine):
    kill_workers(engine, "readers", count=1)


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
    """Check that the message names chunk, file and operation, and that one note says that the engine is closed."""
    text = str(error)
    path = re.escape(str(engine.inspect().disk.path))
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
    assert worker_threads() == []
    assert not list(folder.iterdir())
    assert open_files() == before
    left = engine.inspect()
    assert not left.chunks and left.device.chunk_bytes == 0


def check_parameters(engine, error, states):
    """Check that each parameter equals one of these states, or is named in the error; return the lost ones.

    Those that are named as updated in part equal one of the states in each element.
    """
    note = next(note for note in error.__notes__ if "The engine is closed." in note)
    sentences = {
        what: re.findall(r"[\w.]*\d[\w.]*\.(?:weight|bias)", sentence)
        for sentence in note.split(". ")
        for what in ("read back", "in part")
        if what in sentence
    }
    lost, partly = sentences["read back"], sentences.get("in part", [])
    assert f"{len(lost)} parameters could not be read back" in note and not set(lost) & set(partly)
    for name, param in engine.module.named_parameters():
        if name in lost:
            assert param.isnan().all(), name
        elif name in partly:
            assert torch.stack([param.detach() == state[name] for state in states]).any(dim=0).all(), name
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
    before = open_files()
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
    "access",
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
def test_a_disk_that_fails_outside_of_training(config, tmp_path, reference, fault, access):
    before = open_files()
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    run(engine, [])
    fault(engine)
    with pytest.raises(DiskError) as raised:
        for _ in range(3):
            access(engine)
    check_message(raised.value, engine, *FAULTS[fault][1:])
    check_nothing_is_left(engine, tmp_path, before)
    lost = check_parameters(engine, raised.value, reference[1][-1:])
    assert lost


@pytest.mark.parametrize("fault", [damage, fail], ids=lambda fault: fault.__name__)
def test_a_disk_that_fails_under_close(config, tmp_path, reference, fault):
    """`close` must report that parameters are lost: no other call would."""
    before = open_files()
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


def test_an_update_that_fails_under_close_is_reported(config, reference):
    """The masters can be read back, but some of them are updated in part."""
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    for batch in inputs(STEPS):
        engine.backward(mean_square(engine(*batch)))
        engine.optimizer.step()
    index = max(optimizer_step_of(engine).disk_step.pending)
    chunk = manager_of(engine)["exp_avg", index]
    other = os.open(f"/proc/self/fd/{swap_file_descriptor(engine)}", os.O_RDWR)
    os.pwrite(other, b"\x55" * 64, chunk.disk_offset + chunk.nbytes - 64)
    os.close(other)
    with pytest.raises(DiskError, match=rf"exp_avg\[{index}\].*damaged") as raised:
        engine.close()
    note = next(note for note in raised.value.__notes__ if "may be updated in part" in note)
    states = reference[1][-2:]
    for name, param in engine.module.named_parameters():
        same = torch.stack([param.detach() == state[name] for state in states])
        assert same.any(dim=0).all() if name in note else same.flatten(1).all(dim=1).any(), name
    engine.close()


def test_a_corrupt_page_loses_only_the_parameters_on_it(config, reference):
    """All other parameters are read back."""
    torch.manual_seed(0)
    engine = small_engine(blocks, config)
    run(engine, [])
    chunk = manager_of(engine)["param32", 3]
    assert chunk.disk_valid and not chunk.in_memory
    other = os.open(f"/proc/self/fd/{swap_file_descriptor(engine)}", os.O_RDWR)
    os.pwrite(other, b"\x55" * 64, chunk.disk_offset + 4096)
    os.close(other)
    on_page = [
        param.name
        for param in engine.inspect().parameters
        if param.chunk == 3 and 1 in pages_of(param.offset, param.numel, 1024)
    ]
    with pytest.raises(DiskError, match=r"can't read 4096 bytes of param32\[3\].*damaged") as raised:
        engine.state_dict()
    assert check_parameters(engine, raised.value, reference[1][-1:]) == on_page


def test_an_optimizer_of_an_engine_that_was_closed_by_a_fault(engine):
    fail(engine)
    with pytest.raises(DiskError):
        run(engine, [])
    for call in (engine.optimizer.step, engine.optimizer.zero_grad, engine.optimizer.state_dict):
        with pytest.raises(TrainingError, match="closed"):
            call()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [kill_readers, kill_writers, kill_one], ids=lambda fault: fault.__name__)
def test_threads_that_die(config, tmp_path, reference, fault):
    losses, states = reference
    before = open_files()
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


def test_a_disk_that_refuses_writes_beyond_an_offset(config, tmp_path):
    """Reads and some writes still succeed."""
    before = open_files()
    torch.manual_seed(0)
    engine, seen = small_engine(blocks, config), []
    run(engine, seen)
    with files_no_larger_than(engine.inspect().disk.used_bytes // 2), pytest.raises(DiskError) as raised:
        run(engine, [])
    check_message(raised.value, engine, "write", r"File too large.*free space there")
    check_nothing_is_left(engine, tmp_path, before)
