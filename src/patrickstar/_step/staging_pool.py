"""Staging pool: host buffers for the pages of chunks that are updated from disk to disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.schema import PARAM16, SHARD16
from patrickstar._tiers.chunk import Chunk

SETS = 12
"""Page sets in flight at once: enough free buffers to keep the disk busy during the longest operator."""
SETS_BESIDE_UPDATES = 40
"""The same if operators also wait for updates of states on the host: a drive of 7 GB/s goes on for 70 ms. Dry runs of
an 8B model with 64 GB and such a drive take 9.2 s with 12 sets, 8.0 with 28, 7.7 with 40, 7.6 with 60 and 7.9 with 158.
"""
HOST_SHARE = 20
"""Beyond `SETS`, buffers take at most this part of the host: states that they leave no room for are read and written in
each step."""


@dataclass(frozen=True)
class StagingSize:
    """Size and number of the staging buffers."""

    page_bytes: int
    pages: int
    by_pages: bool
    """Updates may be cut into pages of the disk; otherwise one buffer holds any chunk whose updates must not be cut."""

    @property
    def nbytes(self) -> int:
        """Host memory of all buffers."""
        return self.page_bytes * self.pages

    @classmethod
    def choose(
        cls,
        lists: int,
        largest_list_bytes: int,
        disk_page_bytes: int,
        uncut_bytes: int | None,
        room_bytes: int,
        beside_updates: bool = False,
    ) -> "StagingSize":
        """Choose as many buffers as fit into `room_bytes`, but at least two and at most `SETS` for each list.

        Args:
            lists: Number of lists that an update reads.
            largest_list_bytes: Size of the largest chunk of a list.
            disk_page_bytes: Unit of disk transfers.
            uncut_bytes: Size of the largest chunk whose updates must not be cut; None if all may be.
            room_bytes: Host memory that is left.
            beside_updates: States on the host are updated beside operators: up to `SETS_BESIDE_UPDATES`.
        """
        by_pages = uncut_bytes is None
        nbytes = min(disk_page_bytes, round_up(largest_list_bytes))
        if uncut_bytes is not None:
            # Chunks that may be cut use the same buffers, so these end where pages of the disk do.
            nbytes *= max(1, -(-uncut_bytes // nbytes))
        fitting = room_bytes // (lists * nbytes)
        most = min(SETS_BESIDE_UPDATES, max(SETS, fitting // HOST_SHARE)) if beside_updates else SETS
        sets = min(most if by_pages else 2, max(2, fitting))
        return cls(nbytes, lists * sets, by_pages)


@dataclass(eq=False)
class PageSet:
    """One page of each parallel list of a chunk index, from the start of its reads to the end of its writes."""

    lists: list[Chunk]
    first: int
    """First element of the page in its chunks."""
    numel: int
    buffers: list[int]
    versions: list[int]
    """Disk versions of the chunks when the reads started."""
    owner: Any = None
    """The `DiskUpdate` that reads it; None for a speculative read."""
    update: Any = None
    """The `StreamedUpdate` that updates it, once started, beside an accelerator."""
    updated: bool = False
    param_buffer: int | None = None
    """Buffer of the new parameters, if these do not replace the gradients."""
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.lists[0].index

    @property
    def ready(self) -> bool:
        return len(self.reads) == len(self.lists) and all(transfer.done for transfer in self.reads)

    def is_current(self, lists: list[Chunk]) -> bool:
        """Return whether it was read from the first of these lists, and they have not changed on disk since."""
        return self.lists == lists[: len(self.lists)] and self.versions == [chunk.version for chunk in self.lists]


class StagingPool:
    """Owner of the buffers. `live` alone determines which are free, so that Ctrl-C may strike between any two lines."""

    def __init__(self, manager: ChunkManager, size: StagingSize) -> None:
        self.manager = manager
        self.size = size
        assert manager.disk_tier is not None
        self._page_bytes = manager.disk_tier.page_bytes
        self._block = manager.host_tier.allocate_block(size.nbytes)
        # Untouched memory is not resident; the meter would later count its pages as non-model data.
        manager.host_tier.view(self._block, torch.uint8).zero_()
        self.live: list[PageSet] = []
        """Page sets that hold buffers, in the order of their reads."""

    def free(self) -> list[int]:
        used = {number for pages in self.live for number in pages.buffers}
        used.update(pages.param_buffer for pages in self.live if pages.param_buffer is not None)
        return [number for number in range(self.size.pages) if number not in used]

    def pages(self, lists: Sequence[Chunk]) -> list[tuple[int, int]]:
        """Return the first element and the number of elements of each page of parallel lists."""
        itemsize, numel = max(chunk.dtype.itemsize for chunk in lists), lists[0].numel
        length = (self._page_bytes if self.size.by_pages else self.size.page_bytes) // itemsize
        return [(first, min(length, numel - first)) for first in range(0, numel, max(1, length))]

    @staticmethod
    def writes_page(lists: Sequence[Chunk], first: int) -> bool:
        """Return whether the page that begins at element `first` of any list is being written."""
        return any(chunk.disk.writes_page(first * chunk.dtype.itemsize) for chunk in lists)

    def start_read(self, lists: list[Chunk], first: int, numel: int) -> PageSet | None:
        """Start to read a page of each list; None without free buffers or while an earlier update of it is written."""
        free = self.free()
        if len(free) < len(lists) or self.writes_page(lists, first):
            return None
        pages = PageSet(lists, first, numel, free[: len(lists)], [chunk.version for chunk in lists])
        self.live.append(pages)
        self.complete(pages)
        return pages

    def extend(self, pages: PageSet, lists: list[Chunk]) -> PageSet | None:
        """Start to read the page of further lists beside the first ones of a page set, as `start_read` does."""
        more, free = lists[len(pages.lists) :], self.free()
        if len(free) < len(more) or self.writes_page(more, pages.first):
            return None
        pages.versions = [*pages.versions, *(chunk.version for chunk in more)]
        pages.lists, pages.buffers = lists, [*pages.buffers, *free[: len(more)]]
        self.complete(pages)
        return pages

    def complete(self, pages: PageSet) -> None:
        """Start the reads of a page set that have not started yet."""
        if len(pages.reads) == len(pages.lists):
            return
        for chunk, number in list(zip(pages.lists, pages.buffers, strict=True))[len(pages.reads) :]:
            start = pages.first * chunk.dtype.itemsize
            read = self.manager.io_dispatch.read(chunk, start, self._part(number, pages.numel, chunk.dtype))
            chunk.disk.reads = [*(transfer for transfer in chunk.disk.reads if not transfer.done), read]
            pages.reads.append(read)

    def views(self, pages: PageSet) -> dict[str, torch.Tensor]:
        """Return the pages as tensors, by list, a shard's as `param16`; with the buffer of new parameters, if any."""
        buffers = dict(zip(pages.lists, pages.buffers, strict=True))
        if pages.param_buffer is not None:
            buffers[pages.owner.param16] = pages.param_buffer
        views = {
            chunk.kind: self._part(number, pages.numel, chunk.dtype).view(chunk.dtype)
            for chunk, number in buffers.items()
        }
        return {PARAM16: views.pop(SHARD16), **views} if SHARD16 in views else views

    def _part(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of the first elements of a buffer."""
        begin, nbytes = number * self.size.page_bytes, numel * dtype.itemsize
        assert nbytes <= self.size.page_bytes, f"{nbytes} bytes of {dtype} in a page of {self.size.page_bytes}"
        return self._block.arena.part(self._block, begin, nbytes)

    def take_param_buffer(self, pages: PageSet) -> bool:
        """Take a buffer for new parameters. Return False if none is free."""
        if pages.param_buffer is None and (free := self.free()):
            pages.param_buffer = free[0]
        return pages.param_buffer is not None

    def write(self, pages: PageSet, lists: Sequence[Chunk]) -> None:
        """Start to write back the pages of the given lists."""
        for chunk, number in zip(pages.lists, pages.buffers, strict=True):
            if chunk in lists:
                self._start_write(pages, chunk, number)

    def write_spare(self, pages: PageSet, param16: Chunk) -> None:
        """Start to write pages of all lists, and of the new parameters, to spare pages of their chunks."""
        assert pages.param_buffer is not None, "a page set without new parameters"
        for chunk, number in zip([*pages.lists, param16], [*pages.buffers, pages.param_buffer], strict=True):
            self._start_write(pages, chunk, number, spare=True)

    def _start_write(self, pages: PageSet, chunk: Chunk, number: int, *, spare: bool = False) -> None:
        start = pages.first * chunk.dtype.itemsize
        memory = self._part(number, pages.numel, chunk.dtype)
        write = self.manager.io_dispatch.write(chunk, start, memory, spare=spare)
        pages.writes.append(write)
        chunk.disk.writes[start] = write

    def keep_until(self, job: Transfer) -> None:
        """Keep the buffers where they are until a job, the last one that uses them, has ended."""
        self.manager.host_tier.copy_issued(self._block, job)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self.manager.io_dispatch.wait(transfer)

    def wait_for_buffers(self) -> None:
        """Wait until the page set that was updated first is written back; later ones are written meanwhile."""
        written = next((pages for pages in self.live if pages.updated), None)
        if written is not None:
            self.wait(written.writes)

    def drop(self, pages: PageSet) -> None:
        """Free the buffers of an unused page set, after its I/O: a running read would write into reused buffers."""
        self.wait(pages.reads)
        self.wait(pages.writes)
        self.live.remove(pages)

    def collect(self) -> None:
        """Free the buffers of page sets that are written back."""
        for pages in [pages for pages in self.live if pages.updated]:
            if all(transfer.done for transfer in pages.writes):
                self.wait(pages.writes)
                for chunk in (*pages.lists, *([pages.owner.param16] if pages.param_buffer is not None else [])):
                    chunk.disk.writes = {start: write for start, write in chunk.disk.writes.items() if not write.done}
                self.live.remove(pages)
