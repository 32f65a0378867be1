"""CPU tensors in a file: a model larger than memory is built there before its parameters move into chunks."""

import os
import tempfile
import threading
import warnings
from pathlib import Path
from types import TracebackType

from patrickstar._hardware.cpu_allocator import CpuAllocator
from patrickstar._hardware.vm_pool import SYSTEM_PAGE
from patrickstar._layout.byte_size import format_size
from patrickstar.errors import DiskError

CHECK_S = 0.005
"""Seconds between two checks of the resident pages; a core writes a few MiB in this time."""

# [Note: building a model larger than memory]
# The model's own code allocates and initialises its parameters, in any order and more than once (transformers
# initialises the modules in their constructors, and again when the model is complete). So each parameter must be
# readable and writable at every moment until the model is complete, also by other threads and by native code. Large
# tensors are therefore mapped from an unnamed file: a thread drops their pages from memory when there are too many, and
# the kernel reads them back at the next access. The arithmetic is not involved, so the values are those of a plain
# construction. Afterwards the parameters move into chunks one by one, and each leaves the file.
#
# The disk space of a tensor is reserved when it is allocated. If the file may not grow, the disk is full, or the file
# system can't reserve space, tensors are allocated in memory as usual.


class FileBackedTensors:
    """While the context is entered, large new CPU tensors are in a file, with at most `limit_bytes` of it in memory.

    A process has one such context at a time; a second one, nested or in another thread, does nothing. Tensors that
    outlive the context stay usable, and the disk space is freed with the last of them.

    Args:
        directory: Where the file is; it has no name.
        capacity_bytes: Largest size of the file. Further tensors are in memory, and a warning says how many bytes.
        limit_bytes: Resident size above which pages leave memory; it may be changed at any time.

    Raises:
        DiskError: The directory can't be written.
    """

    def __init__(self, allocator: CpuAllocator, directory: Path, capacity_bytes: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._allocator = allocator
        self._directory, self._capacity_bytes = directory, capacity_bytes
        try:
            self._file = tempfile.TemporaryFile(prefix="patrickstar-", suffix=".tensors", dir=directory)  # noqa: SIM115
        except OSError as error:
            raise DiskError(
                f"a model larger than memory can't be built in {directory}: {error.strerror}; use another directory"
            ) from error
        self._statm = open("/proc/self/statm", "rb")  # noqa: SIM115
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="patrickstar-pages", daemon=True)
        self._active = False

    def __enter__(self) -> "FileBackedTensors":
        self._foreign_bytes = self._mapped_bytes()
        self._active = self._allocator.open_file(self._file.fileno(), self._capacity_bytes)
        try:
            if self._active:
                self._watcher.start()
        except BaseException:
            self._allocator.close_file()
            self._active = False
            raise
        return self

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file on the disk."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def stop_allocating(self) -> None:
        """Allocate new tensors in memory again; those in the file stay there."""
        if not self._active:
            return
        self._allocator.stop_file()
        if refused := self._allocator.refused_bytes:
            warnings.warn(
                f"{refused} bytes ({format_size(refused)}) of the model were built in memory, beyond the budgets: a "
                f"file in {self._directory} had no space for them; free space there, or raise the disk's capacity",
                stacklevel=2,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._active:
                self._ended.set()
                self._watcher.join()
        finally:
            if self._active:
                self._allocator.close_file()
            self._file.close()
            self._statm.close()

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_S):
            if self._mapped_bytes() - self._foreign_bytes > self.limit_bytes:
                self._allocator.drop_file_pages()
                # What is still mapped belongs to other files, such as checkpoints and libraries.
                self._foreign_bytes = self._mapped_bytes()
                # Clean pages leave the page cache, which would otherwise grow to the size of the file.
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _mapped_bytes(self) -> int:
        """Return the resident pages of all files that this process has mapped, in bytes."""
        # The file stays open, since the model's code may use up all descriptors.
        return int(os.pread(self._statm.fileno(), 1 << 10, 0).split()[2]) * SYSTEM_PAGE
