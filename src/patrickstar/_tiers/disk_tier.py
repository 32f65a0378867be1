"""Disk tier: chunks in a swap file, transferred page by page by worker threads."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.direct_io import BLOCK_BYTES, PAGE_BYTES
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.linked_file import LinkedPage
from patrickstar._tiers.page_codec import PageCodec
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import DiskError

STAGES = (READERS := 4) + (WRITERS := 2)
"""Threads, each with one page in flight. One disk read 1.05 GB/s with one thread and up to 1.6 with four, and wrote
3 GB/s with any number; threads that wait for a disk use no CPU time."""


# [Note: spare pages]
# A chunk may have a second block in the swap file, of spare pages. New content is written there page by page while the
# old pages stay valid, and becomes the chunk's with one exchange of the blocks (`swap_spare`). The old block then has
# the spare pages. Pages of all lists have the same elements, so that one update writes whole pages.


def stage_pages(packed: bool, has_gpu: bool) -> int:
    """Return the pages that each thread's buffer holds: a packed one beside one on its way from or to the device."""
    return 1 + (packed and has_gpu)


def pages(nbytes: int, page_bytes: int = PAGE_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each page of `nbytes`."""
    for start in range(0, nbytes, page_bytes):
        yield start, min(page_bytes, nbytes - start)


class DiskTier:
    """Reads and writes the chunks of one engine, as flat uint8 tensors on the host or on the accelerator.

    Args:
        codec: Codec of the pages of fp32 chunks, None to store these as they are. See [Note: packed pages].
    """

    def __init__(
        self,
        file: SwapFile,
        page_bytes: int = PAGE_BYTES,
        accelerator: TorchDevice | None = None,
        codec: PageCodec | None = None,
    ) -> None:
        self.file = file
        self.page_bytes = page_bytes
        self.codec = codec
        self._written: dict[int, int] = {}
        """Stored bytes of each page that was written, by its offset; all others read as zeros."""
        self._unplanned_bytes = 0
        self._lock = threading.Lock()
        self.accelerator = accelerator
        self._stages: list[HostArena] = []
        self._thread = threading.local()
        begin = None if accelerator is None else accelerator.enter_worker
        new_stage = None if accelerator is None else self._page_locked_stage
        stage_bytes = page_bytes * stage_pages(codec is not None, accelerator is not None)
        self.readers = WorkerPool(READERS, "read", stage_bytes, begin, new_stage)
        self.writers = WorkerPool(WRITERS, "write", stage_bytes, begin, new_stage)

    def _page_locked_stage(self, nbytes: int) -> torch.Tensor:
        self._stages.append(HostArena(nbytes, self.accelerator))
        return self._stages[-1].memory

    def page_bytes_of(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk's pages: as many elements as a page has in fp32, if these are whole blocks."""
        nbytes = self.page_bytes * chunk.dtype.itemsize // torch.float32.itemsize
        return nbytes if nbytes < self.page_bytes and nbytes % BLOCK_BYTES == 0 else self.page_bytes

    def reserve(self, chunk: Chunk) -> None:
        if chunk.disk.offset is None:
            chunk.disk.offset = self.file.reserve(chunk.nbytes, repr(chunk), page_bytes=self.page_bytes_of(chunk))

    def release(self, chunk: Chunk) -> None:
        if chunk.disk.offset is not None:
            self._free(chunk, chunk.disk.offset)
            chunk.disk.offset = None
        if chunk.disk.spare_offset is not None:
            self._free(chunk, chunk.disk.spare_offset)
            chunk.disk.spare_offset = None

    def _free(self, chunk: Chunk, offset: int) -> None:
        page_bytes = self.page_bytes_of(chunk)
        with self._lock:
            for first, _ in pages(chunk.nbytes, page_bytes):
                self._written.pop(offset + first, None)
        self.file.free(offset, chunk.nbytes, page_bytes)

    def reserve_spare(self, chunk: Chunk) -> None:
        """Reserve spare pages for a chunk. Raises DiskError or BudgetError if the disk is full."""
        if chunk.disk.spare_offset is None:
            label, page_bytes = f"spare pages of {chunk}", self.page_bytes_of(chunk)
            chunk.disk.spare_offset = self.file.reserve(chunk.nbytes, label, page_bytes=page_bytes, planned=False)

    def swap_spare(self, chunk: Chunk) -> None:
        """Make the spare pages of a chunk its pages, and these its spare pages."""
        assert chunk.disk.spare_offset is not None, f"{chunk} has no spare pages"
        chunk.disk.offset, chunk.disk.spare_offset = chunk.disk.spare_offset, chunk.disk.offset

    def read(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Read whole pages of a chunk, from byte `start` on; pages never written read as zeros."""
        return self._submit(self.readers, self._read_page, chunk, start, target, urgent)

    def written_bytes(self, chunk: Chunk, start: int, nbytes: int) -> int:
        """Return the bytes on the disk of the pages among these that were written."""
        assert chunk.disk.offset is not None
        offset = chunk.disk.offset + start
        page_bytes = self.page_bytes_of(chunk)
        return sum(self._written.get(offset + first, 0) for first, _ in pages(nbytes, page_bytes))

    def planned_bytes(self, chunk: Chunk, nbytes: int) -> int:
        """Return the bytes that a write of whole pages of a chunk is planned to store."""
        stored_bytes = int if (codec := self._codec_of(chunk)) is None else codec.stored_bytes
        return sum(stored_bytes(length) for _, length in pages(nbytes, self.page_bytes_of(chunk)))

    def _codec_of(self, chunk: Chunk) -> PageCodec | None:
        return self.codec if chunk.dtype == torch.float32 else None

    def unpacks(self, chunk: Chunk) -> bool:
        """Return whether packed pages of a chunk can be read."""
        return self._codec_of(chunk) is not None

    def pop_unplanned_bytes(self) -> int:
        """Return the bytes beyond those planned of the pages that were packed since the last call."""
        with self._lock:
            nbytes, self._unplanned_bytes = self._unplanned_bytes, 0
        return nbytes

    def write(self, chunk: Chunk, start: int, source: torch.Tensor, *, spare: bool = False) -> Transfer:
        """Write whole pages of a chunk, or its `spare` pages, from byte `start` on; no page may be in flight twice."""
        offset = chunk.disk.spare_offset if spare else chunk.disk.offset
        assert offset is not None
        for first, length in pages(source.numel(), self.page_bytes_of(chunk)):
            page = offset + start + first
            self.file.announce_write(page, length, repr(chunk))
            self._written[page] = self.planned_bytes(chunk, length)
        return self._submit(self.writers, self._write_page, chunk, start, source, False, spare)

    def pages_of(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return the offset in the swap file and the unpacked bytes of each page of a chunk."""
        assert chunk.disk.offset is not None
        offset = chunk.disk.offset
        return [(offset + first, nbytes) for first, nbytes in pages(chunk.nbytes, self.page_bytes_of(chunk))]

    def link(self, chunk: Chunk, linked: Sequence[LinkedPage | None]) -> None:
        """Let a chunk on the disk have the pages of a checkpoint; None: zeros. See [Note: linked pages]."""
        pages = {}
        for (offset, _), page in zip(self.pages_of(chunk), linked, strict=True):
            self._written.pop(offset, None)
            if page is not None:
                self._written[offset], pages[offset] = page.nbytes, page
        self.file.link(pages)
        chunk.version += 1

    def is_written(self, offset: int) -> bool:
        """Return whether the page at an offset was written; all others read as zeros."""
        return offset in self._written

    def close(self) -> None:
        self.readers.close()
        self.writers.close()
        for stage in self._stages:
            stage.unlock()
        self.file.close()

    def _submit(
        self,
        pool: WorkerPool,
        transfer_page: Callable[[torch.Tensor, Chunk, int, torch.Tensor, torch.Event | None], None],
        chunk: Chunk,
        start: int,
        memory: torch.Tensor,
        urgent: bool,
        spare: bool = False,
    ) -> Transfer:
        page_bytes, block = self.page_bytes_of(chunk), chunk.disk.spare_offset if spare else chunk.disk.offset
        assert block is not None and start % page_bytes == 0, f"{chunk} has no page at {start}"
        label, offset = repr(chunk), block + start
        # Earlier work of the device may still use device memory: a copy is ordered after it, but the disk need not be.
        ready = None
        if memory.device.type != "cpu":
            assert self.accelerator is not None, f"{chunk} is on {memory.device}, which has no accelerator"
            ready = self.accelerator.record()

        def job(first: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            page = memory[first : first + nbytes]
            return lambda stage: transfer_page(stage, chunk, offset + first, page, ready)

        return pool.submit([job(*page) for page in pages(memory.numel(), page_bytes)], label, urgent=urgent)

    def _read_page(
        self, stage: torch.Tensor, chunk: Chunk, offset: int, page: torch.Tensor, ready: torch.Event | None
    ) -> None:
        if (length := self._written.get(offset)) is None:
            if ready is None:
                ctypes.memset(page.data_ptr(), 0, page.numel())
            else:
                self._on_stream(page.zero_, ready)
            return
        codec, nbytes = self._codec_of(chunk), page.numel()
        if codec is not None and length < nbytes:
            unpacked, packed = page if ready is None else stage[:nbytes], stage[-self.page_bytes :]
            self.file.read(offset, _bytes(packed), length, repr(chunk))
            if not codec.unpack(packed.data_ptr(), length, unpacked.data_ptr(), nbytes):
                raise DiskError(f"a page of {chunk} at offset {offset} of {self.file} is damaged: it can't be unpacked")
        else:
            unpacked = page if _direct(page) else stage[:nbytes]
            self.file.read(offset, _bytes(page if unpacked is page else stage), nbytes, repr(chunk))
        if unpacked is not page:
            self._copy(page, unpacked, ready)

    def _write_page(
        self, stage: torch.Tensor, chunk: Chunk, offset: int, page: torch.Tensor, ready: torch.Event | None
    ) -> None:
        try:
            self._write_announced(stage, chunk, offset, page, ready)
        finally:
            self.file.end_write(offset)

    def _write_announced(
        self, stage: torch.Tensor, chunk: Chunk, offset: int, page: torch.Tensor, ready: torch.Event | None
    ) -> None:
        codec, nbytes, on_host = self._codec_of(chunk), page.numel(), page
        if ready is not None:
            self._copy(on_host := stage[:nbytes], page, ready)
        if codec is not None and self._write_packed(codec, stage[-self.page_bytes :], chunk, offset, on_host):
            return
        if on_host is page and not _direct(page):
            self._copy(stage[:nbytes], page, ready)
        self.file.write(offset, _bytes(page if _direct(page) else stage), nbytes, repr(chunk))

    def _write_packed(
        self, codec: PageCodec, packed: torch.Tensor, chunk: Chunk, offset: int, page: torch.Tensor
    ) -> bool:
        """Pack a page on the host into `packed`, and write that at `offset`. Return False if nothing is gained."""
        nbytes = page.numel()
        length = codec.pack(page.data_ptr(), nbytes, packed.data_ptr())
        with self._lock:
            self._unplanned_bytes += length - codec.stored_bytes(nbytes)
            if offset in self._written:  # else the chunk was released meanwhile
                self._written[offset] = length
        if length == nbytes:
            return False
        self.file.write(offset, _bytes(packed), length, repr(chunk))
        return True

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.Event | None) -> None:
        """Copy in one thread: PyTorch's intra-op threads would compete with the computation."""
        if ready is None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        else:
            self._on_stream(lambda: target.copy_(source, non_blocking=True), ready)

    def _on_stream(self, action: Callable[[], object], ready: torch.Event) -> None:
        """Run an action of the device on this thread's stream, after the event `ready`, and wait for it."""
        assert self.accelerator is not None
        if not hasattr(self._thread, "stream"):
            self._thread.stream = self.accelerator.new_stream()
        with self.accelerator.use(self._thread.stream, after_current=False):
            self.accelerator.order(ready)
            action()
            done = self.accelerator.record()
        self.accelerator.wait(done)  # the thread's staging buffer is free again


def _direct(page: torch.Tensor) -> bool:
    """Return True if direct I/O needs no staging buffer: whole blocks at an aligned host address."""
    return page.device.type == "cpu" and page.data_ptr() % BLOCK_BYTES == 0 and page.numel() % BLOCK_BYTES == 0


def _bytes(memory: torch.Tensor) -> memoryview:
    """Return a tensor's memory as bytes; `numpy()` would prevent its storage from ever being resized."""
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")
