"""What runs beside the training thread: copies and pages on their way, the time lost waiting for them, their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.disk_tier import DiskTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.transfer_counters import TransferCounters
from patrickstar._memory.worker_pool import Transfer
from patrickstar.errors import DiskError, MoveError, TrainingError


class ChunkComm(Protocol):
    """Other processes that have parts of chunks."""

    @property
    def serving(self) -> bool:
        """Whether something is being done for them, which can't wait for them."""
        ...

    def gather(self, chunk: Chunk) -> Transfer:
        """Begin to have all of a chunk in device memory that it has taken."""
        ...

    def reduce(self, chunk: Chunk) -> Transfer:
        """Begin to add up the gradients over a chunk, each part at its owner's."""
        ...


class IODispatch:
    """Begins transfers and waits for them. After an error of the disk, or of a thread, nothing moves any more."""

    def __init__(self, hardware: Hardware, disk: DiskTier | None, page: torch.Tensor) -> None:
        self.hardware = hardware
        self.disk = disk
        self.copies = hardware.copies()
        self.counters = TransferCounters()
        self.failed: BaseException | None = None
        """The error after which nothing is known to be whole."""
        self.comm: ChunkComm | None = None
        """Other processes that have parts of chunks."""
        self.salvaging = False
        """Whether the engine is being closed, and reads what can still be read."""
        self._page = page

    def up(self, chunk: Chunk, urgent: bool) -> Transfer:
        """Begin to move a chunk to device memory that it has taken, from the host, from disk, or from its owners."""
        if chunk.sharded:
            assert self.comm is not None and chunk.shards_valid, f"{chunk} is nowhere"
            self.check()
            with self.stalled():
                return self.comm.gather(chunk)
        if chunk.host_valid:
            return self.copies.up(chunk)
        assert chunk.disk_valid, f"{chunk} is nowhere"
        return self.read(chunk, 0, chunk.device_bytes_view(), urgent)

    def to_owners(self, chunk: Chunk) -> Transfer:
        """Begin to add up the gradients over a shared chunk, with those of the other processes."""
        assert self.comm is not None, f"{chunk} has no owners"
        self.check()
        with self.stalled():
            return self.comm.reduce(chunk)

    def read(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Begin to read whole pages of a chunk, from byte `start` on, into a flat tensor of bytes."""
        assert self.disk is not None, f"{chunk} has no disk to come from"
        self.check()
        self.counters.disk_read_bytes += self.disk.written_bytes(chunk, start, target.numel())
        return self.disk.read(chunk, start, target, urgent)

    def write(self, chunk: Chunk, start: int, source: torch.Tensor) -> Transfer:
        """Begin to write them."""
        assert self.disk is not None, f"{chunk} has no disk to go to"
        self.check()
        self.disk.reserve(chunk)
        self.counters.disk_write_bytes += source.numel()
        return self.disk.write(chunk, start, source)

    def pages_of(self, chunk: Chunk, first: int, numel: int, write: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """The pages of a chunk on disk that hold these elements, one after the other, written back if asked for.

        Each comes with the number of its first element, in memory that the next one takes over.
        """
        assert self.disk is not None and chunk.disk_valid, f"{chunk} is nowhere"
        itemsize = chunk.dtype.itemsize
        length = self.disk.page_bytes // itemsize
        for begin in range(first // length * length, first + numel, length):
            page = self._page[: min(length, chunk.numel - begin) * itemsize]
            self.wait(self.read(chunk, begin * itemsize, page, urgent=True))
            yield begin, page.view(chunk.dtype)
            if write:
                chunk.disk_version += 1
                self.wait(self.write(chunk, begin * itemsize, page))

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer. Raises what went wrong with it, after which nothing moves any more."""
        try:
            if transfer.done:
                transfer.wait()
                return
            transfer.prioritize()
            with self.stalled():
                transfer.wait()
        except (DiskError, MoveError) as error:
            self.failed = error
            raise

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """What happens inside is time lost to movement."""
        start = self.hardware.seconds()
        yield
        self.counters.stall_s += self.hardware.seconds() - start

    def check(self) -> None:
        """Raise TrainingError if bytes were lost before."""
        if self.failed is not None and not self.salvaging:
            raise TrainingError(
                f"this engine has stopped, since bytes of its chunks were lost ({self.failed}); close it, and go on "
                f"from a saved state with a new one"
            ) from self.failed

    def close(self) -> None:
        """Stop all threads, and give the disk's room back; transfers under way end or are dropped."""
        self.copies.close()
        if self.disk is not None:
            self.disk.close()
