"""Sequential file writer with page checksums, parallel writes and zero-copy where possible."""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from xxhash import xxh3_64_hexdigest

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.direct_io import BLOCK_BYTES, FULL, PAGE_BYTES, free_bytes, reserve, transfer_all, try_direct
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import round_up
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._layout.byte_size import format_size
from patrickstar._tiers.host_arena import HostArena
from patrickstar.errors import CheckpointError, MoveError

WRITERS = 4
"""Threads; each writes one page at a time."""
PAGES = 2 * WRITERS + 1
"""Pages of memory per file: a stage and a copy buffer per thread, and the buffer that is being filled."""

# [Note: zero-copy writes]
# A caller may pass bytes with an owner instead of having them copied. A page that is one contiguous, aligned piece of
# host memory is written from there; a writer thread assembles other pages when it writes them. Before owned bytes
# change or move, the owner must be released: bytes in the incomplete page are copied, and writes in flight are waited
# for. Bytes without an owner are copied at once.
#
# Bytes of an accelerator are copied on a stream of their own. The writer thread waits for that; the caller does not.
# The release of their owner orders later work of the device after the copies.


@dataclass
class _Part:
    """Bytes of a page: offset in the page, address in memory, owner, and a reference that keeps the memory alive."""

    begin: int
    address: int
    nbytes: int
    owner: Hashable
    keep_alive: torch.Tensor

    def memory(self) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.uint8)


class DirectWriter:
    """New file of exactly `nbytes`, reserved at once, written with O_DIRECT where the file system supports it.

    Allocates `PAGES` pages of `page_bytes`. Computes the checksum of every page: XXH3, 64 bits, in hex. Raises
    CheckpointError if the file cannot be created or the disk is full.

    Args:
        accelerator: The accelerator whose bytes may be written; without it, the caller waits for their copies.
    """

    def __init__(
        self, path: Path, nbytes: int, *, page_bytes: int = PAGE_BYTES, accelerator: TorchDevice | None = None
    ) -> None:
        assert page_bytes % BLOCK_BYTES == 0, f"page_bytes={page_bytes} is not a multiple of {BLOCK_BYTES}"
        self.path, self.nbytes, self.page_bytes = path, nbytes, page_bytes
        self.sums = [""] * -(-nbytes // page_bytes)
        self.accepted_bytes = 0
        """Bytes passed to `write` so far."""
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.new_stream()
        self._workers = WorkerPool(
            WRITERS, "save", page_bytes, begin=None if accelerator is None else accelerator.enter_worker
        )
        self._arena = HostArena((WRITERS + 1) * page_bytes, accelerator)
        self._buffers = self._arena.memory.view(-1, page_bytes)
        self._buffers.zero_()  # touch the pages now, so that the memory meter counts them
        self._parts: list[_Part] = []
        """Parts of the page that is not full yet."""
        self._copied: torch.Event | None = None
        """Event behind the last copy from the accelerator."""
        self._copied_by_owner: dict[Hashable, torch.Event] = {}
        self._in_flight: deque[Transfer] = deque()
        self._in_flight_by_owner: dict[Hashable, list[Transfer]] = {}
        """Writes in flight, by owner of their bytes."""
        self._failed: OSError | MoveError | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if nbytes:
                reserve(self._fd, 0, nbytes)
            self._direct = try_direct(self._fd)
        except OSError as error:
            self.abandon()
            raise write_error(self.path, error, self.nbytes) from error

    @property
    def has_room(self) -> bool:
        """True if a page can be submitted without waiting for the disk."""
        return sum(not transfer.done for transfer in self._in_flight) < WRITERS

    def write(self, values: torch.Tensor, owner: Hashable = None) -> None:
        """Append the bytes of a contiguous tensor on any device; see [Note: zero-copy writes] for `owner`.

        Raises CheckpointError if the disk fails.
        """
        source = values.detach().reshape(-1).view(torch.uint8)
        first = 0
        while first < source.numel():
            number, begin = divmod(self.accepted_bytes, self.page_bytes)
            length = min(source.numel() - first, self.page_bytes - begin)
            part = source[first : first + length]
            self._add(number, begin, part, owner)
            self.accepted_bytes += length
            first += length
            if begin + length == self.page_bytes or self.accepted_bytes == self.nbytes:
                self._send(number, begin + length)

    def release(self, owner: Hashable) -> None:
        """Stop reading an owner's memory; the next call reports a failed write."""
        number = self.accepted_bytes // self.page_bytes
        parts, self._parts = self._parts, []
        for part in parts:
            if part.owner == owner:
                self._add(number, part.begin, part.memory(), None)
            else:
                self._parts.append(part)
        if owner in self._copied_by_owner:
            assert self._accelerator is not None
            self._accelerator.order(self._copied_by_owner.pop(owner))
        for transfer in self._in_flight_by_owner.pop(owner, ()):
            try:
                transfer.wait()
            except (OSError, MoveError) as error:
                self._failed = error

    def close(self) -> None:
        """Wait for all writes and sync the file to disk. Raises CheckpointError if that fails."""
        assert self.accepted_bytes == self.nbytes, f"{self.path} lacks {self.nbytes - self.accepted_bytes} bytes"
        try:
            self._wait_for(0)
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise write_error(self.path, error, self.nbytes) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without completing it."""
        self._workers.close()
        self._arena.unlock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, number: int, begin: int, part: torch.Tensor, owner: Hashable) -> None:
        """Add a part to the current page, directly after the previous part."""
        if owner is None or part.device.type != "cpu":
            part, owner = self._copy(number, begin, part, owner), None
        last = self._parts[-1] if self._parts else None
        if last is not None and last.owner == owner and last.address + last.nbytes == part.data_ptr():
            last.nbytes += part.numel()
        else:
            self._parts.append(_Part(begin, part.data_ptr(), part.numel(), owner, part))

    def _copy(self, number: int, begin: int, part: torch.Tensor, owner: Hashable) -> torch.Tensor:
        """Copy a part into the page's buffer; the previous page in this buffer is written already."""
        target = self._buffers[number % (WRITERS + 1)][begin : begin + part.numel()]
        if part.device.type == "cpu":
            ctypes.memmove(target.data_ptr(), part.data_ptr(), part.numel())
        elif self._accelerator is None or self._stream is None:
            target.copy_(part)
        else:
            with self._accelerator.use(self._stream):
                target.copy_(part, non_blocking=True)
                self._copied = self._accelerator.record()
            if owner is None:
                self._accelerator.order(self._copied)
            else:
                self._copied_by_owner[owner] = self._copied
        return target

    def _wait_for(self, limit: int) -> None:
        """Wait until at most `limit` writes are in flight."""
        try:
            while self._in_flight and (len(self._in_flight) > limit or self._in_flight[0].done):
                self._in_flight[0].wait()
                self._in_flight.popleft()
            if self._failed is not None:
                raise self._failed
        except OSError as error:
            raise write_error(self.path, error, self.nbytes) from error
        except MoveError as error:  # a MoveError would report a lost chunk, and none is lost
            raise CheckpointError(f"{self.path} is incomplete: {error}") from error

    def _send(self, number: int, length: int) -> None:
        self._wait_for(WRITERS - 1)
        parts, fd, sums, offset = self._parts, self._fd, self.sums, number * self.page_bytes
        accelerator, copied = self._accelerator, self._copied
        whole = round_up(length, BLOCK_BYTES) if self._direct else length

        def run(stage: torch.Tensor) -> None:
            if accelerator is not None and copied is not None:
                accelerator.wait(copied)
            address = parts[0].address
            if len(parts) > 1 or address % BLOCK_BYTES or parts[0].nbytes < whole:
                address = stage.data_ptr()
                for part in parts:
                    ctypes.memmove(address + part.begin, part.address, part.nbytes)
            memory = memoryview((ctypes.c_char * whole).from_address(address)).cast("B")
            sums[number] = xxh3_64_hexdigest(memory[:length])
            write_all(fd, memory, offset)

        transfer = self._workers.submit([run], f"page {number} of {self.path.name}")
        self._in_flight.append(transfer)
        for owner in dict.fromkeys(part.owner for part in self._parts if part.owner is not None):
            active = (read for read in self._in_flight_by_owner.get(owner, ()) if not read.done)
            self._in_flight_by_owner[owner] = [*active, transfer]
        self._parts = []


def write_all(fd: int, memory: memoryview, offset: int) -> None:
    done = transfer_all(os.pwritev, fd, memory, offset)
    if done < len(memory):
        raise OSError(errno.EIO, f"short write, {done} of {len(memory)} bytes")


def write_error(path: Path, error: OSError, nbytes: int) -> CheckpointError:
    """Return the error for a checkpoint file of `nbytes`, or a folder (0), that could not be written."""
    if error.errno in FULL:
        free = free_bytes(path.parent)
        advice = f"{free} bytes ({format_size(free)}) are free there; free more space or use another directory"
    else:
        advice = "check the directory's permissions and the system log, or use another directory"
    size = f" of {nbytes} bytes ({format_size(nbytes)})" if nbytes else ""
    return CheckpointError(f"can't write {path}{size}: {error.strerror or error}; {advice}")
