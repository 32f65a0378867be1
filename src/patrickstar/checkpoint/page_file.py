"""A file that is written from front to back, a page at a time, while the next page is put together."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from xxhash import xxh3_64_hexdigest

from patrickstar.errors import CheckpointError
from patrickstar.layout.sizes import format_size
from patrickstar.memory.movers import Movers, Transfer
from patrickstar.memory.scratch import BLOCK_BYTES, NO_SPACE, PAGE_BYTES, REFUSED

WRITERS = 2
"""Threads that each have one page on its way to the disk."""
LEAST_PAGES = WRITERS + 1
"""One more is being filled meanwhile."""


class PageFile:
    """A new file of exactly `nbytes`, which are reserved at once, past the page cache where the file system can.

    `pages` of `page_bytes` are all the memory it takes. Every page has its checksum, XXH3 of 64 bits in hex. Raises
    CheckpointError if the file can't be made, or the disk is full.
    """

    def __init__(self, path: Path, nbytes: int, *, page_bytes: int = PAGE_BYTES, pages: int = LEAST_PAGES) -> None:
        assert page_bytes % BLOCK_BYTES == 0, f"a page of {page_bytes} bytes is no multiple of {BLOCK_BYTES}"
        self.path, self.nbytes, self.page_bytes = path, nbytes, page_bytes
        self.sums = [""] * -(-nbytes // page_bytes)
        self.taken = 0
        """Bytes that were handed in."""
        self._movers = Movers(WRITERS, "save", BLOCK_BYTES)
        self._memory = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages: list[torch.Tensor] = list(torch.frombuffer(self._memory, dtype=torch.uint8).split(page_bytes))
        self._busy: list[Transfer | None] = [None] * pages
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
    def memory_bytes(self) -> int:
        """What its pages take."""
        return len(self._pages) * self.page_bytes

    @property
    def room_bytes(self) -> int:
        """How much can be handed in now without waiting for the disk."""
        free = sum(one is None or one.done for one in self._busy)
        return free * self.page_bytes - self.taken % self.page_bytes

    def write(self, values: torch.Tensor) -> None:
        """Hand in the next bytes, of a contiguous tensor on any device. Raises CheckpointError if the disk fails."""
        source = values.detach().reshape(-1).view(torch.uint8)
        first = 0
        while first < source.numel():
            number, begin = divmod(self.taken, self.page_bytes)
            page = self._free_page(number % len(self._pages))
            length = min(source.numel() - first, self.page_bytes - begin)
            part = source[first : first + length]
            if part.is_cuda:
                page[begin : begin + length].copy_(part)
            else:
                ctypes.memmove(page.data_ptr() + begin, part.data_ptr(), length)
            self.taken += length
            first += length
            if begin + length == self.page_bytes or self.taken == self.nbytes:
                self._send(number, begin + length)

    def close(self) -> None:
        """Have all of it on the disk when this returns. Raises CheckpointError if that failed."""
        assert self.taken == self.nbytes, f"{self.path}: {self.taken} of {self.nbytes} bytes were written"
        try:
            for number in range(len(self._busy)):
                self._wait(number)
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._release()

    def abandon(self) -> None:
        """Leave it as it is."""
        self._release()

    def _release(self) -> None:
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

    def _free_page(self, number: int) -> torch.Tensor:
        self._wait(number)
        return self._pages[number]

    def _wait(self, number: int) -> None:
        transfer = self._busy[number]
        if transfer is not None:
            try:
                transfer.wait()
            except OSError as error:
                raise self._failure(error) from error
            self._busy[number] = None

    def _send(self, number: int, length: int) -> None:
        """Begin to write a page of which this many bytes count."""
        place = number % len(self._pages)
        page, fd, sums, at = self._pages[place], self._fd, self.sums, number * self.page_bytes
        whole = -(-length // BLOCK_BYTES) * BLOCK_BYTES if self._direct else length

        def run(stage: torch.Tensor) -> None:
            memory = memoryview((ctypes.c_char * whole).from_address(page.data_ptr())).cast("B")
            sums[number] = xxh3_64_hexdigest(memory[:length])
            write_all(fd, memory, at)

        jobs: list[Callable[[torch.Tensor], None]] = [run]
        self._busy[place] = self._movers.submit(jobs, f"page {number} of {self.path.name}")

    def _failure(self, error: OSError) -> CheckpointError:
        return cant_write(self.path, error, self.nbytes)


def write_all(fd: int, memory: memoryview, at: int) -> None:
    """Write all these bytes at an offset; the system may do it in parts."""
    done = 0
    while done < len(memory):
        moved = os.pwrite(fd, memory[done:], at + done)
        if not moved:
            raise OSError(errno.EIO, f"short write, {done} of {len(memory)} bytes")
        done += moved


def cant_write(path: Path, error: OSError, nbytes: int) -> CheckpointError:
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
