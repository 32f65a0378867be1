"""A file that is written from front to back, a page at a time, while the next page is put together."""

import ctypes
import errno
import fcntl
import os
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from xxhash import xxh3_64_hexdigest

from patrickstar._layout.byte_size import format_size
from patrickstar._memory.swap_file import BLOCK_BYTES, NO_SPACE, PAGE_BYTES, REFUSED
from patrickstar._memory.vm_pool import private_memory
from patrickstar._memory.worker_pool import Transfer, WorkerPool
from patrickstar.errors import CheckpointError, MoveError

WRITERS = 4
"""Threads that each have one page on its way to the disk."""
PAGES = 2 * WRITERS + 1
"""All the memory a file takes: each writer's own page, what was copied for each, and what is being put together."""

# [Note: bytes that stay where they are]
# Who hands bytes in may leave them where they are, and say whose they are. A page that is one piece of memory, on
# addresses that the disk can take, goes to it from there; others are put together by a writer when it comes to them.
# Before bytes change, or move, their owner is released: what waits in a page that is not full is copied, and pages
# under way are waited for. Bytes without an owner are copied at once.


@dataclass
class _Part:
    """Bytes of a page: where in it, where in memory, and whose they are; and what keeps that memory."""

    begin: int
    address: int
    nbytes: int
    owner: Hashable
    kept: torch.Tensor

    def memory(self) -> torch.Tensor:
        """The bytes."""
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.uint8)


class DirectWriter:
    """A new file of exactly `nbytes`, which are reserved at once, past the page cache where the file system can.

    It takes `PAGES` pages of `page_bytes` as memory. Every page has its checksum, XXH3 of 64 bits in hex. Raises
    CheckpointError if the file can't be made, or the disk is full.
    """

    def __init__(self, path: Path, nbytes: int, *, page_bytes: int = PAGE_BYTES) -> None:
        assert page_bytes % BLOCK_BYTES == 0, f"a page of {page_bytes} bytes is no multiple of {BLOCK_BYTES}"
        self.path, self.nbytes, self.page_bytes = path, nbytes, page_bytes
        self.sums = [""] * -(-nbytes // page_bytes)
        self.taken = 0
        """Bytes that were handed in."""
        self._movers = WorkerPool(WRITERS, "save", page_bytes)
        self._buffers = torch.frombuffer(private_memory((WRITERS + 1) * page_bytes), dtype=torch.uint8)
        self._buffers = self._buffers.view(-1, page_bytes)
        self._buffers.zero_()  # what was never written is not there yet, and a meter would miss it
        self._parts: list[_Part] = []
        """Of the page that is not full yet."""
        self._under_way: deque[Transfer] = deque()
        self._read_by: dict[Hashable, list[Transfer]] = {}
        """Pages under way, by those whose bytes are in them."""
        self._failed: OSError | MoveError | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if nbytes:
                self._reserve(nbytes)
            self._direct = self._try_direct()
        except OSError as error:
            self.abandon()
            raise self._failure(error) from error

    @property
    def has_room(self) -> bool:
        """Whether a page can be handed in without waiting for the disk."""
        return sum(not transfer.done for transfer in self._under_way) < WRITERS

    def write(self, values: torch.Tensor, owner: Hashable = None) -> None:
        """Hand in the next bytes: those of a contiguous tensor, on any device; with an `owner` in this one's memory.

        See [Note: bytes that stay where they are]. Raises CheckpointError if the disk fails.
        """
        source = values.detach().reshape(-1).view(torch.uint8)
        first = 0
        while first < source.numel():
            number, begin = divmod(self.taken, self.page_bytes)
            length = min(source.numel() - first, self.page_bytes - begin)
            part = source[first : first + length]
            self._add(number, begin, part, owner)
            self.taken += length
            first += length
            if begin + length == self.page_bytes or self.taken == self.nbytes:
                self._send(number, begin + length)

    def release(self, owner: Hashable) -> None:
        """Read nothing more of an owner's memory when this returns; what goes wrong is told by the next call."""
        number = self.taken // self.page_bytes
        parts, self._parts = self._parts, []
        for one in parts:
            self._add(number, one.begin, one.memory(), None if one.owner == owner else one.owner)
        for transfer in self._read_by.pop(owner, ()):
            try:
                transfer.wait()
            except (OSError, MoveError) as error:
                self._failed = error

    def close(self) -> None:
        """Have all of it on the disk when this returns. Raises CheckpointError if that failed."""
        assert self.taken == self.nbytes, f"{self.path}: {self.taken} of {self.nbytes} bytes were written"
        try:
            self._wait_for(0)
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._release_file()

    def abandon(self) -> None:
        """Leave it as it is."""
        self._release_file()

    def _release_file(self) -> None:
        self._movers.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in REFUSED:
                raise

    def _try_direct(self) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            return False
        return True

    def _add(self, number: int, begin: int, part: torch.Tensor, owner: Hashable) -> None:
        """Take a part of a page, which ends where the one before begins."""
        if owner is None:
            part = self._copied(number, begin, part)
        last = self._parts[-1] if self._parts else None
        if last is not None and last.owner == owner and last.address + last.nbytes == part.data_ptr():
            last.nbytes += part.numel()
        else:
            self._parts.append(_Part(begin, part.data_ptr(), part.numel(), owner, part))

    def _copied(self, number: int, begin: int, part: torch.Tensor) -> torch.Tensor:
        """A part of a page, copied to where the page is put together; of the last page there, nothing is under way."""
        place = self._buffers[number % (WRITERS + 1)][begin : begin + part.numel()]
        if part.device.type != "cpu":
            place.copy_(part)
        else:
            ctypes.memmove(place.data_ptr(), part.data_ptr(), part.numel())
        return place

    def _wait_for(self, most: int) -> None:
        """Have at most so many pages under way."""
        try:
            while self._under_way and (len(self._under_way) > most or self._under_way[0].done):
                self._under_way[0].wait()
                self._under_way.popleft()
            if self._failed is not None:
                raise self._failed
        except OSError as error:
            raise self._failure(error) from error
        except MoveError as error:  # no chunk is lost with it
            raise CheckpointError(f"{self.path} is incomplete: {error}") from error

    def _send(self, number: int, length: int) -> None:
        """Begin to write the page that is full."""
        self._wait_for(WRITERS - 1)
        parts, fd, sums, at = self._parts, self._fd, self.sums, number * self.page_bytes
        whole = -(-length // BLOCK_BYTES) * BLOCK_BYTES if self._direct else length

        def run(stage: torch.Tensor) -> None:
            address = parts[0].address
            if len(parts) > 1 or address % BLOCK_BYTES or parts[0].nbytes < whole:
                address = stage.data_ptr()
                for one in parts:
                    ctypes.memmove(address + one.begin, one.address, one.nbytes)
            memory = memoryview((ctypes.c_char * whole).from_address(address)).cast("B")
            sums[number] = xxh3_64_hexdigest(memory[:length])
            write_all(fd, memory, at)

        transfer = self._movers.submit([run], f"page {number} of {self.path.name}")
        self._under_way.append(transfer)
        for owner in dict.fromkeys(one.owner for one in self._parts if one.owner is not None):
            self._read_by[owner] = [*(one for one in self._read_by.get(owner, ()) if not one.done), transfer]
        self._parts = []

    def _failure(self, error: OSError) -> CheckpointError:
        return write_error(self.path, error, self.nbytes)


def write_all(fd: int, memory: memoryview, at: int) -> None:
    """Write all these bytes at an offset; the system may do it in parts."""
    done = 0
    while done < len(memory):
        moved = os.pwrite(fd, memory[done:], at + done)
        if not moved:
            raise OSError(errno.EIO, f"short write, {done} of {len(memory)} bytes")
        done += moved


def write_error(path: Path, error: OSError, nbytes: int) -> CheckpointError:
    """The error for a file of a checkpoint that the system did not take."""
    if error.errno in NO_SPACE:
        space = os.statvfs(path.parent)
        free = space.f_bavail * space.f_frsize
        advice = f"{free} bytes ({format_size(free)}) are free there; free some, or use another directory"
    else:
        advice = "look at the directory's permissions and the system's log, or use another directory"
    return CheckpointError(
        f"can't write {path} of {nbytes} bytes ({format_size(nbytes)}): {error.strerror or error}; {advice}"
    )
