"""Compare reads and writes of the disk tier's swap file with a bare loop over the same file.

python benchmarks/disk.py [--directory .] [--gib 1] [--threads 1 2 4] [--rounds 5]

All variants alternate in one process on one file, because a second file could be in a region of the disk with another
speed. They transfer the pages of 64 MiB chunks in order, with direct I/O. The bare loop calls only `preadv` and
`pwritev`, in the same number of threads. Each ratio is the median over rounds of two adjacent times.
"""

import itertools
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from threading import Barrier

import psutil
import torch
from report import options, publish
from steps import in_threads, ratio_of, seconds_of

from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._tiers.swap_file import SwapFile

CHUNK_BYTES = 64 * 1024**2
SIDES = ("bare", "unchecked", "ours")


class Work:
    """Swap file and three ways to transfer all of it."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.file = SwapFile(directory, nbytes)
        assert self.file.direct, f"{directory} does not support direct I/O, which this benchmark measures"
        self.chunks = [self.file.reserve(CHUNK_BYTES, f"chunk {n}") for n in range(nbytes // CHUNK_BYTES)]

    def by(self, side: str, write: bool, threads: int) -> Callable[[], None]:
        self.file.checksums = side == "ours"
        return self._bare(write, threads) if side == "bare" else self._pooled(write, threads)

    def _pooled(self, write: bool, threads: int) -> Callable[[], None]:
        transfer_page = self.file.write if write else self.file.read
        pool, barrier = WorkerPool(threads, "disk"), Barrier(threads)

        def fill(stage: torch.Tensor) -> None:
            stage.random_()
            barrier.wait()

        def job(offset: int) -> Callable[[torch.Tensor], None]:
            return lambda stage: transfer_page(offset, memoryview(stage.numpy()), PAGE_BYTES, "page")

        def run() -> None:
            pages = [range(chunk, chunk + CHUNK_BYTES, PAGE_BYTES) for chunk in self.chunks]
            for transfer in [pool.submit([job(offset) for offset in each], f"chunk at {each.start}") for each in pages]:
                transfer.wait()

        pool.submit([fill] * threads, "noise").wait()
        return run

    def _bare(self, write: bool, threads: int) -> Callable[[], None]:
        transfer_page = os.pwritev if write else os.preadv
        stages = [noise() for _ in range(threads)]

        def run() -> None:
            pages = itertools.count()

            def loop(stage: mmap.mmap) -> None:
                while (offset := next(pages) * PAGE_BYTES) < self.nbytes:
                    assert transfer_page(self.file._fd, [stage], offset) == PAGE_BYTES

            in_threads(partial(loop, stage) for stage in stages)

        return run


def noise() -> mmap.mmap:
    """Return a page that can't be compressed."""
    page = mmap.mmap(-1, PAGE_BYTES)
    page.write(os.urandom(PAGE_BYTES))
    return page


def measure(work: Work, threads: int, rounds: int) -> list[dict[str, str]]:
    times: dict[tuple[str, bool], list[float]] = {(side, write): [] for side in SIDES for write in (True, False)}
    for number in range(rounds):
        turn = number % len(SIDES)  # rotate the order
        for write in (True, False):
            for side in SIDES[turn:] + SIDES[:turn]:
                times[side, write].append(seconds_of(work.by(side, write, threads)))
            work.by("ours", True, threads)()  # the following reads need checksums
    rows = []
    for write in (True, False):
        measured = {side: times[side, write] for side in SIDES}
        row = {"operation": "write" if write else "read", "threads": str(threads)}
        row |= {f"{side} GB/s": f"{work.nbytes / median(measured[side]) / 1e9:.2f}" for side in SIDES}
        cost = 100 * (ratio_of(measured["ours"], measured["unchecked"]) - 1)
        shares = {"share": f"{ratio_of(measured['bare'], measured['ours']):.2f}", "cost of checksums": f"{cost:+.1f} %"}
        rows.append(row | shares)
    return rows


def file_system(directory: Path) -> str:
    """Return the file system type of a directory."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    path = directory.resolve()
    return next((mounts[str(parent)] for parent in (path, *path.parents) if str(parent) in mounts), "unknown")


def main() -> None:
    given = options(__doc__, directory=Path("."), gib=1.0, threads=[1, 2, 4], rounds=5)
    nbytes = max(1, int(given.gib * 1024**3) // CHUNK_BYTES) * CHUNK_BYTES
    work = Work(given.directory, nbytes)
    work.by("ours", True, 2)()  # the first write to a block also updates the file system's metadata
    rows = [row for threads in given.threads for row in measure(work, threads, given.rounds)]
    publish(
        "disk",
        f"Swap file of the disk tier on {file_system(given.directory)}: {nbytes / 1024**3:.2f} GiB in chunks of 64 "
        f"MiB, pages of {PAGE_BYTES // 1024**2} MiB, direct I/O, medians of {given.rounds} interleaved rounds. Bare: "
        f"`preadv` and `pwritev` in a loop, in the same number of threads. Unchecked: ours with `checksums=False`. "
        f"Cost of checksums: the time they add. Share: bare time / our time; goal: at least 0.9.",
        sorted(rows, key=lambda row: row["operation"]),
    )


if __name__ == "__main__":
    main()
