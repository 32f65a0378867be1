"""Law 6 with a disk: Ctrl-C and SIGTERM in mid-move leave no thread, no file and no memory behind."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from patrickstar._memory.swap_file import SwapFile
from patrickstar.errors import PatrickStarError

from .tiers import Room, blocks, descriptors, inputs, mean_square, movers, on_disk, options, small_engine

# Where it meets the garbage collector, Python says that it is ignored.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOON_S = 10.0
BATCHES = inputs(4)
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from tests.laws.tiers import *
config = on_disk(blocks, options(), sys.argv[1], inputs(1)[0], Room(host_bytes=20000))
engine = small_engine(blocks, config)
while True:
    for batch in inputs(8):
        engine.backward(mean_square(engine(*batch)))
        engine.optimizer.step()
    print("trained", flush=True)
"""


@contextmanager
def interrupted_after(seconds):
    """Ctrl-C at some moment, and again: where it meets a callback of the garbage collector's, Python drops it."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def soon():
    """An error where something hangs."""

    def fail(*_):
        raise TimeoutError("hangs after Ctrl-C")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def train(engine, count):
    for batch in itertools.islice(itertools.cycle(BATCHES), count):
        engine.backward(mean_square(engine(*batch)))
        engine.optimizer.step()


def check_interrupts(directory, seeds, then):
    config = on_disk(blocks, options(), directory, inputs(1)[0], Room(host_bytes=20000))
    before = descriptors()
    for seed in seeds:
        torch.manual_seed(0)
        engine = small_engine(blocks, config)
        train(engine, 2)
        caught = False
        try:
            with interrupted_after(0.001 + random.Random(seed).random() * 0.05):
                train(engine, 10000)
        except KeyboardInterrupt as error:
            caught = True
            assert not [note for note in getattr(error, "__notes__", ()) if "could not be read" in note]
        assert caught
        with soon():
            then(engine)
            del engine
            gc.collect()
        assert movers() == [], f"seed {seed}"
        assert descriptors() == before, f"seed {seed}"
        assert not list(directory.iterdir())
    torch.manual_seed(0)
    fresh = small_engine(blocks, config)
    train(fresh, 2)
    fresh.close()


def close(engine):
    engine.close()
    for name, param in engine.module.named_parameters():
        assert type(param) is torch.nn.Parameter and param.isfinite().all(), name


def go_on(engine):
    """Either it trains, or it says why not."""
    try:
        engine.optimizer.zero_grad()
        train(engine, 2)
        state = engine.state_dict()
        assert all(value.isfinite().all() for value in state.values())
    except PatrickStarError as error:
        assert str(error)
    engine.close()


def leave(engine):
    """Nobody closes it."""


@pytest.mark.parametrize(("then", "slow_disk"), [(close, False), (close, True), (go_on, False), (leave, False)])
def test_ctrl_c_in_the_middle_of_training(tmp_path, monkeypatch, slow_disk, then):
    if slow_disk:
        monkeypatch.setattr("patrickstar._memory.hardware.SwapFile", Slow)
    check_interrupts(tmp_path, range(3), then)


@pytest.mark.slow
@pytest.mark.parametrize("slow_disk", [False, True])
@pytest.mark.parametrize("then", [close, go_on, leave])
def test_ctrl_c_at_many_more_moments(tmp_path, monkeypatch, slow_disk, then):
    if slow_disk:
        monkeypatch.setattr("patrickstar._memory.hardware.SwapFile", Slow)
    check_interrupts(tmp_path, range(100, 160), then)


class Slow(SwapFile):
    """A disk with which most of the time is spent waiting."""

    def read(self, *args):
        time.sleep(0.001)
        super().read(*args)

    def write(self, *args):
        time.sleep(0.001)
        super().write(*args)


def test_processes_that_are_told_to_end(tmp_path):
    """By the signal, promptly, and without a file."""
    started = {}
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        (folder := tmp_path / sent.name).mkdir()
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[sent] = subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes), folder
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
    open_files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
    assert any(str(folder) in name for name in open_files), "the scratch file is there, without a name"
    began = time.monotonic()
    process.send_signal(sent)
    _, said = process.communicate(timeout=SOON_S)
    assert time.monotonic() - began < SOON_S
    assert process.returncode == -sent
    assert ("KeyboardInterrupt" in said) == (sent is signal.SIGINT)
    assert "Fatal" not in said and "terminate called" not in said, said
    assert not list(folder.iterdir())
