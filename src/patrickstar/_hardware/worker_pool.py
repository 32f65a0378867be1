"""Worker pools: threads that transfer bytes between tiers during computation."""

import atexit
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.job_queue import Job, JobQueue, WorkerThread, WorkerTransfer
from patrickstar._hardware.vm_pool import private_memory
from patrickstar.errors import MoveError

THREAD_NAME = "patrickstar-"
"""Prefix of the names of all worker threads."""
EXIT_S = 10.0


def _pageable_stage(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(private_memory(nbytes), dtype=torch.uint8)


def _run_worker(queue: JobQueue, stage: torch.Tensor, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while True:
        queue.wakeups.get()
        if queue.stopping:
            break
        queue.run_next(stage)
    queue.cancel_all()
    queue.wakeups.put(None)  # for a thread that started after `stop`


def _join_at_exit(queue: JobQueue) -> None:
    """Join the threads at interpreter exit: one that returned from C++ later would abort the process."""
    queue.stop()
    queue.join(EXIT_S)


def _finalize(queue: JobQueue, join_at_exit: Callable[[], None]) -> None:
    atexit.unregister(join_at_exit)
    queue.stop()


class WorkerPool:
    """Threads that run jobs, each with its own staging buffer.

    Threads start at the first `submit`, and end at `close` or when the pool is collected. Each calls `begin` first, and
    passes to its jobs a page-aligned uint8 tensor of `stage_bytes` with undefined content, from `new_stage`.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        stage_bytes: int = PAGE_BYTES,
        begin: Callable[[], None] | None = None,
        new_stage: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        assert threads > 0, f"a worker pool needs a thread, not {threads}"
        self.name = name
        self._begin = begin
        self._new_stage = _pageable_stage if new_stage is None else new_stage
        self._count = threads
        self._stage_bytes = stage_bytes
        self._queue = JobQueue()
        join_at_exit = partial(_join_at_exit, self._queue)
        self._finalizer = weakref.finalize(self, _finalize, self._queue, join_at_exit)
        self._finalizer.atexit = False
        atexit.register(join_at_exit)

    @property
    def in_flight(self) -> int:
        with self._queue.lock:
            return sum(not transfer.done for transfer in self._queue.unfinished)

    def submit(
        self,
        jobs: Sequence[Job],
        label: str,
        *,
        urgent: bool = False,
        ready: Callable[[], bool] | None = None,
        wait_until_ready: Callable[[], None] | None = None,
        optional: bool = False,
    ) -> WorkerTransfer:
        """Queue jobs at the end, or behind other urgent ones if `urgent`; errors name the `label`.

        Jobs that would wait for the device, because `ready` returns False, let others go first; if no job is ready, a
        thread calls `wait_until_ready` before it begins one. `optional` jobs run after all others, the last submitted
        first.

        Jobs start in order, and run concurrently in all threads. Raises MoveError after `close`.
        """
        transfer = WorkerTransfer(jobs, label, self._queue)
        self._start(label)
        self._queue.add(transfer, urgent, ready, wait_until_ready, optional)
        return transfer

    def _start(self, label: str) -> None:
        with self._queue.lock:
            while len(self._queue.threads) < self._count and not self._queue.stopping:
                name = f"{THREAD_NAME}{self.name}-{len(self._queue.threads)}"
                try:
                    stage = self._new_stage(self._stage_bytes)
                    stage.zero_()  # fault the pages in now, or the memory meter would miss them
                    thread = WorkerThread(partial(_run_worker, self._queue, stage, self._begin), name)
                    thread.start()
                except (OSError, RuntimeError) as error:
                    raise MoveError(
                        f"{label}: can't start thread {name} with {self._stage_bytes} bytes of staging memory: "
                        f"{error}; free memory, or raise the limit on processes (ulimit -u)"
                    ) from error
                self._queue.threads.append(thread)

    def close(self) -> None:
        """Cancel all queued jobs, and join the threads after their current ones."""
        self._queue.stop()
        self._queue.cancel_all()
        self._queue.join()
        self._finalizer()
