"""Pages of a checkpoint's linked file, which chunks are read from until their next content is written."""

import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from patrickstar._hardware.direct_io import try_direct
from patrickstar._tiers.hidden_names import PREFIX, SUFFIX, close
from patrickstar._tiers.page_file import PageFile

# [Note: linked pages]
# A checkpoint by reference has whole chunks as they were on the disk. An engine that loads it, and has the same chunks
# on disk, reads their pages there, and its swap file gets their next content. So loading takes no time for them. Each
# page is verified when it is read. Nothing is written through the link. As long as a page is read there, the file has
# this link more, so that a run which still writes the file, this one or another, leaves the pages as they are, also
# once the checkpoint is deleted.


class LinkedFile(PageFile):
    """File that a checkpoint links to, open to be read; it is closed with the last page that refers to it.

    Args:
        path: The checkpoint's link.
        directory: Directory of the swap file, on the same file system.
        direct: Read with direct I/O where the file system supports it.

    Raises:
        OSError: The file can't be linked or opened.
    """

    title, advice = "the loaded checkpoint's", "resume from an older checkpoint"

    def __init__(self, path: Path, directory: Path, *, direct: bool) -> None:
        self.path = path
        link = directory / f"{PREFIX}{secrets.token_hex(4)}{SUFFIX}"
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, close, self._fd, link)
        os.link(path, link)
        self.direct = direct and try_direct(self._fd, os.preadv)


@dataclass(frozen=True)
class LinkedPage:
    """Page in a linked file: its place, the bytes that are stored there, and their hash."""

    file: LinkedFile
    place: int
    nbytes: int
    hashed: int

    def read(self, buffer: memoryview, nbytes: int, label: str) -> None:
        """Read and verify it, as `SwapFile.read` does. Raises DiskError."""
        self.file._move("read", self.place, buffer, nbytes, label)
        self.verify(xxh3_64_intdigest(buffer[:nbytes]), nbytes, label)

    def verify(self, hashed: int, nbytes: int, label: str) -> None:
        """Raise DiskError if so many bytes with this hash are not the page."""
        self.file._verify(self.place, hashed, nbytes, label, (self.nbytes, self.hashed))
