"""Law 6 with a disk: Ctrl-C and SIGTERM during transfers leave no thread, file or memory behind."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sampling import draws
from toys import train

from patrickstar._memory.swap_file import SwapFile
from patrickstar.errors import PatrickStarError

from .tiers import Room, blocks, inputs, on_disk, open_files, options, small_engine, worker_threads

# Python reports that it ignores an interrupt in a callback of the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOON_S = 10.0
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from laws.tiers import *
from toys import train
config = on_disk(blocks, options(), sys.argv[1], inputs(1)[0], Room(host_bytes=20000))
engine = small_engine(blocks, config)
while True:
    train(engine, inputs(8))
    print("trained", flush=True)
"""


@contextmanager
def interrupted_after(seconds):
    """Send Ctrl-C after a delay, and repeatedly: Python drops it in callbacks of the garbage collector."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def soon():
    """Raise an error if the body hangs."""

    def fail(*_):
        raise TimeoutError("hangs after Ctrl-C")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_interrupts(directory, seeds, follow_up):
    config = on_disk(blocks, options(), directory, inputs(1)[0], Room(host_bytes=20000))
    before = open_files()
    for seed in seeds:
        torch.manual_seed(0)
        engine = small_engine(blocks, config)
        train(engine, inputs(2))
        caught = False
        try:
            with interrupted_after(0.001 + random.Random(seed).random() * 0.05):
                train(engine, inputs(4) * 2500)
        except KeyboardInterrupt as error:
            caught = True
            assert not [note for note in getattr(error, "__notes__", ()) if "could not be read" in note]
        assert caught
        with soon():
            follow_up(engine)
            del engine
            gc.collect()
            join_releases()
        assert worker_threads() == [], f"seed {seed}"
        assert open_files() == before, f"seed {seed}"
        assert not list(directory.iterdir())
    torch.manual_seed(0)
    fresh = small_engine(blocks, config)
    train(fresh, inputs(2))
    fresh.close()


def join_releases():
    """Wait for engines that the garbage collector has found in a worker thread."""
    for thread in threading.enumerate():
        if thread.name == "release":
            thread.join()


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


@pytest.mark.parametrize(("follow_up", "slow_disk"), [(close, False), (close, True), (go_on, False), (leave, False)])
def test_ctrl_c_during_training(tmp_path, monkeypatch, slow_disk, follow_up):
    if slow_disk:
        monkeypatch.setattr("patrickstar._memory.hardware.SwapFile", Slow)
    check_interrupts(tmp_path, range(draws(8)), follow_up)


@pytest.mark.slow
@pytest.mark.parametrize("slow_disk", [False, True])
@pytest.mark.parametrize("follow_up", [close, go_on, leave])
def test_ctrl_c_at_many_more_moments(tmp_path, monkeypatch, slow_disk, follow_up):
    if slow_disk:
        monkeypatch.setattr("patrickstar._memory.hardware.SwapFile", Slow)
    check_interrupts(tmp_path, range(100, 160), follow_up)


class Slow(SwapFile):
    """Swap file on a slow disk, so that most of the time is spent waiting."""

    def read(self, *args):
        time.sleep(0.001)
        super().read(*args)

    def write(self, *args):
        time.sleep(0.001)
        super().write(*args)


def test_processes_end_on_a_signal(tmp_path):
    """A signal ends the process promptly, and leaves no file."""
    started = {}
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        (folder := tmp_path / sent.name).mkdir()
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[sent] = subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes), folder
    try:
        for sent, (process, folder) in started.items():
            check_end(process, sent, folder)
    finally:
        for process, _ in started.values():
            process.kill()
            process.communicate()


def check_end(process, sent, folder):
    assert process.stdout.readline() == "trained\n", process.stderr.read()
    assert not list(folder.iterdir())
    names = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
    assert any(str(folder) in name for name in names), "the swap file is not open without a name"
    began = time.monotonic()
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=SOON_S)
    assert time.monotonic() - began < SOON_S
    assert process.returncode == -sent
    assert ("KeyboardInterrupt" in stderr) == (sent is signal.SIGINT)
    assert "Fatal" not in stderr and "terminate called" not in stderr, stderr
    assert not list(folder.iterdir())
