"""Disk benchmark over the code path that chunk transfers use."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from patrickstar._layout.schema import PARAM16
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.direct_io import PAGE_BYTES
from patrickstar._memory.disk_tier import DiskTier
from patrickstar._memory.swap_file import SwapFile
from patrickstar._memory.vm_pool import PagePool, can_move_pages
from patrickstar._memory.worker_pool import Transfer

CHUNK_BYTES = 16 * PAGE_BYTES
ROUNDS = 5
"""Number of chunks written and read; the result is the median."""


@dataclass(frozen=True)
class DiskRates:
    """Disk throughput in bytes per second, checksums included."""

    read: float
    write: float


def measure(directory: str | Path, chunk_bytes: int = CHUNK_BYTES) -> DiskRates:
    """Time writing and reading back a few chunks; takes about a second.

    Raises:
        DiskError: The directory cannot be used.
    """
    device = torch.device("cpu")
    pages = PagePool() if can_move_pages() else None
    tier = DiskTier(SwapFile(directory, chunk_bytes * ROUNDS))
    chunks = [Chunk(PARAM16, i, chunk_bytes // 2, "bfloat16", device) for i in range(ROUNDS)]
    buffer = Chunk(PARAM16, ROUNDS, chunk_bytes // 2, "bfloat16", device, pages)
    buffer.allocate_device()
    memory = buffer.on_device(buffer.whole).view(torch.uint8)
    memory.random_()
    try:
        for chunk in chunks:
            tier.reserve(chunk)
        write = sorted(_seconds(tier.write(chunk, 0, memory)) for chunk in chunks)
        read = sorted(_seconds(tier.read(chunk, 0, memory)) for chunk in chunks)
    finally:
        tier.close()
        buffer.memory.close()
    return DiskRates(chunk_bytes / read[ROUNDS // 2], chunk_bytes / write[ROUNDS // 2])


def _seconds(transfer: Transfer) -> float:
    start = time.perf_counter()
    transfer.wait()
    return time.perf_counter() - start
