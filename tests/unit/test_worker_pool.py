"""Test worker pools: order, errors, Ctrl-C, killed threads, and cleanup."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import KILL
from sampling import draws

from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar.errors import MoveError

SOON_S = 20.0

# Python ignores SystemExit in a thread; pytest warns about it.
killing = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def nothing(stage: torch.Tensor) -> None:
    pass


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"patrickstar-{name}-")]


def soon(condition) -> bool:
    until = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


class Gate:
    """Job that blocks its thread until it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self, stage: torch.Tensor) -> None:
        self.begun.set()
        assert self.opened.wait(SOON_S)


@pytest.fixture
def pool():
    made = WorkerPool(1, "test")
    yield made
    made.close()
    assert not threads_of("test")


def test_threads_start_with_first_job_and_own_aligned_buffers():
    pool = WorkerPool(3, "stages", 8192)
    assert not threads_of("stages")
    seen, barrier = [], threading.Barrier(3)

    def job(stage: torch.Tensor) -> None:
        seen.append((threading.current_thread().name, stage.data_ptr(), stage.dtype, stage.numel()))
        stage.fill_(7)
        barrier.wait(SOON_S)

    for _ in range(2):
        pool.submit([job] * 3, "exp_avg[0]").wait()
    assert [thread.daemon for thread in threads_of("stages")] == [True] * 3
    assert len(set(seen)) == 3 and len(seen) == 6
    assert {name for name, *_ in seen} == {f"patrickstar-stages-{n}" for n in range(3)}
    assert len({at for _, at, *_ in seen}) == 3 and all(at % 4096 == 0 for _, at, *_ in seen)
    assert {(dtype, numel) for *_, dtype, numel in seen} == {(torch.uint8, 8192)}
    pool.close()


@settings(max_examples=draws(20), deadline=None)
@given(threads=st.integers(1, 4), counts=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6))
def test_every_job_runs_once(threads, counts):
    pool, ran, transfers = WorkerPool(threads, "counts", 4096), [], []
    for n, (count, urgent) in enumerate(counts):
        jobs = [lambda _, key=(n, k): ran.append(key) for k in range(count)]
        transfers.append(pool.submit(jobs, f"chunk {n}", urgent=urgent))
    for transfer in transfers:
        transfer.wait()
    assert sorted(ran) == [(n, k) for n, (count, _) in enumerate(counts) for k in range(count)]
    assert pool.in_flight == 0
    pool.close()


def test_jobs_start_in_order_and_urgent_ones_first(pool):
    gate, ran = Gate(), []

    def queue(name: str, urgent: bool = False):
        return pool.submit([lambda _, n=n: ran.append(f"{name}{n}") for n in range(2)], name, urgent=urgent)

    transfers = [pool.submit([gate], "gate")]
    assert gate.begun.wait(SOON_S)
    transfers += [queue("a"), queue("b"), queue("c", urgent=True), queue("d", urgent=True)]
    transfers[-3].prioritize()  # a thread waits for b
    assert pool.in_flight == 5 and not any(transfer.done for transfer in transfers)
    gate.opened.set()
    for transfer in transfers:
        transfer.wait()
    assert ran == ["b0", "b1", "c0", "c1", "d0", "d1", "a0", "a1"]
    assert pool.in_flight == 0


def test_an_awaited_transfer_lets_others_go_first_until_it_is_ready(pool):
    gate, ran, computed = Gate(), [], threading.Event()

    def compute(stage: torch.Tensor) -> None:
        ran.append("b")
        computed.set()

    blocked = pool.submit([gate], "gate")
    assert gate.begun.wait(SOON_S)
    awaited = pool.submit([lambda _: ran.append("a")], "a", ready=computed.is_set, optional=True)
    others = [pool.submit([compute], "b", optional=True), pool.submit([lambda _: ran.append("c")], "c", optional=True)]
    others[0].prioritize()
    awaited.prioritize()
    gate.opened.set()
    for transfer in (blocked, awaited, *others):
        transfer.wait()
    assert ran == ["b", "a", "c"]


@pytest.mark.parametrize("kind", [OSError, SystemExit, KeyboardInterrupt])
def test_first_error_is_raised_at_every_wait_and_cancels_later_jobs(pool, kind):
    gate, ran, error = Gate(), [], kind("the disk burns")
    blocked = pool.submit([gate], "gate")
    failing = pool.submit([ran.append, Mock(side_effect=error), ran.append], "exp_avg[3]")
    after = pool.submit([ran.append], "exp_avg[4]")
    gate.opened.set()
    for _ in range(2):
        # An exit request to a worker thread must not end the training thread.
        with pytest.raises(kind if issubclass(kind, Exception) else MoveError) as raised:
            failing.wait()
        assert error in (raised.value, raised.value.__cause__) and failing.done
    blocked.wait()
    after.wait()
    assert len(ran) == 2 and pool.in_flight == 0 and len(threads_of("test")) == 1


def test_cancel_waits_for_running_jobs_and_drops_queued_ones(pool):
    gate, ran = Gate(), []
    whole, cut = pool.submit([gate], "whole"), pool.submit([ran.append], "cut")
    later = pool.submit([ran.append], "later")
    assert gate.begun.wait(SOON_S)
    cut.cancel()
    assert cut.done and not whole.done and pool.in_flight == 2
    threading.Timer(0.1, gate.opened.set).start()
    whole.cancel()
    assert whole.done and gate.opened.is_set()
    whole.wait()
    later.wait()
    assert len(ran) == 1
    with pytest.raises(MoveError, match=r"cut: it was cancelled before all bytes had moved \(1 jobs had not begun"):
        cut.wait()
    later.cancel()
    later.wait()


def test_close_cancels_queued_jobs_and_joins_threads():
    pool, gate = WorkerPool(2, "closing"), Gate()
    begun = pool.submit([gate, gate], "begun")
    waiting = pool.submit([nothing] * 3, "exp_avg[2]")
    assert soon(lambda: len(begun._running) == 2)
    threading.Timer(0.1, gate.opened.set).start()
    for _ in range(2):
        pool.close()
    assert not threads_of("closing") and pool.in_flight == 0
    begun.wait()
    with pytest.raises(MoveError, match=r"exp_avg\[2\]: the worker pool was closed before all bytes had moved"):
        waiting.wait()
    with pytest.raises(MoveError, match=r"exp_avg\[3\]: the worker pool was closed; initialise a new engine"):
        pool.submit([nothing], "exp_avg[3]")
    WorkerPool(2, "idle").close()


def test_ctrl_c_interrupts_wait_and_not_the_transfer(pool):
    gate, ran = Gate(), []
    transfer = pool.submit([gate, ran.append], "exp_avg[3]")
    for _ in range(3):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        assert not transfer.done and pool.in_flight == 1
    gate.opened.set()
    transfer.wait()
    assert [stage.nbytes for stage in ran] == [PAGE_BYTES]


def test_a_living_thread_that_python_takes_for_ended_still_works(pool, monkeypatch):
    """Before CPython 3.13, Ctrl-C within `Thread.is_alive` has this effect."""
    gate = Gate()
    pool.submit([nothing], "first").wait()
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)
    transfer = pool.submit([gate, nothing], "exp_avg[3]")
    assert not transfer.done
    gate.opened.set()
    transfer.wait()


@killing
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_killed_while_idle_is_detected(threads):
    pool = WorkerPool(threads, "killed")
    pool.submit([nothing] * threads, "first").wait()
    for victim in threads_of("killed"):
        assert KILL(victim.ident, SystemExit, None) == 1
    begin = time.monotonic()
    transfer = pool.submit([nothing] * 1000, "exp_avg[3]")
    pattern = r"exp_avg\[3\]: a worker thread died before all bytes had moved .* initialise a new engine"
    for _ in range(2):
        with pytest.raises(MoveError, match=pattern):
            transfer.wait()
    assert time.monotonic() - begin < SOON_S / 2
    transfer.cancel()
    pool.close()
    assert not threads_of("killed") and pool.in_flight == 0


@killing
def test_thread_killed_between_job_and_its_completion_is_detected(pool):
    """The job's finalizer kills its thread."""

    class LastWish:
        def __call__(self, stage: torch.Tensor) -> None:
            self.ref = None
            refs.append(weakref.ref(self, partial(KILL, threading.get_ident(), SystemExit)))

    refs = []
    transfer = pool.submit([LastWish()], "exp_avg[3]")
    with pytest.raises(MoveError, match=r"exp_avg\[3\]: a worker thread died"):
        transfer.wait()
    assert transfer.done and refs[0]() is None


def test_exception_raised_in_a_job_from_outside_is_its_error(pool):
    def long(stage: torch.Tensor) -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    begun = threading.Event()
    transfer = pool.submit([long], "exp_avg[3]")
    assert begun.wait(SOON_S)
    KILL(threads_of("test")[0].ident, SystemExit, None)
    with pytest.raises(MoveError, match="told to end"):
        transfer.wait()
    pool.submit([nothing], "exp_avg[4]").wait()


def test_references_of_a_job_are_freed_when_it_ends(pool):
    gate, needed = Gate(), torch.zeros(9)
    alive = weakref.ref(needed)
    pool.submit([gate], "gate")
    transfer = pool.submit([lambda _, tensor=needed: tensor.add_(1), nothing], "exp_avg[3]")
    del needed
    gc.collect()
    assert alive() is not None
    gate.opened.set()
    transfer.wait()
    assert alive() is None


def test_failed_transfer_forms_no_reference_cycle(pool):
    def fail(stage: torch.Tensor) -> None:
        raise OSError("the disk burns")

    gc.disable()
    try:
        transfer = pool.submit([fail], "exp_avg[3]")
        gone = weakref.ref(transfer)
        with pytest.raises(OSError, match="burns"):
            transfer.wait()
        del transfer
        assert soon(lambda: gone() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("cycle", [False, True])
def test_collected_pool_ends_its_threads(cycle):
    pool, gate = WorkerPool(2, "collected"), Gate()
    pool.submit([nothing], "first").wait()
    begun, waiting = pool.submit([gate, gate], "begun"), pool.submit([nothing], "waiting")
    assert soon(lambda: len(begun._running) == 2)
    pool.itself = pool if cycle else None
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    gate.opened.set()
    begun.wait()
    with pytest.raises(MoveError, match="waiting: the worker pool was closed"):
        waiting.wait()
    assert soon(lambda: not threads_of("collected"))


def test_thread_that_cannot_start_raises():
    with pytest.raises(MoveError, match=r"exp_avg\[3\]: can't start thread patrickstar-large-0 with \d+ bytes"):
        WorkerPool(1, "large", 1 << 60).submit([nothing], "exp_avg[3]")


def test_interpreter_exits_with_jobs_in_flight():
    code = (
        "import torch; from patrickstar._hardware.worker_pool import WorkerPool\n"
        "pool = WorkerPool(2, 'leave')\n"
        "a, b = torch.zeros(2**22), torch.zeros(2**22)\n"
        "pool.submit([lambda stage: a.copy_(b)] * 10000, 'x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
