"""Update of one chunk whose states are on disk, and what it transfers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.chunk import Chunk


class PageBuffers(Protocol):
    """Sums of gradients and newest parameters on the host, which an update of pages uses in place of `param16`."""

    def chunks(self, index: int) -> list[Chunk]:
        """Return the chunks of an index that hold them."""

    def spans(self, index: int, first: int, states: Mapping[str, torch.Tensor]) -> list[Span]:
        """Return what the update of one page reads and writes.

        Args:
            first: First element of the page.
            states: Page of each list of masters and optimizer states.
        """

    def end_page(self, index: int, first: int) -> None:
        """Note that a page has been updated."""

    def forget(self, failed: Iterable[ManagedParam]) -> None:
        """Drop the gradients of parameters whose update has failed."""


@dataclass(eq=False)
class DiskUpdate:
    """Update of one chunk's parameters, page by page."""

    index: int
    rules: Mapping[ManagedParam, Rule]
    scales: Sequence[float]
    lists: list[Chunk]
    pages: list[tuple[int, int]]
    """First element and number of elements of each page."""
    updated: int = 0
    """Number of pages updated so far."""
    listed: Collection[ManagedParam] | None = None
    """If it is a delayed update: parameters whose gradient is in the gradient list. See [Note: delayed updates]."""
    buffers: PageBuffers | None = None
    """If it is lock-free: what it uses in place of `param16`. See [Note: lock-free updates]."""
    speculative: bool = False
    """True while its results go to spare pages. See [Note: speculation]."""
    versions: Mapping[Chunk, int] = field(default_factory=dict)
    """Versions of the gradients' chunks when it was queued, if it is speculative."""

    @property
    def param16(self) -> Chunk:
        """Chunk whose gradients are replaced by the updated parameters."""
        return next(iter(self.rules)).shard_chunk

    @property
    def late(self) -> bool:
        """True if it reads and writes other lists in place of the parameters, which operators go on reading."""
        return self.listed is not None or self.buffers is not None

    @property
    def is_current(self) -> bool:
        """True if the gradients are in memory and have not changed since it was queued."""
        return all(chunk.in_memory and chunk.version == version for chunk, version in self.versions.items())

    @property
    def complete(self) -> bool:
        """True once all pages are updated."""
        return self.updated == len(self.pages)


def count_update_transfers(
    manager: ChunkManager, managed: ManagedParam, numel: int, upload: bool = True, *, by_kernel: bool = False
) -> int:
    """Count the bytes of a host update of a parameter on the device: its gradient down, and up, if `upload`, itself."""
    nbytes = numel * managed.shard_chunk.dtype.itemsize
    directions = [*([False] if managed.overlays_shard else []), *([True] if upload else [])]
    for to_device in directions:
        manager.count_transfer(nbytes, to_device=to_device, by_kernel=by_kernel)
    return nbytes * len(directions)


def overlap(managed: ManagedParam, first: int, end: int) -> slice | None:
    """Return the elements of a parameter that are within a range of its chunk's elements; None if there are none."""
    begin, stop = max(first, managed.location.offset), min(end, managed.location.offset + managed.location.numel)
    return slice(begin - managed.location.offset, stop - managed.location.offset) if begin < stop else None
