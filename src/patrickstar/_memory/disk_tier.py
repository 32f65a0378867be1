"""The disk tier: chunks in a scratch file, moved a page at a time by threads of its own."""

import ctypes
from collections.abc import Callable, Iterator

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.swap_file import BLOCK_BYTES, PAGE_BYTES, SwapFile
from patrickstar._memory.worker_pool import Transfer, WorkerPool

STAGES = (READERS := 4) + (WRITERS := 2)
"""Threads that each keep one page under way. One disk read 1.05 GB/s with one thread and up to 1.6 with four, and wrote
3 GB/s with any number; waiting for a disk costs no time of a core."""


def pages(nbytes: int, page_bytes: int = PAGE_BYTES) -> Iterator[tuple[int, int]]:
    """Where the pages of a chunk of this size begin, and their bytes."""
    for start in range(0, nbytes, page_bytes):
        yield start, min(page_bytes, nbytes - start)


class DiskTier:
    """Reads and writes chunks of one engine. What moves is a flat tensor of bytes, on any device.

    `begin` is called first in each of its threads.
    """

    def __init__(self, file: SwapFile, page_bytes: int = PAGE_BYTES, begin: Callable[[], None] | None = None) -> None:
        self.file = file
        self.page_bytes = page_bytes
        self.readers = WorkerPool(READERS, "read", page_bytes, begin)
        self.writers = WorkerPool(WRITERS, "write", page_bytes, begin)
        self._written: set[int] = set()  # offsets of pages in the file; the others are zeros
        self._stream: torch.cuda.Stream | None = None

    def place(self, chunk: Chunk) -> None:
        """Have a place for a chunk, which it keeps for life."""
        if chunk.disk_offset is None:
            chunk.disk_offset = self.file.reserve(chunk.nbytes, repr(chunk))

    def forget(self, chunk: Chunk) -> None:
        """Take a chunk's place back, if it has one."""
        if chunk.disk_offset is not None:
            self._written.difference_update(
                chunk.disk_offset + first for first, _ in pages(chunk.nbytes, self.page_bytes)
            )
            self.file.free(chunk.disk_offset, chunk.nbytes)
            chunk.disk_offset = None

    def read(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Fill `target` with whole pages of a chunk, from byte `start` on. What was never written is zeros."""
        return self._submit(self.readers, self._read_page, chunk, start, target, urgent)

    def written_bytes(self, chunk: Chunk, start: int, nbytes: int) -> int:
        """How many of these bytes lie on the disk."""
        assert chunk.disk_offset is not None
        at = chunk.disk_offset + start
        return sum(length for first, length in pages(nbytes, self.page_bytes) if at + first in self._written)

    def write(self, chunk: Chunk, start: int, source: torch.Tensor) -> Transfer:
        """Put `source` over the bytes of a chunk from `start` on, whole pages of it.

        One page must not be under way twice.
        """
        assert chunk.disk_offset is not None
        self._written.update(chunk.disk_offset + start + first for first, _ in pages(source.numel(), self.page_bytes))
        return self._submit(self.writers, self._write_page, chunk, start, source, False)

    def close(self) -> None:
        """Stop the threads, and give the disk's room back."""
        self.readers.close()
        self.writers.close()
        self.file.close()

    def _submit(
        self,
        movers: WorkerPool,
        move: Callable[[torch.Tensor, str, int, torch.Tensor], None],
        chunk: Chunk,
        start: int,
        memory: torch.Tensor,
        urgent: bool,
    ) -> Transfer:
        assert chunk.disk_offset is not None and start % self.page_bytes == 0, f"{chunk} has no page at {start}"
        what, at = repr(chunk), chunk.disk_offset + start
        ready = None
        if memory.device.type != "cpu":
            if self._stream is None:
                self._stream = torch.cuda.Stream(memory.device)
            ready = torch.cuda.current_stream(memory.device).record_event()

        def job(first: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            page = memory[first : first + nbytes]

            def run(stage: torch.Tensor) -> None:
                if ready is not None:
                    ready.synchronize()  # what the device was asked before may still use this memory
                move(stage, what, at + first, page)

            return run

        return movers.submit([job(*page) for page in pages(memory.numel(), self.page_bytes)], what, urgent=urgent)

    def _read_page(self, stage: torch.Tensor, what: str, at: int, page: torch.Tensor) -> None:
        if at not in self._written:
            self._clear(page)
            return
        if _direct(page):
            self.file.read(at, _bytes(page), page.numel(), what)
            return
        self.file.read(at, _bytes(stage), page.numel(), what)
        self._copy(page, stage[: page.numel()])

    def _write_page(self, stage: torch.Tensor, what: str, at: int, page: torch.Tensor) -> None:
        if not _direct(page):
            self._copy(stage[: page.numel()], page)
            self.file.write(at, _bytes(stage), page.numel(), what)
            return
        self.file.write(at, _bytes(page), page.numel(), what)

    def _clear(self, page: torch.Tensor) -> None:
        if self._stream is None:
            ctypes.memset(page.data_ptr(), 0, page.numel())
            return
        with torch.cuda.stream(self._stream):
            page.zero_()
            done = self._stream.record_event()
        done.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In one thread: others of PyTorch's would get in the way of those that compute."""
        if self._stream is None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            landed = self._stream.record_event()
        landed.synchronize()  # this thread's wait: its stage is free again


def _direct(page: torch.Tensor) -> bool:
    """Whether the disk can move these bytes without a stage: it wants whole blocks, at addresses of blocks."""
    return page.device.type == "cpu" and page.data_ptr() % BLOCK_BYTES == 0 and page.numel() % BLOCK_BYTES == 0


def _bytes(memory: torch.Tensor) -> memoryview:
    """A tensor's memory for the system's calls; `numpy()` would keep its storage from ever being resized."""
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")
