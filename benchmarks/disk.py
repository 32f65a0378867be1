"""The disk tier's file against the disk: reads and writes by SwapFile through a WorkerPool, and by a bare loop.

python benchmarks/disk.py [--directory .] [--gib 1] [--threads 1 2 4] [--rounds 5]

All sides take turns in one process on one file, since two files may lie on places of different speed: pages of 64 MiB
chunks in their order, past the page cache. The bare loop is `preadv` and `pwritev` alone in as many threads. Each ratio
is the median over rounds of two neighbours' times.
"""

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import torch
from report import publish

from patrickstar._memory.swap_file import PAGE_BYTES, SwapFile
from patrickstar._memory.worker_pool import WorkerPool

CHUNK_BYTES = 64 * 1024**2
SIDES = ("bare", "unchecked", "ours")


class Work:
    """A file, and three ways to move all of it."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.file = SwapFile(directory, nbytes)
        assert self.file.direct, f"{directory} does not take direct I/O, which this is about"
        self.chunks = [self.file.reserve(CHUNK_BYTES, f"chunk {n}") for n in range(nbytes // CHUNK_BYTES)]

    def by(self, side: str, write: bool, threads: int) -> Callable[[], None]:
        self.file.checksums = side == "ours"
        return self._bare(write, threads) if side == "bare" else self._moved(write, threads)

    def _moved(self, write: bool, threads: int) -> Callable[[], None]:
        act = self.file.write if write else self.file.read
        movers = WorkerPool(threads, "disk")

        def job(at: int) -> Callable[[torch.Tensor], None]:
            return lambda stage: act(at, memoryview(stage.numpy()), PAGE_BYTES, "page")

        def run() -> None:
            transfers = [
                movers.submit([job(at) for at in range(chunk, chunk + CHUNK_BYTES, PAGE_BYTES)], f"chunk at {chunk}")
                for chunk in self.chunks
            ]
            for transfer in transfers:
                transfer.wait()

        fill(movers, threads)
        return run

    def _bare(self, write: bool, threads: int) -> Callable[[], None]:
        act = os.pwritev if write else os.preadv
        stages: list[memoryview] = []
        movers = WorkerPool(threads, "bare")  # only for buffers like theirs
        fill(movers, threads, stages)

        def run() -> None:
            turns = itertools.count()

            def loop(stage: memoryview) -> None:
                while (at := next(turns) * PAGE_BYTES) < self.nbytes:
                    assert act(self.file._fd, [stage], at) == PAGE_BYTES

            workers = [threading.Thread(target=loop, args=(stage,)) for stage in stages]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        return run


def fill(movers: WorkerPool, threads: int, stages: list[memoryview] | None = None) -> None:
    """Put noise, which no disk compresses, into every thread's stage, and hand the stages out."""
    synchronize_processes = threading.Barrier(threads)

    def job(stage: torch.Tensor) -> None:
        stage.random_()
        if stages is not None:
            stages.append(memoryview(stage.numpy()))
        synchronize_processes.wait()

    movers.submit([job] * threads, "noise").wait()


def measure(work: Work, threads: int, rounds: int) -> list[list[str]]:
    times: dict[tuple[str, bool], list[float]] = {(side, write): [] for side in SIDES for write in (True, False)}
    for number in range(rounds):
        turn = number % len(SIDES)  # nobody is always first
        for write in (True, False):
            for side in SIDES[turn:] + SIDES[:turn]:
                act = work.by(side, write, threads)
                start = time.perf_counter()
                act()
                times[side, write].append(time.perf_counter() - start)
            work.by("ours", True, threads)()  # what is read has to have checksums
    rows = []
    for write in (True, False):
        by_name = {side: times[side, write] for side in SIDES}
        rates = [f"{median(work.nbytes / seconds / 1e9 for seconds in by_name[name]):.2f}" for name in SIDES]
        share, cost = (
            median(a / b for a, b in zip(by_name[name], by_name[other], strict=True))
            for name, other in (("bare", "ours"), ("ours", "unchecked"))
        )
        rows.append(["write" if write else "read", str(threads), *rates, f"{share:.2f}", f"{100 * (cost - 1):+.1f} %"])
    return rows


def file_system(directory: Path) -> str:
    """The kind of file system a directory lies in."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    path = directory.resolve()
    return next((mounts[str(at)] for at in (path, *path.parents) if str(at) in mounts), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes = max(1, int(options.gib * 1024**3) // CHUNK_BYTES) * CHUNK_BYTES
    work = Work(options.directory, nbytes)
    work.by("ours", True, 2)()  # the first write to a block also marks it as written
    rows = [row for threads in options.threads for row in measure(work, threads, options.rounds)]
    publish(
        "disk",
        "cpu",
        f"The disk tier's file on {file_system(options.directory)}: {nbytes / 1024**3:.2f} GiB in chunks of 64 MiB, "
        f"pages of {PAGE_BYTES // 1024**2} MiB, direct I/O, medians of {options.rounds} interleaved rounds. Bare is "
        f"`preadv` and `pwritev` in a loop in as many threads; unchecked is ours with `checksums=False`. The cost of "
        f"checksums is the time they add, and share is bare time by our time. Goal: share at least 0.9.",
        [
            "operation",
            "threads",
            "bare GB/s",
            "unchecked GB/s",
            "ours GB/s",
            "share",
            "cost of checksums",
        ],
        sorted(rows, key=lambda row: row[0]),
    )


if __name__ == "__main__":
    main()
