"""Law 6 with a disk: a failing disk raises one clear error, leaves nothing behind, and no computation continues."""

import os
import random
import re
from functools import cache

import pytest
import torch
from probes import fail_reads, kill_workers, manager_of, optimizer_step_of, swap_file_descriptor
from seeded import reference_of
from toys import mean_square, train

import patrickstar as ps
from patrickstar.errors import DiskError, MoveError, TrainingError

from . import tiers
from .tiers import Room, blocks, inputs, on_disk, open_files, options, small_engine

CHUNK = r"(?:param16|param32|low16|exp_avg|exp_avg_sq|grad32|delayed16)\[\d+\]"
STEPS = 4


UPDATES = {"exact": None, "in backward": ps.InBackward(), "delayed": ps.Delayed(after=1)}


@cache
def reference_run(update):
    """Return the losses of each step, and the masters before the first and after each step."""
    trainer = reference_of(blocks, options(update=UPDATES[update]))
    losses, states = [], [trainer.state_dict()]
    for batch in inputs(STEPS):
        losses += train(trainer, [batch])
        states.append(trainer.state_dict())
    return losses, states


@pytest.fixture(params=["exact"])
def update(request):
    return request.param


with_any_update = pytest.mark.parametrize("update", UPDATES, indirect=True)


@pytest.fixture
def reference(update):
    return reference_run(update)


@pytest.fixture
def config(tmp_path, update):
    return on_disk(blocks, options(update=UPDATES[update]), tmp_path, inputs(1)[0], Room(host_bytes=20000))


@pytest.fixture
def engine(config):
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


def cut(engine, nbytes=4096):
    os.ftruncate(swap_file_descriptor(engine), nbytes)


def cut_off(engine):
    cut(engine, engine.inspect().disk.used_bytes * 3 // 4 - 500)


def overwrite(engine, contents):
    """Write bytes at offsets of the swap file."""
    other = os.open(f"/proc/self/fd/{swap_file_descriptor(engine)}", os.O_RDWR)
    for offset, values in contents.items():
        os.pwrite(other, values, offset)
    os.close(other)


def damage(engine):
    """Overwrite a byte of every page."""
    pages = range(0, engine.inspect().disk.used_bytes, 4096)
    overwrite(engine, {offset + 17: bytes([random.Random(offset).randrange(256)]) for offset in pages})


FAULTS = {
    "refused writes": (lambda engine: open_again(engine, os.O_RDONLY), "write", r"Bad file descriptor"),
    "refused reads": (lambda engine: open_again(engine, os.O_WRONLY), "read", r"Bad file descriptor"),
    "failure": (lambda engine: replace_file(engine, "/proc/self/mem"), "read|write", r"Input/output error"),
    "full": (lambda engine: replace_file(engine, "/dev/full"), "read|write", r"No space left on device|damaged"),
    "cut": (cut, "read", r"short read|damaged"),
    "cut off": (cut_off, "read", r"short read|damaged"),
    "damage": (damage, "read", r"the page is damaged"),
}
"""What happens to the swap file, the operation that fails then, and why. A full disk returns other bytes, too."""
KILLS = {
    "readers": lambda engine: kill_workers(engine, "readers"),
    "writers": lambda engine: kill_workers(engine, "writers"),
    "one reader": lambda engine: kill_workers(engine, "readers", count=1),
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
    for call in (lambda: engine(*inputs(1)[0]), engine.state_dict):
        with pytest.raises(TrainingError, match="closed"):
            call()
    assert tiers.worker_threads() == [] and open_files() == before and not list(folder.iterdir())
    left = engine.inspect()
    assert not left.chunks and left.device.chunk_bytes == 0


def check_parameters(engine, error, states):
    """Check that each parameter equals one of these states, or is named in the error; return the lost ones.

    Those that are named as updated in part equal one of the states in each element; those that are named as rounded may
    equal a rounded one.
    """
    note = next(note for note in error.__notes__ if "The engine is closed." in note)
    sentences = {
        what: re.findall(r"[\w.]*\d[\w.]*\.(?:weight|bias)", sentence)
        for sentence in note.split(". ")
        for what in ("read back", "in part", "rounded")
        if what in sentence
    }
    lost, partly, rounded = (sentences.get(what, []) for what in ("read back", "in part", "rounded"))
    assert not lost or f"{len(lost)} parameters could not be read back" in note
    assert not set(lost) & set(partly) and ("No parameter is damaged" in note) == (not lost + partly + rounded)
    for name, param in engine.module.named_parameters():
        if name in lost:
            assert param.isnan().all(), name
        elif name in partly + rounded:
            found = [state[name] for state in states] + [state[name].bfloat16() for state in states if name in rounded]
            assert torch.stack([param.detach() == state for state in found]).any(dim=0).all(), name
        else:
            assert any(torch.equal(param.detach(), state[name]) for state in states), name
    return lost


def check_another_engine_works(config, losses):
    seen = []
    with small_engine(blocks, config) as fresh:
        run(fresh, seen)
    assert seen == losses


@with_any_update
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fails_in_training(config, tmp_path, reference, fault, when):
    losses, states = reference
    before = open_files()
    engine, seen = small_engine(blocks, config), []
    act, operation, reason = FAULTS[fault]
    with pytest.raises(DiskError) as raised:
        run(engine, seen, lambda number: number == when and act(engine))
    check_message(raised.value, engine, operation, reason)
    assert when <= len(seen) and seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states[when - 1 : len(seen) + 1 + (config.update == ps.InBackward())])
    del raised
    engine.close()
    check_another_engine_works(config, losses)


@with_any_update
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kill", KILLS)
def test_threads_that_die(config, tmp_path, reference, kill):
    losses, states = reference
    before = open_files()
    engine, seen = small_engine(blocks, config), []
    with pytest.raises(MoveError, match=rf"{CHUNK}.*a worker thread (died|was told to end)") as raised:
        run(engine, seen, lambda number: number == 1 and KILLS[kill](engine))
        run(engine, [])
    check_note(raised.value)
    assert seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states)
    del raised
    check_another_engine_works(config, losses)


ACCESSES = {
    "state_dict": lambda engine: engine.state_dict(),
    "optimizer": lambda engine: engine.optimizer.state_dict(),
    "forward": lambda engine: engine(*inputs(1)[0]),
    "load": lambda engine: engine.load_state_dict(blocks().state_dict()),
    "parameters": lambda engine: [param.add(1) for param in engine.module.parameters()],
    "module": lambda engine: engine.module.state_dict()["0.0.weight"].clone(),
}


ACCESSES_AND_FAULTS = [
    pytest.param(access, fault, marks=() if (number + turn) % 2 else pytest.mark.slow)
    for number, access in enumerate(ACCESSES)
    for turn, fault in enumerate(("damage", "refused reads"))
]


@pytest.mark.parametrize(("access", "fault"), ACCESSES_AND_FAULTS)
def test_a_disk_that_fails_outside_of_training(config, tmp_path, reference, fault, access):
    before = open_files()
    engine = small_engine(blocks, config)
    run(engine, [])
    FAULTS[fault][0](engine)
    with pytest.raises(DiskError) as raised:
        for _ in range(3):
            ACCESSES[access](engine)
    check_message(raised.value, engine, *FAULTS[fault][1:])
    check_nothing_is_left(engine, tmp_path, before)
    assert check_parameters(engine, raised.value, reference[1][-1:])


@pytest.mark.parametrize("fault", ["damage", "failure"])
def test_a_disk_that_fails_under_close(config, tmp_path, reference, fault):
    """`close` must report that parameters are lost: no other call would."""
    before = open_files()
    engine = small_engine(blocks, config)
    run(engine, [])
    FAULTS[fault][0](engine)
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
    engine = small_engine(blocks, config)
    train(engine, inputs(STEPS))
    index = max(optimizer_step_of(engine).updates.disk.unfinished)
    chunk = manager_of(engine)["exp_avg", index]
    overwrite(engine, {chunk.disk.offset + chunk.nbytes - 64: b"\x55" * 64})
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
    engine = small_engine(blocks, config)
    run(engine, [])
    chunk = manager_of(engine)["param32", 3]
    assert chunk.disk.valid and not chunk.in_memory
    overwrite(engine, {chunk.disk.offset + 4096: b"\x55" * 64})
    in_chunk = [param for param in engine.inspect().parameters if param.chunk == 3]
    on_page = [param.name for param in in_chunk if 1 in tiers.pages_of(param.offset, param.numel, 1024)]
    with pytest.raises(DiskError, match=r"can't read 4096 bytes of param32\[3\].*damaged") as raised:
        engine.state_dict()
    assert check_parameters(engine, raised.value, reference[1][-1:]) == on_page


def test_an_optimizer_of_an_engine_that_was_closed_by_a_fault(engine):
    FAULTS["failure"][0](engine)
    with pytest.raises(DiskError):
        run(engine, [])
    for call in (engine.optimizer.step, engine.optimizer.zero_grad, engine.optimizer.state_dict):
        with pytest.raises(TrainingError, match="closed"):
            call()


def test_a_disk_that_refuses_writes_beyond_an_offset(config, tmp_path):
    """Reads and some writes still succeed."""
    before = open_files()
    engine = small_engine(blocks, config)
    run(engine, [])
    with tiers.files_no_larger_than(engine.inspect().disk.used_bytes // 2), pytest.raises(DiskError) as raised:
        run(engine, [])
    check_message(raised.value, engine, "write", r"File too large.*free space there")
    check_nothing_is_left(engine, tmp_path, before)


@pytest.mark.parametrize("update", ["delayed"], indirect=True)
@pytest.mark.parametrize("index", [0, *(pytest.param(index, marks=pytest.mark.slow) for index in range(1, 5)), 5])
def test_newer_parameters_that_a_step_cannot_read(engine, tmp_path, reference, index):
    before = open_files() - 1  # the swap file
    for number, batch in enumerate(inputs(2)):
        engine.backward(mean_square(engine(*batch)))
        if number == 0:
            engine.optimizer.step()
    fail_reads(engine, f"delayed16[{index}]", DiskError("no such sector"))
    with pytest.raises(DiskError, match="no such sector") as raised:
        engine.optimizer.step()
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, reference[1])
