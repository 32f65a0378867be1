"""Swap file of the disk tier: chunks are read and written page by page with direct I/O."""

import errno
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_intdigest

from patrickstar._hardware.direct_io import BLOCK_BYTES, FULL, PAGE_BYTES, free_bytes, reserve, transfer_all, try_direct
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.byte_size import format_size
from patrickstar.errors import BudgetError, DiskError


class SwapFile:
    """Unnamed file in `directory` that ends with its process; `nbytes` are reserved on the disk at once.

    It never exceeds `capacity_bytes`. With `checksums`, the hash of every page is kept in memory and compared at reads.
    Raises DiskError if the file can't be created or the disk is full, BudgetError if `nbytes` exceeds the capacity.
    """

    def __init__(
        self, directory: str | Path, nbytes: int, *, checksums: bool = True, capacity_bytes: int | None = None
    ) -> None:
        self.directory = Path(directory)
        self.checksums = checksums
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.used_bytes = 0
        self._planned_bytes = round_up(nbytes, BLOCK_BYTES)
        self._unplanned_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self._sums: dict[int, tuple[int, int]] = {}  # page offset: length and hash
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._free_extents: dict[int, list[int]] = {}  # offsets of freed extents, by size
        self._active_calls = 0
        self._closed = False
        self._check_capacity(round_up(nbytes, BLOCK_BYTES), "the file")
        self._fd, self.path = self._make()
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._close_fd.atexit = False
        try:
            self.direct = self._try_direct()
            self._grow(round_up(nbytes, BLOCK_BYTES), "the file")
            if not self.direct:
                _warn_buffered()
        except BaseException:
            self._close_fd()
            raise

    def __repr__(self) -> str:
        return f"SwapFile({str(self.path)!r}, {self.nbytes} bytes)"

    # Extents

    def reserve(self, nbytes: int, label: str, *, planned: bool = True) -> int:
        """Reserve an extent on the disk and return its offset; errors name the `label`.

        Extents that are not `planned` take nothing of the bytes that were reserved at the start.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error(label)
            if freed := self._free_extents.get(round_up(nbytes, BLOCK_BYTES)):
                return freed.pop()
            offset, end = self.used_bytes, self.used_bytes + round_up(nbytes, BLOCK_BYTES)
            unplanned = self._unplanned_bytes + (0 if planned else round_up(nbytes, BLOCK_BYTES))
            needed = max(end, self._planned_bytes + unplanned)
            self._check_capacity(needed, label)
            self._grow(needed, label)
            self.used_bytes, self._unplanned_bytes = end, unplanned
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Free an extent for reuse by another of its size."""
        with self._lock:
            self._free_extents.setdefault(round_up(nbytes, BLOCK_BYTES), []).append(offset)

    def _check_capacity(self, nbytes: int, label: str) -> None:
        if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
            missing = nbytes - self.capacity_bytes
            raise BudgetError(
                f"{label} would grow the swap file to {nbytes} bytes, of a capacity of {self.capacity_bytes}; "
                f"raise that (ps.Disk(capacity=...)) by at least {missing} bytes ({format_size(missing)})",
                missing,
            )

    def _grow(self, nbytes: int, label: str) -> None:
        more = nbytes - self.nbytes
        if more <= 0:
            return
        try:
            if not reserve(self._fd, self.nbytes, more):
                os.ftruncate(self._fd, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self.nbytes)  # release what was reserved before the failure
            raise self._no_space_error(error, self._fd, more, label) from error
        self.nbytes = nbytes

    # Pages

    def read(self, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        """Read the page of `nbytes` at `offset`; threads may read and write concurrently.

        `buffer` consists of whole blocks at an address that is a multiple of BLOCK_BYTES, as in `write`. Raises
        DiskError if the read fails, the file is too short, or the bytes differ from those written.
        """
        with self._using("read", offset, nbytes, label):
            self._move("read", offset, buffer, nbytes, label)
            if self.checksums:
                self._check_sum(offset, buffer, nbytes, label)
            with self._lock:
                self.read_bytes += nbytes

    def write(self, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        """Write the first `nbytes` of `buffer` at `offset`. Raises DiskError if the write fails."""
        with self._using("write", offset, nbytes, label):
            self._sums.pop(offset, None)  # a failed write leaves neither the old page nor the new one
            hashed = xxh3_64_intdigest(buffer[:nbytes]) if self.checksums else 0
            self._move("write", offset, buffer, nbytes, label)
            with self._lock:
                self.written_bytes += nbytes
                if self.checksums:
                    self._sums[offset] = nbytes, hashed

    def close(self) -> None:
        """Close the file, which frees its disk space, after all reads and writes have ended."""
        with self._lock:
            self._closed = True
            # A descriptor closed while in use could be reused for another file in the middle of a write.
            while self._active_calls:
                self._idle.wait()
            self._close_fd()

    def _move(self, operation: str, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        call = os.preadv if operation == "read" else os.pwritev
        length = round_up(nbytes, BLOCK_BYTES)
        try:
            done = transfer_all(call, self._fd, buffer[:length], offset, BLOCK_BYTES if self.direct else 1)
        except OSError as error:
            reason = f"{error.strerror} (errno {error.errno})"
            raise self._io_error(operation, offset, nbytes, label, reason, error.errno in FULL) from error
        if done < length:
            reason = f"short {operation}, {done} of {length} bytes, as if the file had been truncated"
            raise self._io_error(operation, offset, nbytes, label, reason)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def _check_sum(self, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        expected = self._sums.get(offset)
        if expected is None:
            raise self._io_error("read", offset, nbytes, label, "nothing was written there")
        if expected[0] != nbytes:
            raise self._io_error("read", offset, nbytes, label, f"a page of {expected[0]} bytes was written there")
        actual = xxh3_64_intdigest(buffer[:nbytes])
        if actual != expected[1]:
            reason = f"the page is damaged: checksum {expected[1]:016x} expected, {actual:016x} found"
            raise self._io_error("read", offset, nbytes, label, reason)

    @contextmanager
    def _using(self, operation: str, offset: int, nbytes: int, label: str) -> Iterator[None]:
        """Keep the file open inside the context."""
        assert 0 < nbytes <= PAGE_BYTES and offset % BLOCK_BYTES == 0, f"no page: {nbytes} bytes at offset {offset}"
        with self._lock:
            if self._closed:
                raise self._closed_error(label)
            assert offset + nbytes <= self.nbytes, f"{operation} of {label} at {offset}, beyond {self.nbytes}"
            self._active_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._active_calls -= 1
                self._idle.notify_all()

    # The file

    def _make(self) -> tuple[int, Path]:
        try:
            fd, path = tempfile.mkstemp(prefix="patrickstar-", suffix=".chunks", dir=self.directory)
        except OSError as error:
            if error.errno in FULL:
                raise self._no_space_error(error, self.directory, BLOCK_BYTES, "the file") from error
            if error.errno == errno.ENOTDIR:
                reason = "is not a directory; give one"
            elif error.errno == errno.ENOENT and not self.directory.is_dir():
                reason = "does not exist; create it"
            else:
                reason = f"can't be written ({error.strerror}); change its permissions"
            raise DiskError(f"the disk tier's directory {self.directory} {reason}, or use another") from error
        os.unlink(path)
        return fd, Path(path)

    def _try_direct(self) -> bool:
        """Write and read one block with O_DIRECT; return True if that works. See [Note: direct I/O]."""
        try:
            direct = try_direct(self._fd, os.pwritev, os.preadv)
            os.ftruncate(self._fd, 0)
        except OSError as error:
            if error.errno in FULL:
                raise self._no_space_error(error, self._fd, BLOCK_BYTES, "the file") from error
            raise self._io_error("try", 0, BLOCK_BYTES, "the first block", str(error.strerror)) from error
        return direct

    # Errors

    def _closed_error(self, label: str) -> DiskError:
        return DiskError(f"{label}: the swap file {self.path} is closed; initialise a new engine")

    def _io_error(
        self, operation: str, offset: int, nbytes: int, label: str, reason: str, full: bool = False
    ) -> DiskError:
        advice = "free space there" if full else "check the system's log for errors of the disk"
        return DiskError(
            f"can't {operation} {nbytes} bytes of {label} at offset {offset} of the swap file {self.path}: {reason}; "
            f"{advice}, or use another directory"
        )

    def _no_space_error(self, error: OSError, path: int | Path, nbytes: int, label: str) -> DiskError:
        free = free_bytes(path)
        return DiskError(
            f"{label} needs {nbytes} more bytes ({format_size(nbytes)}) on the disk, and {self.directory} has {free} "
            f"bytes ({format_size(free)}) free: {error.strerror}; free space there, use another directory, or a "
            f"smaller model"
        )


@cache  # once per process
def _warn_buffered() -> None:
    warnings.warn(
        "the disk tier's file system does not support direct I/O (O_DIRECT): pages pass through the page cache, which "
        "is slower and takes memory beyond the budget; use a directory on a local disk",
        stacklevel=4,
    )
