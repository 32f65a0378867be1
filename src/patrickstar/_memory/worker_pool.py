"""Movers: threads that move bytes between tiers while the others compute."""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch

from patrickstar._memory.swap_file import PAGE_BYTES
from patrickstar._memory.vm_pool import private_memory
from patrickstar.errors import MoveError

DiskUpdate = Callable[[torch.Tensor], None]

THREAD_NAME = "patrickstar-"
"""What the names of all threads that move bytes begin with."""

POLL_S = 0.05
EXIT_S = 10.0
DIED = "a worker thread died"

# [Note: threads that may die]
# A training loop must never wait for a thread that is gone, nor take a page for moved that was not. So what has ended
# is derived: a job counts as running, under its thread, from before it leaves the line until after it returned, and a
# transfer has ended once none of its jobs waits and no living thread runs one. A thread killed anywhere in between
# leaves its mark in `_running`.
#
# Ctrl-C may strike the thread that waits between any two bytecodes, and the garbage collector may end the movers while
# any lock is held. Both are safe where they meet C code only: plain locks, and SimpleQueue, which is made for that.


class Transfer:
    """Jobs handed in together, which end together."""

    def __init__(self, jobs: Sequence[DiskUpdate], what: str, board: "_JobQueue") -> None:
        self.what = what
        self._board = board
        self._waiting = deque(jobs)
        self._running: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._changed: SimpleQueue[None] = SimpleQueue()

    def __repr__(self) -> str:
        return f"Transfer({self.what!r}, {'done' if self.done else 'in flight'})"

    @property
    def done(self) -> bool:
        """Whether all jobs have ended, well or not. See [Note: threads that may die]."""
        return not self._waiting and not any(thread.is_alive() for thread in list(self._running))

    def wait(self) -> None:
        """Block until all jobs have ended, and raise the first error of one, at every call.

        After the first error the jobs that have not begun never do. Raises MoveError if a thread died, or if jobs were
        dropped. May be interrupted, and called again.
        """
        while not self.done:
            if any(not thread.is_alive() for thread in self._board.threads):
                self._board.drop(self, DIED)
            self._stop_following()
        try:
            if self._error is None and self._running:
                self._error = self._lost(DIED)
            if self._error is not None:
                raise self._error
        finally:
            del self  # the error's traceback would hold the transfer, which holds the error

    def prioritize(self) -> None:
        """Somebody waits: jobs that have not begun go before all others."""
        self._board.prioritize(self)

    def cancel(self) -> None:
        """Drop the jobs that have not begun, and wait for those that have."""
        self._board.drop(self, "it was cancelled")
        while not self.done:
            self._stop_following()

    def _lost(self, reason: str) -> MoveError:
        waiting, running = len(self._waiting), len(self._running)
        return MoveError(
            f"{self.what}: {reason} before all bytes had moved ({waiting} jobs had not begun, {running} had not "
            f"ended); initialise a new engine"
        )

    def _stop_following(self) -> None:
        """Sleep until the transfer has ended, but not for long: a thread that dies wakes nobody."""
        try:
            self._changed.get(timeout=POLL_S)
            self._changed.put(None)  # for whoever else waits
        except Empty:
            self._board.wakeups.put(None)  # Ctrl-C may have come between queueing jobs and waking a thread for them


class _JobQueue:
    """What the threads share. It does not know the Movers, which may be collected while the threads live."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        self.line: deque[Transfer] = deque()  # those with jobs that wait, the next one first
        self.open: set[Transfer] = set()
        self.threads: list[threading.Thread] = []
        self.stopping = False

    def add(self, transfer: Transfer, urgent: bool) -> None:
        with self.lock:
            if self.stopping:
                raise MoveError(f"{transfer.what}: the movers were closed; initialise a new engine")
            if not transfer._waiting:
                return
            self.open.add(transfer)
            if urgent:
                self.line.appendleft(transfer)
            else:
                self.line.append(transfer)
            for _ in transfer._waiting:
                self.wakeups.put(None)

    def prioritize(self, transfer: Transfer) -> None:
        with self.lock:
            if transfer in self.line:
                self.line.remove(transfer)
                self.line.appendleft(transfer)

    def take(self) -> tuple[Transfer, DiskUpdate] | None:
        """The next job, which counts as running from here on."""
        with self.lock:
            while self.line:
                transfer = self.line[0]
                if transfer._waiting:
                    transfer._running.append(threading.current_thread())
                    return transfer, transfer._waiting.popleft()
                self.line.popleft()
            return None

    def run_next(self, stage: torch.Tensor) -> None:
        taken = self.take()
        if taken is None:
            return
        transfer, job = taken
        del taken
        try:
            try:
                job(stage)
            finally:
                del job  # what it kept alive is free before anybody hears that it has ended
        except BaseException as error:
            with self.lock:
                transfer._error = _wrapped_error(error, transfer.what) if transfer._error is None else transfer._error
            self.drop(transfer, "a job failed")
        with self.lock:
            transfer._running.remove(threading.current_thread())
        self.settle(transfer)
        del transfer  # or its error would hold this frame, which holds the transfer

    def drop(self, transfer: Transfer, reason: str) -> None:
        """Have the jobs that wait never begin. If there are any, the transfer has an error from here on."""
        with self.lock:
            if transfer._error is None and transfer._waiting:
                transfer._error = transfer._lost(reason)
            dropped, transfer._waiting = transfer._waiting, deque()
        self.settle(transfer)
        del dropped

    def settle(self, transfer: Transfer) -> None:
        """Take note if a transfer has ended."""
        with self.lock:
            if transfer.done:
                self.open.discard(transfer)
                with suppress(ValueError):
                    self.line.remove(transfer)
                transfer._changed.put(None)

    def stop(self) -> None:
        """Have the threads end after the jobs they are at. Takes no lock: the garbage collector may call it."""
        self.stopping = True
        for _ in range(len(self.threads) + 1):
            self.wakeups.put(None)

    def drop_all(self) -> None:
        with self.lock:
            transfers = list(self.open)
        for transfer in transfers:
            self.drop(transfer, "the movers were closed")

    def join(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _wrapped_error(error: BaseException, what: str) -> BaseException:
    """The error that the training thread raises: what was meant for this thread alone must not end that one."""
    if isinstance(error, Exception):
        return error
    told = MoveError(
        f"{what}: a worker thread was told to end ({error!r}) while it moved bytes; initialise a new engine"
    )
    told.__cause__ = error
    return told


def _work(board: _JobQueue, stage: torch.Tensor, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while True:
        board.wakeups.get()
        if board.stopping:
            break
        board.run_next(stage)
    board.drop_all()
    board.wakeups.put(None)  # for a thread that was not there yet when the others were told


def _leave(board: _JobQueue) -> None:
    """At the interpreter's exit: a thread that comes back from C++ after it would end the process with an abort."""
    board.stop()
    board.join(EXIT_S)


def _collected(board: _JobQueue, leave: Callable[[], None]) -> None:
    atexit.unregister(leave)
    board.stop()


class WorkerPool:
    """Threads that run jobs, each with a staging buffer of its own.

    `threads` of them, called after `name`, start at the first `submit`. Each hands its jobs a uint8 tensor of
    `stage_bytes` on page-aligned memory, whose content is undefined. They end with `close`, or when the movers are
    collected. `begin` is called first in each thread.
    """

    def __init__(
        self, threads: int, name: str, stage_bytes: int = PAGE_BYTES, begin: Callable[[], None] | None = None
    ) -> None:
        assert threads > 0, f"{threads} threads move nothing"
        self.name = name
        self._begin = begin
        self._count = threads
        self._stage_bytes = stage_bytes
        self._board = _JobQueue()
        leave = partial(_leave, self._board)
        self._finalizer = weakref.finalize(self, _collected, self._board, leave)
        self._finalizer.atexit = False
        atexit.register(leave)

    @property
    def in_flight(self) -> int:
        """How many transfers have not ended."""
        with self._board.lock:
            return sum(not transfer.done for transfer in self._board.open)

    def submit(self, jobs: Sequence[DiskUpdate], what: str, *, urgent: bool = False) -> Transfer:
        """Queue `jobs` at the end, or, if `urgent`, before all that wait. `what` they move is named in errors.

        Jobs run in any number of threads at once, and begin in their order. Raises MoveError after `close`.
        """
        transfer = Transfer(jobs, what, self._board)
        self._start(what)
        self._board.add(transfer, urgent)
        return transfer

    def _start(self, what: str) -> None:
        with self._board.lock:
            while len(self._board.threads) < self._count and not self._board.stopping:
                name = f"{THREAD_NAME}{self.name}-{len(self._board.threads)}"
                try:
                    stage = torch.frombuffer(private_memory(self._stage_bytes), dtype=torch.uint8)
                    stage.zero_()  # what was never written is not there yet, and a meter would miss it
                    thread = threading.Thread(
                        target=_work, args=(self._board, stage, self._begin), name=name, daemon=True
                    )
                    thread.start()
                except (OSError, RuntimeError) as error:
                    raise MoveError(
                        f"{what}: can't start thread {name} with {self._stage_bytes} bytes of its own: {error}; free "
                        f"memory, or raise the limit on processes (ulimit -u)"
                    ) from error
                self._board.threads.append(thread)

    def close(self) -> None:
        """Drop the jobs that wait, and end the threads after those they are at."""
        self._board.stop()
        self._board.drop_all()
        self._board.join()
        self._finalizer()
