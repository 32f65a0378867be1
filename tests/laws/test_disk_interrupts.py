"""Law 6 with a disk: signals, a full disk and an unusable directory leave no thread, file or memory behind."""

import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sampling import nightly
from toys import mean_square, train

import patrickstar as ps
from patrickstar.errors import BudgetError, DiskError, PatrickStarError

from .test_three_tiers_traffic import Slow
from .tiers import Room, blocks, files_no_larger_than, inputs, on_disk, open_files, options, small_engine
from .tiers import worker_threads as threads

SOON_S = 600
"""Seconds after which something hangs, also on a busy machine."""
PROGRAM = """
import os, sys, torch
torch.set_num_threads(1)
from laws.tiers import *
from toys import train
for line in sys.stdin:
    kind, folder = line.split()
    if (pid := os.fork()) == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
        if kind == "run":
            exec(Path(folder).read_text())
            sys.exit()
        config = on_disk(blocks, options(), folder, inputs(1)[0], Room(host_bytes=20000))
        engine = small_engine(blocks, config)
        while True:
            train(engine, inputs(8))
            print("trained", flush=True)
    print(pid, flush=True)
    print(*os.wait(), flush=True)
"""
"""For each line starts a process that trains, or runs a file, and prints its number and then how it has ended."""
FORKS = """
import patrickstar as ps
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 3))
options = {"device": "cpu", "precision": "fp32", "chunk_size": 256, "activation_offload": True}
engine, optimizer = ps.initialize(model, ps.Config(**options))
train(engine, [(torch.ones(2, 6),)])
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
train(engine, [(torch.ones(2, 6),)])
"""


@pytest.fixture(autouse=True)
def _dropped_interrupts_are_forgotten(monkeypatch):
    """Python drops an interrupt in a callback of the garbage collector; pytest would keep it, and so its frames."""
    report = sys.unraisablehook

    def report_others(unraisable) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", report_others)


@contextmanager
def alarm(action, *seconds):
    """Call `action` after some seconds, and every so many seconds after that."""
    before = signal.signal(signal.SIGALRM, action)
    signal.setitimer(signal.ITIMER_REAL, *seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def hang(*_):
    raise TimeoutError("hangs after Ctrl-C")


def check_interrupts(directory, seeds, follow_up):
    config = on_disk(blocks, options(), directory, inputs(1)[0], Room(host_bytes=20000))
    before = open_files()
    for seed in seeds:
        engine = small_engine(blocks, config)
        train(engine, inputs(2))
        caught = False
        try:
            # Repeatedly: Python drops it in callbacks of the garbage collector.
            with alarm(interrupt, 0.001 + random.Random(seed).random() * 0.05, 1.0):
                train(engine, inputs(4) * 2500)
        except KeyboardInterrupt as error:
            caught = True
            assert not [note for note in getattr(error, "__notes__", ()) if "could not be read" in note]
        assert caught
        with alarm(hang, SOON_S):
            follow_up(engine)
            del engine
            gc.collect()
            for thread in threading.enumerate():  # engines that the garbage collector has found in a worker thread
                if thread.name == "release":
                    thread.join()
        assert threads() == [], f"seed {seed}"
        assert open_files() == before, f"seed {seed}"
        assert not list(directory.iterdir())
    with small_engine(blocks, config) as fresh:
        train(fresh, inputs(2))


def close(engine):
    engine.close()
    for name, param in engine.module.named_parameters():
        assert type(param) is torch.nn.Parameter and param.isfinite().all(), name


def go_on(engine):
    """Train on, or get a clear error."""
    try:
        engine.optimizer.zero_grad()
        train(engine, inputs(2))
        state = engine.state_dict()
        assert all(value.isfinite().all() for value in state.values())
    except PatrickStarError as error:
        assert str(error)
    engine.close()


def leave(engine):
    """Do not close the engine."""


SLOW_DISK = [(close, True), *(pytest.param(each, True, marks=pytest.mark.slow) for each in (go_on, leave))]


@pytest.mark.parametrize(("follow_up", "slow_disk"), [(close, False), (go_on, False), (leave, False), *SLOW_DISK])
def test_ctrl_c_during_training(tmp_path, monkeypatch, slow_disk, follow_up):
    if slow_disk:
        monkeypatch.setattr("patrickstar._tiers.hardware.SwapFile", Slow)
    check_interrupts(tmp_path, [*range(8), *range(100, 130)] if nightly() else [0], follow_up)


@pytest.fixture(scope="module")
def starter():
    """Return a function that starts a process; it returns its number, and another that returns how it has ended."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}

    def ended():
        pid, status = map(int, program.stdout.readline().split())
        return pid, os.waitstatus_to_exitcode(status)

    def start(kind, path):
        program.stdin.write(f"{kind} {path}\n")
        return int(program.stdout.readline()), ended

    with subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes) as program:
        yield start


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_processes_end_on_a_signal(sent, starter, tmp_path):
    """A signal ends the process, and leaves no file."""
    (folder := tmp_path / "swap").mkdir()
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    pid, ended = starter("train", folder)
    try:
        while not out.exists() or "trained" not in out.read_text():
            assert Path(f"/proc/{pid}/fd").exists(), err.read_text()
            time.sleep(0.01)
        assert not list(folder.iterdir())
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert any(f"{folder}/" in name for name in names), "the swap file is not open without a name"
    finally:
        os.kill(pid, sent)
    assert ended() == (pid, -sent)
    assert ("KeyboardInterrupt" in err.read_text()) == (sent is signal.SIGINT)
    assert "Fatal" not in err.read_text() and "terminate called" not in err.read_text(), err.read_text()
    assert not list(folder.iterdir())


def test_a_child_that_exits_the_interpreter_ends_without_error(starter, tmp_path):
    """`sys.exit` in a child of a process with an engine runs exit handlers and finalizers."""
    (script := tmp_path / "script.py").write_text(FORKS)
    pid, ended = starter("run", script)
    assert (ended(), Path(f"{script}.err").read_text()) == ((pid, 0), "")


# A disk that is too small, or an unusable directory: a clear error, and nothing is left behind


@pytest.fixture
def config(tmp_path):
    return on_disk(blocks, options(), tmp_path, inputs(1)[0], Room(host_bytes=20000))


def refused(config, kind):
    """Return the error message of creating an engine; check that nothing is left of it."""
    before = open_files()
    with pytest.raises(kind) as raised:
        small_engine(blocks, config)
    text = str(raised.value)
    del raised
    gc.collect()
    assert threads() == [] and open_files() == before
    return text


def test_a_disk_without_space_for_the_swap_file(config, tmp_path):
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
    # Not even root can create files there, and it reports no free space.
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys")}), (DiskError, BudgetError))
    assert "disk" in text
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys", capacity="1GiB")}), DiskError)
    assert re.match(r"the disk tier's directory /sys can't be written", text)


@pytest.mark.parametrize("how", ["capacity", "system"])
def test_no_room_for_accumulated_gradients(config, tmp_path, how):
    """Gradient lists may need more disk space during training."""
    before = open_files()
    used = 0
    if how == "capacity":
        unlimited = small_engine(blocks, config)
        used = unlimited.inspect().disk.nbytes
        unlimited.close()
        config = config.model_copy(update={"disk": ps.Disk(directory=tmp_path, capacity=used)})
    engine = small_engine(blocks, config)
    limit = files_no_larger_than(engine.inspect().disk.nbytes if how == "system" else resource.RLIM_INFINITY)
    kind = BudgetError if how == "capacity" else DiskError
    with limit, pytest.raises(kind, match=r"grad32\[\d+\]") as raised:
        for batch in inputs(2):
            engine.backward(mean_square(engine(*batch)))
    del raised
    if how == "capacity":
        engine.optimizer.zero_grad()
        train(engine, inputs(4))
    engine.close()
    assert threads() == [] and open_files() == before and not list(tmp_path.iterdir())
