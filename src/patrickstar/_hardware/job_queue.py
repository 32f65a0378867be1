"""Queue of the jobs of worker threads, and the transfers that consist of them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue

import torch

from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._hardware.transfer import Transfer
from patrickstar.errors import MoveError

Job = Callable[[torch.Tensor], None]
"""Called in a worker thread with the thread's staging buffer."""

POLL_S = 0.05
DIED = "a worker thread died"

# [Note: threads that may die]
# A training loop must never wait for a dead thread, nor treat a page as transferred that was not. So the end of a
# transfer is derived: a job counts as running, under its thread, from before it is dequeued until after it returned,
# and a transfer has ended once no job is queued and no living thread runs one. A thread killed in between stays in
# `_running`.
#
# Ctrl-C may interrupt the waiting thread between any two bytecodes, and the garbage collector may finalize the pool
# while any lock is held. Both are safe if they interrupt C code only: plain locks, and SimpleQueue, which is reentrant.


class WorkerThread(threading.Thread):
    """Daemon thread that sets `ended` at its end.

    `Thread.is_alive` does not serve: if Ctrl-C interrupts it, CPython before 3.13 takes a living thread for an ended
    one from then on.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.ended.set()


def _has_ended(thread: threading.Thread) -> bool:
    return thread.ended.is_set() if isinstance(thread, WorkerThread) else not thread.is_alive()


class WorkerTransfer(Transfer):
    """Jobs submitted together and awaited together."""

    def __init__(self, jobs: Sequence[Job], label: str, queue: "JobQueue | None" = None) -> None:
        self.label = label
        self._queue = JobQueue() if queue is None else queue
        self._queued = deque(jobs)
        self._jobs = len(jobs)
        self._urgent = False
        self._ready: Callable[[], bool] | None = None
        self._wait_until_ready: Callable[[], None] | None = None
        self._optional = False
        self._number = 0
        self._running: list[threading.Thread] = []
        self._began_s: float | None = None
        self._ended_s = 0.0
        self._error: BaseException | None = None
        self._changed: SimpleQueue[None] = SimpleQueue()

    @property
    def ready(self) -> bool:
        """True unless its jobs would wait for the device."""
        try:
            return self._ready is None or self._ready()
        except Exception:  # its job meets the error, too, and reports it
            return True

    @property
    def done(self) -> bool:
        """True once all jobs have ended, with or without an error. See [Note: threads that may die]."""
        return not self._queued and all(_has_ended(thread) for thread in list(self._running))

    def interval(self, clock: DeviceClock | None) -> tuple[float, float] | None:
        """Return when the first of its jobs began and the last one ended; None if they have not."""
        return None if self._began_s is None or not self.done else (self._began_s, self._ended_s)

    def wait(self) -> None:
        """Wait until all jobs have ended; raise the first error of a job, at every call.

        The first error cancels all queued jobs. Raises MoveError if a thread died, or if queued jobs were cancelled.
        May be interrupted and repeated.
        """
        while not self.done:
            if any(thread.ended.is_set() for thread in self._queue.threads):
                self._queue.cancel_queued(self, DIED)
            self._sleep()
        try:
            if self._error is None and self._running:
                self._error = self._incomplete_error(DIED)
            if self._error is not None:
                raise self._error
        finally:
            del self  # the error's traceback would hold the transfer, which holds the error

    def prioritize(self) -> None:
        self._queue.prioritize(self)

    def withdraw(self) -> bool:
        """Cancel the transfer if none of its jobs has begun. Return True if it was cancelled."""
        return self._queue.withdraw(self, self._jobs)

    def cancel(self) -> None:
        """Cancel the queued jobs, and wait for the running ones."""
        self._queue.cancel_queued(self, "it was cancelled")
        while not self.done:
            self._sleep()

    def _incomplete_error(self, reason: str) -> MoveError:
        queued, running = len(self._queued), len(self._running)
        return MoveError(
            f"{self.label}: {reason} before all bytes had moved ({queued} jobs had not begun, {running} had not "
            f"ended); initialise a new engine"
        )

    def _sleep(self) -> None:
        """Wait for the end of the transfer, at most `POLL_S`: a thread that dies sends no wake-up."""
        try:
            self._changed.get(timeout=POLL_S)
            self._changed.put(None)  # for other waiting threads
        except Empty:
            self._queue.wakeups.put(None)  # Ctrl-C may have struck after jobs were queued and before a thread was woken


class JobQueue:
    """Queue shared by the threads. It holds no reference to the pool, which may be collected before the threads end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        self.transfers: deque[WorkerTransfer] = deque()  # with queued jobs, the next one first
        self.unfinished: set[WorkerTransfer] = set()
        self.threads: list[WorkerThread] = []
        self.numbers = count()
        self.stopping = False

    def add(
        self,
        transfer: WorkerTransfer,
        urgent: bool,
        ready: Callable[[], bool] | None = None,
        wait_until_ready: Callable[[], None] | None = None,
        optional: bool = False,
    ) -> None:
        with self.lock:
            if self.stopping:
                raise MoveError(f"{transfer.label}: the worker pool was closed; initialise a new engine")
            if not transfer._queued:
                return
            self.unfinished.add(transfer)
            transfer._urgent, transfer._optional = urgent, optional
            transfer._ready, transfer._wait_until_ready = ready, wait_until_ready
            transfer._number = next(self.numbers)
            before = sum(other._urgent for other in self.transfers) if urgent else len(self.transfers)
            self.transfers.insert(before, transfer)
            for _ in transfer._queued:
                self.wakeups.put(None)

    def prioritize(self, transfer: WorkerTransfer) -> None:
        with self.lock:
            if transfer in self.transfers:
                self.transfers.remove(transfer)
                self.transfers.appendleft(transfer)
                transfer._urgent, transfer._optional = True, False

    def dequeue(self) -> tuple[WorkerTransfer, Job] | None:
        """Dequeue the next job, and count it as running."""
        with self.lock:
            while self.transfers:
                transfer = self._next()
                if transfer._queued:
                    transfer._running.append(threading.current_thread())
                    return transfer, transfer._queued.popleft()
                self.transfers.remove(transfer)
            return None

    def _next(self) -> WorkerTransfer:
        """Return the first transfer that is ready, else the last optional one that is, else the one submitted first."""
        for transfer in self.transfers:
            if not transfer._optional and transfer.ready:
                return transfer
        last = next((transfer for transfer in reversed(self.transfers) if transfer._optional and transfer.ready), None)
        return min(self.transfers, key=lambda transfer: transfer._number) if last is None else last

    def wait_for_ready(self) -> None:
        """Wait until the next job is ready. Until then no job begins, so that any can be withdrawn."""
        while True:
            with self.lock:
                transfer = self._next() if self.transfers else None
                wait = None if transfer is None or transfer.ready else transfer._wait_until_ready
            if transfer is None or wait is None:
                return
            try:
                wait()
            except Exception:  # its job waits, too, and reports the error
                transfer._wait_until_ready = None

    def run_next(self, stage: torch.Tensor) -> None:
        self.wait_for_ready()
        dequeued = self.dequeue()
        if dequeued is None:
            return
        transfer, job = dequeued
        del dequeued
        if transfer._began_s is None:
            transfer._began_s = time.perf_counter()
        try:
            try:
                job(stage)
            finally:
                del job  # free what it kept alive before its end is visible
        except BaseException as error:
            with self.lock:
                transfer._error = _wrapped_error(error, transfer.label) if transfer._error is None else transfer._error
            self.cancel_queued(transfer, "a job failed")
        transfer._ended_s = time.perf_counter()
        with self.lock:
            transfer._running.remove(threading.current_thread())
        self.finish_if_done(transfer)
        del transfer  # or its error would hold this frame, which holds the transfer

    def cancel_queued(self, transfer: WorkerTransfer, reason: str) -> None:
        """Cancel queued jobs. If there are any, the transfer fails with `reason`."""
        with self.lock:
            if transfer._error is None and transfer._queued:
                transfer._error = transfer._incomplete_error(reason)
            cancelled, transfer._queued = transfer._queued, deque()
        self.finish_if_done(transfer)
        del cancelled

    def withdraw(self, transfer: WorkerTransfer, jobs: int) -> bool:
        """Cancel a transfer if all its jobs are still queued."""
        with self.lock:
            if len(transfer._queued) < jobs:
                return False
            self.cancel_queued(transfer, "it was cancelled")
            return True

    def finish_if_done(self, transfer: WorkerTransfer) -> None:
        """Remove a transfer that has ended, and wake its waiting threads."""
        with self.lock:
            if transfer.done:
                self.unfinished.discard(transfer)
                with suppress(ValueError):
                    self.transfers.remove(transfer)
                transfer._changed.put(None)

    def stop(self) -> None:
        """End the threads after their current jobs. Takes no lock: the garbage collector may call it."""
        self.stopping = True
        for _ in range(len(self.threads) + 1):
            self.wakeups.put(None)

    def cancel_all(self) -> None:
        with self.lock:
            unfinished = list(self.unfinished)
        for transfer in unfinished:
            self.cancel_queued(transfer, "the worker pool was closed")

    def join(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _wrapped_error(error: BaseException, label: str) -> BaseException:
    """Return the error for the training thread; a request to end a worker thread must not end that one."""
    if isinstance(error, Exception):
        return error
    wrapped = MoveError(
        f"{label}: a worker thread was told to end ({error!r}) during a transfer; initialise a new engine"
    )
    wrapped.__cause__ = error
    return wrapped
