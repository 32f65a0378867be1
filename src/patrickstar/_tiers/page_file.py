"""File whose pages are read and written with direct I/O, and verified."""

import os
from pathlib import Path
from typing import ClassVar

from patrickstar._hardware.direct_io import BLOCK_BYTES, FULL, transfer_all
from patrickstar._hardware.vm_pool import round_up
from patrickstar.errors import DiskError


class PageFile:
    """Open file at a path, with direct I/O or through the page cache; subclasses open it and set the attributes.

    title, advice: What errors call the file, and what they advise.
    """

    title: ClassVar[str]
    advice: ClassVar[str]
    path: Path
    direct: bool
    _fd: int

    def _move(self, operation: str, place: int, buffer: memoryview, nbytes: int, label: str) -> None:
        """Read or write the page of `nbytes` at a place. Raises DiskError, which names the `label`."""
        call = os.preadv if operation == "read" else os.pwritev
        length = round_up(nbytes, BLOCK_BYTES)
        try:
            done = transfer_all(call, self._fd, buffer[:length], place, BLOCK_BYTES if self.direct else 1)
        except OSError as error:
            reason = f"{error.strerror} (errno {error.errno})"
            raise self._io_error(operation, place, nbytes, label, reason, error.errno in FULL) from error
        if done < length:
            reason = f"short {operation}, {done} of {length} bytes, as if the file had been truncated"
            raise self._io_error(operation, place, nbytes, label, reason)
        if not self.direct:
            os.posix_fadvise(self._fd, place, length, os.POSIX_FADV_DONTNEED)

    def _verify(self, place: int, hashed: int, nbytes: int, label: str, stored: tuple[int, int] | None) -> None:
        """Raise DiskError if the bytes read at a place are not those stored there, of this length and hash."""
        if stored is None:
            raise self._io_error("read", place, nbytes, label, "nothing was written there")
        if stored[0] != nbytes:
            raise self._io_error("read", place, nbytes, label, f"a page of {stored[0]} bytes was written there")
        if hashed != stored[1]:
            reason = f"the page is damaged: checksum {stored[1]:016x} expected, {hashed:016x} found"
            raise self._io_error("read", place, nbytes, label, reason)

    def _io_error(
        self, operation: str, place: int, nbytes: int, label: str, reason: str, full: bool = False
    ) -> DiskError:
        advice = "free space there" if full else "check the system's log for errors of the disk"
        return DiskError(
            f"can't {operation} {nbytes} bytes of {label} at offset {place} of {self.title} {self.path}: {reason}; "
            f"{advice}, or {self.advice}"
        )
