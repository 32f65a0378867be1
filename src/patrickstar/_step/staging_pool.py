"""A ring of pages on the host, which pages of chunks on disk pass through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.vm_pool import round_up
from patrickstar._memory.worker_pool import Transfer

SETS = 12
"""Pages of each list that are under way at once: while the longest operator runs, the disk must find some to fill."""


@dataclass(frozen=True)
class StagingSize:
    """How large a page of the ring is, and how many there are."""

    page_bytes: int
    pages: int
    by_pages: bool
    """Whether an update can be cut into pages; else one page holds a whole chunk of a list."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.page_bytes * self.pages

    @classmethod
    def suited(
        cls, lists: int, largest_list_bytes: int, disk_page_bytes: int, by_pages: bool, room_bytes: int
    ) -> "StagingSize":
        """One for chunks with so many lists, within `room_bytes` if that is enough for two pages of each."""
        nbytes = min(disk_page_bytes, round_up(largest_list_bytes)) if by_pages else round_up(largest_list_bytes)
        sets = min(SETS if by_pages else 2, max(2, room_bytes // (lists * nbytes)))
        return cls(nbytes, lists * sets, by_pages)


@dataclass(eq=False)
class PageSet:
    """A page of each of some parallel lists of one chunk index, between being read and being written."""

    lists: list[Chunk]
    first: int
    numel: int
    buffers: list[int]
    versions: list[int]
    """The chunks' disk versions when it was read."""
    owner: Any = None
    """Whose update it is for; None while it was read on trust."""
    updated: bool = False
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)

    @property
    def index(self) -> int:
        """The chunks' index."""
        return self.lists[0].index

    @property
    def ready(self) -> bool:
        """Whether all its bytes are there."""
        return len(self.reads) == len(self.lists) and all(transfer.done for transfer in self.reads)

    def serves(self, lists: list[Chunk]) -> bool:
        """Whether these are the lists that an update wants, as they lie on disk now."""
        return self.lists == lists and self.versions == [chunk.disk_version for chunk in lists]


class StagingPool:
    """Owns the pages. Which are free follows from the sets that live: Ctrl-C may strike between any two lines."""

    def __init__(self, manager: ChunkManager, size: StagingSize) -> None:
        self.manager = manager
        self.size = size
        assert manager.disk_tier is not None
        self._page_bytes = manager.disk_tier.page_bytes
        self._place = manager.host_tier.allocate_block(size.nbytes)
        # Memory that was never written is not there yet, and a meter would take it for somebody else's later.
        manager.host_tier.view(self._place, torch.uint8).zero_()
        self.live: list[PageSet] = []
        """All sets, in the order in which they came."""

    def free(self) -> list[int]:
        """Pages that no set holds."""
        taken = {number for there in self.live for number in there.buffers}
        return [number for number in range(self.size.pages) if number not in taken]

    def pages(self, chunk: Chunk) -> list[tuple[int, int]]:
        """The first element and the length of each page of a list."""
        length = self._page_bytes // chunk.dtype.itemsize if self.size.by_pages else chunk.numel
        return [(first, min(length, chunk.numel - first)) for first in range(0, chunk.numel, max(1, length))]

    @defer_sigint
    def start_read(self, lists: list[Chunk], first: int, numel: int) -> PageSet | None:
        """Begin to read a page of each list; None where the ring is full, or the last update is not yet on disk."""
        free = self.free()
        if any(chunk.has_page_writes for chunk in lists) or len(free) < len(lists):
            return None
        there = PageSet(lists, first, numel, free[: len(lists)], [chunk.disk_version for chunk in lists])
        self.live.append(there)
        self.complete(there)
        return there

    @defer_sigint
    def complete(self, there: PageSet) -> None:
        """Begin to read those of a set's pages that are not under way."""
        views = self.views(there)
        for chunk, memory in list(zip(there.lists, views, strict=True))[len(there.reads) :]:
            start = there.first * chunk.dtype.itemsize
            read = self.manager.io_dispatch.read(chunk, start, memory.view(torch.uint8))
            chunk.page_reads = [*(one for one in chunk.page_reads if not one.done), read]
            there.reads.append(read)

    def views(self, there: PageSet) -> list[torch.Tensor]:
        """The set's pages as tensors, in the order of its lists."""
        ring = self.manager.host_tier.view(self._place, torch.uint8)
        found = []
        for chunk, number in zip(there.lists, there.buffers, strict=True):
            begin, nbytes = number * self.size.page_bytes, there.numel * chunk.dtype.itemsize
            assert nbytes <= self.size.page_bytes, f"{nbytes} bytes of {chunk} in a page of {self.size.page_bytes}"
            found.append(ring[begin : begin + nbytes].view(chunk.dtype))
        return found

    @defer_sigint
    def write(self, there: PageSet, lists: Sequence[Chunk]) -> None:
        """Begin to write the pages of these of a set's lists back."""
        for chunk, memory in zip(there.lists, self.views(there), strict=True):
            if chunk in lists:
                start = there.first * chunk.dtype.itemsize
                write = self.manager.io_dispatch.write(chunk, start, memory.view(torch.uint8))
                there.writes.append(write)
                chunk.page_writes.append(write)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait for transfers."""
        for transfer in transfers:
            self.manager.io_dispatch.wait(transfer)

    @defer_sigint
    def drop(self, there: PageSet) -> None:
        """Pages that nobody wants after all; the disk must not write into what is used for something else."""
        self.wait(there.reads)
        self.wait(there.writes)
        self.live.remove(there)

    @defer_sigint
    def collect(self) -> None:
        """Take pages back whose bytes are on disk."""
        for there in [there for there in self.live if there.updated]:
            if all(transfer.done for transfer in there.writes):
                self.wait(there.writes)
                for chunk in there.lists:
                    chunk.page_writes = [transfer for transfer in chunk.page_writes if not transfer.done]
                self.live.remove(there)
