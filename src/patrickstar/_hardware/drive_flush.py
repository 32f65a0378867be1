"""Flushes of a drive's write cache: how long one takes, and what the kernel says of the cache."""

import mmap
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from patrickstar._hardware.direct_io import BLOCK_BYTES, try_direct

WRITES = 16


def flush_seconds(directory: Path) -> float:
    """Return the seconds of a flush after a write of one block; the median of some. Raises OSError."""
    seconds = []
    with tempfile.TemporaryFile(dir=directory) as file:
        block = mmap.mmap(-1, BLOCK_BYTES)
        try_direct(file.fileno(), os.pwritev)
        for number in range(WRITES):
            os.pwritev(file.fileno(), [block], number % 2 * BLOCK_BYTES)
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def write_cache(directory: Path) -> str | None:
    """Return "write back" if the kernel flushes a cache of the drive, "write through" if it has none that needs it.

    None if the file system is on no single drive, or the kernel does not say.
    """
    device = os.stat(directory).st_dev
    drive = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (drive, drive.resolve().parent):  # a partition's drive is the folder above
        try:
            return (folder / "queue" / "write_cache").read_text().strip()
        except OSError:
            continue
    return None
