"""Disk tier: chunks in a swap file, transferred page by page by worker threads."""

import ctypes
from collections.abc import Callable, Iterator

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.direct_io import BLOCK_BYTES, PAGE_BYTES
from patrickstar._memory.swap_file import SwapFile
from patrickstar._memory.transfer import Transfer
from patrickstar._memory.worker_pool import WorkerPool

STAGES = (READERS := 4) + (WRITERS := 2)
"""Threads, each with one page in flight. One disk read 1.05 GB/s with one thread and up to 1.6 with four, and wrote
3 GB/s with any number; threads that wait for a disk use no CPU time."""


def pages(nbytes: int, page_bytes: int = PAGE_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each page of `nbytes`."""
    for start in range(0, nbytes, page_bytes):
        yield start, min(page_bytes, nbytes - start)


class DiskTier:
    """Reads and writes the chunks of one engine, as flat uint8 tensors on any device.

    `begin` is called first in each worker thread.
    """

    def __init__(self, file: SwapFile, page_bytes: int = PAGE_BYTES, begin: Callable[[], None] | None = None) -> None:
        self.file = file
        self.page_bytes = page_bytes
        self.readers = WorkerPool(READERS, "read", page_bytes, begin)
        self.writers = WorkerPool(WRITERS, "write", page_bytes, begin)
        self._written: set[int] = set()  # offsets of written pages; all others read as zeros
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, chunk: Chunk) -> None:
        if chunk.disk_offset is None:
            chunk.disk_offset = self.file.reserve(chunk.nbytes, repr(chunk))

    def release(self, chunk: Chunk) -> None:
        if chunk.disk_offset is not None:
            self._written.difference_update(
                chunk.disk_offset + first for first, _ in pages(chunk.nbytes, self.page_bytes)
            )
            self.file.free(chunk.disk_offset, chunk.nbytes)
            chunk.disk_offset = None

    def read(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Read whole pages of a chunk, from byte `start` on; pages never written read as zeros."""
        return self._submit(self.readers, self._read_page, chunk, start, target, urgent)

    def written_bytes(self, chunk: Chunk, start: int, nbytes: int) -> int:
        """Return the number of these bytes that were written to the disk."""
        assert chunk.disk_offset is not None
        offset = chunk.disk_offset + start
        return sum(length for first, length in pages(nbytes, self.page_bytes) if offset + first in self._written)

    def write(self, chunk: Chunk, start: int, source: torch.Tensor) -> Transfer:
        """Write whole pages of a chunk, from byte `start` on; no page may be in flight twice."""
        assert chunk.disk_offset is not None
        self._written.update(chunk.disk_offset + start + first for first, _ in pages(source.numel(), self.page_bytes))
        return self._submit(self.writers, self._write_page, chunk, start, source, False)

    def close(self) -> None:
        self.readers.close()
        self.writers.close()
        self.file.close()

    def _submit(
        self,
        pool: WorkerPool,
        transfer_page: Callable[[torch.Tensor, str, int, torch.Tensor], None],
        chunk: Chunk,
        start: int,
        memory: torch.Tensor,
        urgent: bool,
    ) -> Transfer:
        assert chunk.disk_offset is not None and start % self.page_bytes == 0, f"{chunk} has no page at {start}"
        label, offset = repr(chunk), chunk.disk_offset + start
        ready = None
        if memory.device.type != "cpu":
            if self._stream is None:
                self._stream = torch.cuda.Stream(memory.device)
            ready = torch.cuda.current_stream(memory.device).record_event()

        def job(first: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            page = memory[first : first + nbytes]

            def run(stage: torch.Tensor) -> None:
                if ready is not None:
                    ready.synchronize()  # earlier work of the device may still use this memory
                transfer_page(stage, label, offset + first, page)

            return run

        return pool.submit([job(*page) for page in pages(memory.numel(), self.page_bytes)], label, urgent=urgent)

    def _read_page(self, stage: torch.Tensor, label: str, offset: int, page: torch.Tensor) -> None:
        if offset not in self._written:
            self._clear(page)
            return
        direct = _direct(page)
        self.file.read(offset, _bytes(page if direct else stage), page.numel(), label)
        if not direct:
            self._copy(page, stage[: page.numel()])

    def _write_page(self, stage: torch.Tensor, label: str, offset: int, page: torch.Tensor) -> None:
        direct = _direct(page)
        if not direct:
            self._copy(stage[: page.numel()], page)
        self.file.write(offset, _bytes(page if direct else stage), page.numel(), label)

    def _clear(self, page: torch.Tensor) -> None:
        if self._stream is None:
            ctypes.memset(page.data_ptr(), 0, page.numel())
            return
        with torch.cuda.stream(self._stream):
            page.zero_()
            done = self._stream.record_event()
        done.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in one thread: PyTorch's intra-op threads would compete with the computation."""
        if self._stream is None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()  # the thread's staging buffer is free again


def _direct(page: torch.Tensor) -> bool:
    """Return True if direct I/O needs no staging buffer: whole blocks at an aligned host address."""
    return page.device.type == "cpu" and page.data_ptr() % BLOCK_BYTES == 0 and page.numel() % BLOCK_BYTES == 0


def _bytes(memory: torch.Tensor) -> memoryview:
    """Return a tensor's memory as bytes; `numpy()` would prevent its storage from ever being resized."""
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")
