"""The disk tier's file: places for chunks, read and written a page at a time past the page cache."""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_intdigest

from patrickstar._layout.byte_size import format_size
from patrickstar.errors import BudgetError, DiskError

PAGE_BYTES = 4 * 1024**2
BLOCK_BYTES = 4096

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}

Call = Callable[[int, Sequence[memoryview], int], int]

# [Note: past the page cache]
# What the page cache keeps is memory that no budget knows of, and what it has yet to write fails when nobody looks.
# So pages go to the disk and come from it directly (O_DIRECT), straight between it and the caller's buffer. The price
# is alignment: offsets, lengths and addresses are multiples of BLOCK_BYTES, and the last page of a place is moved up to
# its last block's end. The flag is set after the file has been made: given to open(), some file systems refuse it and
# leave the file behind.


def round_up(nbytes: int) -> int:
    """`nbytes` up to the end of its last block."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class SwapFile:
    """A file without a name that ends with its process.

    `directory` is where it lies, and has to have room for `nbytes`, which are reserved at once. It never exceeds
    `capacity_bytes`, if given. `checksums` has every page's hash kept in memory and compared when the page is read.
    Raises DiskError if the file can't be made or the disk is full, BudgetError if `nbytes` exceed `capacity_bytes`.
    """

    def __init__(
        self, directory: str | Path, nbytes: int, *, checksums: bool = True, capacity_bytes: int | None = None
    ) -> None:
        self.directory = Path(directory)
        self.checksums = checksums
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.used_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self._sums: dict[int, tuple[int, int]] = {}  # offset of a page: its bytes and their hash
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._given: dict[int, list[int]] = {}  # places that were given back, by their size
        self._busy = 0
        self._closed = False
        self._check_capacity(round_up(nbytes), "the file")
        self._fd, self.path = self._make()
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._close_fd.atexit = False
        try:
            self.direct = self._try_direct()
            self._grow(round_up(nbytes), "the file")
            if not self.direct:
                _warn_buffered()
        except BaseException:
            self._close_fd()
            raise

    def __repr__(self) -> str:
        return f"ScratchFile({str(self.path)!r}, {self.nbytes} bytes)"

    # Places

    def reserve(self, nbytes: int, what: str) -> int:
        """The offset of a new place for `nbytes`, which lies on the disk already; `what` is named in errors."""
        with self._lock:
            if self._closed:
                raise self._closed_error(what)
            if given := self._given.get(round_up(nbytes)):
                return given.pop()
            at, end = self.used_bytes, self.used_bytes + round_up(nbytes)
            self._check_capacity(end, what)
            self._grow(end, what)
            self.used_bytes = end
        return at

    def free(self, at: int, nbytes: int) -> None:
        """Give a place back, for another of its size."""
        with self._lock:
            self._given.setdefault(round_up(nbytes), []).append(at)

    def _check_capacity(self, nbytes: int, what: str) -> None:
        if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
            short = nbytes - self.capacity_bytes
            raise BudgetError(
                f"{what} brings what lies on the disk to {nbytes} bytes, of a capacity of {self.capacity_bytes}; "
                f"raise that (ps.Disk(capacity=...)) by at least {short} bytes ({format_size(short)})",
                short,
            )

    def _grow(self, nbytes: int, what: str) -> None:
        """Have the file reach to `nbytes`, all of them reserved."""
        more = nbytes - self.nbytes
        if more <= 0:
            return
        try:
            try:
                os.posix_fallocate(self._fd, self.nbytes, more)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                # A file system that can't reserve: a full disk shows when a page is written.
                os.ftruncate(self._fd, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self.nbytes)  # what was reserved before it failed
            raise self._no_space_error(error, self._fd, more, what) from error
        self.nbytes = nbytes

    # Pages

    def read(self, at: int, buffer: memoryview, nbytes: int, what: str) -> None:
        """Fill `buffer` with the page of `nbytes` at offset `at`.

        `buffer` is bytes on an address that is a multiple of BLOCK_BYTES, and reaches to its last block's end, as for
        `write`. Any number of threads may read and write at once. Raises DiskError, with `what` in it, if the system
        can't, if the file ends, or if these are not the bytes that were written.
        """
        with self._using("read", at, nbytes, what):
            self._move(os.preadv, "read", at, buffer, nbytes, what)
            if self.checksums:
                self._check_sum(at, buffer, nbytes, what)
            with self._lock:
                self.read_bytes += nbytes

    def write(self, at: int, buffer: memoryview, nbytes: int, what: str) -> None:
        """Put the first `nbytes` of `buffer` at offset `at`. Raises DiskError if the system can't."""
        with self._using("write", at, nbytes, what):
            self._sums.pop(at, None)  # a write that fails leaves neither the old page nor the new one
            hashed = xxh3_64_intdigest(buffer[:nbytes]) if self.checksums else 0
            self._move(os.pwritev, "write", at, buffer, nbytes, what)
            with self._lock:
                self.written_bytes += nbytes
                if self.checksums:
                    self._sums[at] = nbytes, hashed

    def close(self) -> None:
        """Give the disk's room back, once the threads that read and write have ended doing so."""
        with self._lock:
            self._closed = True
            # A descriptor closed while in use could become another file's in the middle of a write.
            while self._busy:
                self._idle.wait()
            self._close_fd()

    def _move(self, call: Call, operation: str, at: int, buffer: memoryview, nbytes: int, what: str) -> None:
        """Transfer all blocks of a page; the system may do it in parts."""
        length, done = round_up(nbytes), 0
        while done < length:
            try:
                moved = call(self._fd, [buffer[done:length]], at + done)
            except OSError as error:
                reason = f"{error.strerror} (errno {error.errno})"
                raise self._failure(operation, at, nbytes, what, reason, error.errno in NO_SPACE) from error
            if self.direct:
                moved -= moved % BLOCK_BYTES  # a part of a block is done again, and is none at the end of the file
            if not moved:
                reason = f"short {operation}, {done} of {length} bytes, as if the file had been cut"
                raise self._failure(operation, at, nbytes, what, reason)
            done += moved
        if not self.direct:
            os.posix_fadvise(self._fd, at, length, os.POSIX_FADV_DONTNEED)

    def _check_sum(self, at: int, buffer: memoryview, nbytes: int, what: str) -> None:
        expected = self._sums.get(at)
        if expected is None:
            raise self._failure("read", at, nbytes, what, "nothing was written there")
        if expected[0] != nbytes:
            raise self._failure("read", at, nbytes, what, f"a page of {expected[0]} bytes was written there")
        found = xxh3_64_intdigest(buffer[:nbytes])
        if found != expected[1]:
            reason = f"the page is damaged: checksum {expected[1]:016x} expected, {found:016x} found"
            raise self._failure("read", at, nbytes, what, reason)

    @contextmanager
    def _using(self, operation: str, at: int, nbytes: int, what: str) -> Iterator[None]:
        """Keep the file open meanwhile."""
        assert 0 < nbytes <= PAGE_BYTES and at % BLOCK_BYTES == 0, f"no page: {nbytes} bytes at offset {at}"
        with self._lock:
            if self._closed:
                raise self._closed_error(what)
            assert at + nbytes <= self.nbytes, f"{operation} of {what} at {at}, beyond {self.nbytes}"
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                self._idle.notify_all()

    # The file

    def _make(self) -> tuple[int, Path]:
        try:
            fd, path = tempfile.mkstemp(prefix="patrickstar-", suffix=".chunks", dir=self.directory)
        except OSError as error:
            if error.errno in NO_SPACE:
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
        """Whether pages go past the page cache, found out by one block. See [Note: past the page cache]."""
        block = mmap.mmap(-1, BLOCK_BYTES)
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                os.pwritev(self._fd, [block], 0)
                os.preadv(self._fd, [block], 0)
                direct = True
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                direct = False
            os.ftruncate(self._fd, 0)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise self._no_space_error(error, self._fd, BLOCK_BYTES, "the file") from error
            raise self._failure("try", 0, BLOCK_BYTES, "the first block", str(error.strerror)) from error
        return direct

    # What to say when it fails

    def _closed_error(self, what: str) -> DiskError:
        return DiskError(f"{what}: the disk tier's file {self.path} is closed; initialise a new engine")

    def _failure(self, operation: str, at: int, nbytes: int, what: str, reason: str, full: bool = False) -> DiskError:
        advice = "free space there" if full else "look into the system's log for the disk's errors"
        return DiskError(
            f"can't {operation} {nbytes} bytes of {what} at offset {at} of the disk tier's file {self.path}: {reason}; "
            f"{advice}, or use another directory"
        )

    def _no_space_error(self, error: OSError, place: int | Path, nbytes: int, what: str) -> DiskError:
        space = os.statvfs(place)
        free = space.f_bavail * space.f_frsize
        return DiskError(
            f"{what} needs {nbytes} more bytes ({format_size(nbytes)}) on the disk, and {self.directory} has {free} "
            f"bytes ({format_size(free)}) free: {error.strerror}; free space there, use another directory, or a "
            f"smaller model"
        )


@cache  # once per process
def _warn_buffered() -> None:
    warnings.warn(
        "the disk tier's file system does not take direct I/O (O_DIRECT): pages pass through the page cache, which is "
        "slower, and memory beyond the budget; use a directory on a local disk",
        stacklevel=4,
    )
