"""How fast a disk is: a short probe of the very path that chunks take, kept for the machine."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from patrickstar.errors import DiskError
from patrickstar.layout.lists import PARAM16
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.disk import DiskTier
from patrickstar.memory.movers import Transfer
from patrickstar.memory.pages import PageBank, can_move_pages
from patrickstar.memory.scratch import PAGE_BYTES, ScratchFile

CHUNK_BYTES = 16 * PAGE_BYTES
ROUNDS = 5
"""Chunks that are written, then read; the middle one counts."""


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second, checksums included."""

    read: float
    write: float


def cache_file() -> Path:
    """Where rates are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patrickstar" / "disk_rates.json"


def disk_rates(directory: str | Path, *, anew: bool = False) -> DiskRates:
    """The rates of the disk that a directory is on: kept ones, or measured now, which takes about a second.

    Raises DiskError if the directory can't be used.
    """
    try:
        key = f"{platform.node()}:{os.stat(directory).st_dev}"
    except OSError as error:
        raise DiskError(
            f"the directory {directory} can't be used: {error.strerror}; create it, or use another"
        ) from error
    file = cache_file()
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):  # not there yet, or half written by another process
        known = {}
    if key in known and not anew:
        return DiskRates(**known[key])
    rates = measure(directory)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known | {key: asdict(rates)}))
    return rates


def measure(directory: str | Path, chunk_bytes: int = CHUNK_BYTES) -> DiskRates:
    """Write some chunks, read them back, and take the time of each."""
    device = torch.device("cpu")
    bank = PageBank() if can_move_pages() else None
    tier = DiskTier(ScratchFile(directory, chunk_bytes * ROUNDS))
    chunks = [Chunk(PARAM16, i, chunk_bytes // 2, "bfloat16", device) for i in range(ROUNDS)]
    buffer = Chunk(PARAM16, ROUNDS, chunk_bytes // 2, "bfloat16", device, bank)
    buffer.take_device()
    memory = buffer.on_device(buffer.whole).view(torch.uint8)
    memory.random_()
    try:
        for chunk in chunks:
            tier.place(chunk)
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
