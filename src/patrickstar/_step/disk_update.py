"""Update of one chunk whose states are on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patrickstar._kernels.update_rule import Rule
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.update_home import Home
from patrickstar._tiers.chunk import Chunk


@dataclass(eq=False)
class DiskUpdate:
    """Update of one chunk's parameters, page by page."""

    index: int
    rules: Mapping[ManagedParam, Rule]
    scales: Sequence[float]
    lists: list[Chunk]
    pages: list[tuple[int, int]]
    """First element and number of elements of each page."""
    home: Home
    updated: int = 0
    """Number of pages updated so far."""

    @property
    def param16(self) -> Chunk:
        """Chunk whose gradients are replaced by the updated parameters."""
        return next(iter(self.rules)).shard_chunk

    @property
    def complete(self) -> bool:
        """True once all pages are updated."""
        return self.updated == len(self.pages)
