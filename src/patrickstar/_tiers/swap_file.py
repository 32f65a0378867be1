"""Swap file of the disk tier: chunks are read and written page by page with direct I/O."""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_intdigest

from patrickstar._hardware.direct_io import BLOCK_BYTES, FULL, PAGE_BYTES, free_bytes, punch_hole, reserve, try_direct
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.byte_size import format_size
from patrickstar._tiers.hidden_names import PREFIX, SUFFIX, close, remove_unlocked
from patrickstar._tiers.linked_file import LinkedFile, LinkedPage
from patrickstar._tiers.page_file import PageFile
from patrickstar._tiers.page_places import HeldPage, HeldPages, PagePlaces
from patrickstar.errors import BudgetError, DiskError

COPY_BYTES = 16 * BLOCK_BYTES
"""Memory of a copy between files, as little as is not counted in budgets."""


class SwapFile(PageFile):
    """Unnamed file in `directory` that ends with its process; `nbytes` are reserved on the disk at once.

    It never exceeds `capacity_bytes`. With `checksums`, the hash of every page is kept in memory and compared at reads.
    Raises DiskError if the file can't be created or the disk is full, BudgetError if `nbytes` exceeds the capacity.

    With `durable`, checkpoints may link to the file and refer to its pages: see [Note: pages of checkpoints]. It then
    has a hidden name, which the next such file in the directory removes if the process was killed.
    """

    title, advice = "the swap file", "use another directory"

    def __init__(
        self,
        directory: str | Path,
        nbytes: int,
        *,
        checksums: bool = True,
        capacity_bytes: int | None = None,
        durable: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.checksums = checksums
        self.durable = durable
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.used_bytes = 0
        self._planned_bytes = round_up(nbytes, BLOCK_BYTES)
        self._unplanned_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self._sums: dict[int, tuple[int, int]] = {}  # place of a page: length and hash
        self._places = PagePlaces()
        self._linked: dict[int, LinkedPage] = {}
        """Pages that are read from a checkpoint's file, by offset. See [Note: linked pages]."""
        self._unwritten: set[int] = set()  # places of pages whose write has been announced and has not ended
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._free_extents: dict[tuple[int, int], list[int]] = {}  # offsets of freed extents, by size and page size
        self._active_calls = 0
        self._closed = False
        self._check_capacity(round_up(nbytes, BLOCK_BYTES), "the file")
        self._fd, self.path = self._make()
        self._close_fd = weakref.finalize(self, close, self._fd, self.path if durable else None)
        self._close_fd.atexit = durable
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

    def reserve(self, nbytes: int, label: str, *, page_bytes: int = PAGE_BYTES, planned: bool = True) -> int:
        """Reserve an extent on the disk and return its offset; errors name the `label`.

        Extents that are not `planned` take nothing of the bytes that were reserved at the start.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error(label)
            if freed := self._free_extents.get((round_up(nbytes, BLOCK_BYTES), page_bytes)):
                return freed.pop()
            return self._append(nbytes, label, planned)

    def _append(self, nbytes: int, label: str, planned: bool) -> int:
        """Append an extent and return its offset."""
        offset, end = self.used_bytes, self.used_bytes + round_up(nbytes, BLOCK_BYTES)
        unplanned = self._unplanned_bytes + (0 if planned else round_up(nbytes, BLOCK_BYTES))
        needed = max(end, self._planned_bytes + unplanned)
        self._check_capacity(needed, label)
        self._grow(needed, label)
        self.used_bytes, self._unplanned_bytes = end, unplanned
        return offset

    def free(self, offset: int, nbytes: int, page_bytes: int = PAGE_BYTES) -> None:
        """Free an extent for reuse by another of its size with pages of the same size: places follow the pages."""
        with self._lock:
            self._free_extents.setdefault((round_up(nbytes, BLOCK_BYTES), page_bytes), []).append(offset)

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

    # Pages of checkpoints

    def hold(self, pages: Iterable[tuple[int, int]], folder: Path) -> HeldPages:
        """Keep the content of pages, given by offset and bytes, for a checkpoint that will be in a folder."""
        assert self.durable, f"{self} was not made for checkpoints"
        pages = list(pages)
        with self._lock:
            self._places.release_deleted(self._links())
            for offset, nbytes in pages:
                if offset in self._linked:  # `persist` copies it
                    self._announce(offset, nbytes, "a page of the checkpoint that was loaded")
            return self._places.hold(pages, folder)

    def open_linked(self, path: Path) -> LinkedFile | None:
        """Open a checkpoint's link to a file of this file system; None if it is of another, or can't be linked.

        The kernel may refuse further links to the files of other users.
        """
        try:
            if path.stat().st_dev != os.fstat(self._fd).st_dev:
                return None
            return LinkedFile(path, self.directory, direct=self.direct)
        except OSError as error:
            warnings.warn(f"pages of {path} are copied, which takes longer: {error}", stacklevel=2)
            return None

    def link(self, pages: Mapping[int, LinkedPage]) -> None:
        """Let pages, by offset, have the content of pages in a checkpoint's file until they are written."""
        with self._lock:
            self._linked.update(pages)

    def release(self, held: HeldPages) -> None:
        """Let the pages of a checkpoint be written again."""
        with self._lock:
            self._places.release(held)

    def persist(self, held: HeldPages, link: Path) -> list[tuple[int, int]]:
        """Wait until the pages of a checkpoint are on the disk, and link the file to a path.

        Returns:
            Stored bytes and hash of each page.

        Raises:
            DiskError: A page could not be written, or the file can't be synced or linked.
        """
        for page in held.pages:
            if (linked := self._linked.get(page.offset)) is not None:
                self._copy(linked, page.offset)
        with self._idle:
            self._idle.wait_for(lambda: all(page.place not in self._unwritten for page in held.pages))
            found = [self._stored(page) for page in held.pages]
        try:
            self._sync()
            os.link(self.path, link)
        except OSError as error:
            raise DiskError(f"{self.path} can't be linked to {link}: {error.strerror} (errno {error.errno})") from error
        return found

    def _copy(self, linked: LinkedPage, offset: int) -> None:
        """Write a page of another checkpoint's file at its place in this one, in pieces that take little memory."""
        label, hashed = f"a page of {linked.file.path}", xxh3_64()
        with (
            self._using("write", offset, linked.nbytes, label),
            mmap.mmap(-1, COPY_BYTES) as buffer,
            memoryview(buffer) as memory,
        ):
            place = self._places.of(offset)
            for start in range(0, linked.nbytes, COPY_BYTES):
                nbytes = min(COPY_BYTES, linked.nbytes - start)
                linked.file._move("read", linked.place + start, memory, nbytes, label)
                hashed.update(memory[:nbytes])
                self._move("write", place + start, memory, nbytes, label)
        linked.verify(hashed.intdigest(), linked.nbytes, label)
        with self._lock:
            self._sums[place] = linked.nbytes, linked.hashed
            self._linked.pop(offset, None)
        self.end_write(offset)

    def _sync(self) -> None:
        os.fdatasync(self._fd)

    def _stored(self, page: HeldPage) -> tuple[int, int]:
        stored = self._sums.get(page.place)
        if stored is None:
            raise DiskError(f"the page at offset {page.offset} of {self.path} was not written: an earlier write failed")
        return stored

    def _links(self) -> int:
        return os.fstat(self._fd).st_nlink - 1

    # Pages

    def announce_write(self, offset: int, nbytes: int, label: str) -> None:
        """Choose the place of a page's next content, before another thread writes it; `end_write` follows.

        Raises DiskError or BudgetError if checkpoints hold all places and there is no room for another.
        """
        with self._lock:
            self._announce(offset, nbytes, label)
            self._linked.pop(offset, None)

    def _announce(self, offset: int, nbytes: int, label: str) -> None:
        if not self._places.has_place(offset, nbytes):
            self._places.release_deleted(self._links())
        try:
            place = self._places.renew(offset, nbytes, lambda nbytes: self._append(nbytes, label, planned=True))
        except (BudgetError, DiskError) as error:
            raise DiskError(f"{error}; or {_delete_one(self._places.folders)}") from error
        self._unwritten.add(place)

    def end_write(self, offset: int) -> None:
        """Note that the write of a page has ended, in whatever way."""
        with self._lock:
            self._unwritten.discard(self._places.of(offset))
            self._idle.notify_all()

    def read(self, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        """Read the page of `nbytes` at `offset`; threads may read and write concurrently.

        `buffer` consists of whole blocks at an address that is a multiple of BLOCK_BYTES, as in `write`. Raises
        DiskError if the read fails, the file is too short, or the bytes differ from those written.
        """
        with self._using("read", offset, nbytes, label):
            with self._lock:
                linked, place = self._linked.get(offset), self._places.of(offset)
                stored = self._sums.get(place)
            if linked is not None:
                linked.read(buffer, nbytes, label)
            else:
                self._move("read", place, buffer, nbytes, label)
                if self.checksums:
                    self._verify(place, xxh3_64_intdigest(buffer[:nbytes]), nbytes, label, stored)
            with self._lock:
                self.read_bytes += nbytes

    def write(self, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        """Write the first `nbytes` of `buffer` at `offset`. Raises DiskError if the write fails."""
        with self._using("write", offset, nbytes, label):
            place = self._places.of(offset)
            self._sums.pop(place, None)  # a failed write leaves neither the old page nor the new one
            hashed = xxh3_64_intdigest(buffer[:nbytes]) if self.checksums else 0
            self._move("write", place, buffer, nbytes, label)
            with self._lock:
                self.written_bytes += nbytes
                if self.checksums:
                    self._sums[place] = nbytes, hashed

    def close(self) -> None:
        """Close the file, which frees its disk space, after all reads and writes have ended."""
        with self._lock:
            self._closed = True
            # A descriptor closed while in use could be reused for another file in the middle of a write.
            while self._active_calls:
                self._idle.wait()
            self._linked.clear()
            self._free_gaps()
            self._close_fd()

    def _free_gaps(self) -> None:
        """Free the disk space of what no checkpoint refers to, in a file that checkpoints keep."""
        if self.durable and self._close_fd.alive:
            self._places.release_deleted(self._links())
            if 0 < self._links() == len(self._places.folders):
                for gap in self._places.gaps(self.nbytes):
                    punch_hole(self._fd, *gap)

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
            fd, path = self._locked_file() if self.durable else _unnamed_file(self.directory)
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
        return fd, path

    def _locked_file(self) -> tuple[int, Path]:
        """Make a locked file with a hidden name, and remove those whose processes have ended."""
        remove_unlocked(self.directory)
        while True:
            fd, name = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX, dir=self.directory)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if (path := Path(name)).exists():  # another process may have removed it before it was locked
                return fd, path
            os.close(fd)

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

    def _no_space_error(self, error: OSError, path: int | Path, nbytes: int, label: str) -> DiskError:
        free = free_bytes(path)
        return DiskError(
            f"{label} needs {nbytes} more bytes ({format_size(nbytes)}) on the disk, and {self.directory} has {free} "
            f"bytes ({format_size(free)}) free: {error.strerror}; free space there, use another directory, or a "
            f"smaller model"
        )


def _unnamed_file(directory: Path) -> tuple[int, Path]:
    fd, path = tempfile.mkstemp(prefix=PREFIX.removeprefix("."), suffix=SUFFIX, dir=directory)
    os.unlink(path)
    return fd, Path(path)


def _delete_one(folders: Sequence[Path]) -> str:
    names = ", ".join(str(folder) for folder in folders)
    return f"delete one of the checkpoints that refer to pages of the file: {names}"


@cache  # once per process
def _warn_buffered() -> None:
    warnings.warn(
        "the disk tier's file system does not support direct I/O (O_DIRECT): pages pass through the page cache, which "
        "is slower and takes memory beyond the budget; use a directory on a local disk",
        stacklevel=4,
    )
