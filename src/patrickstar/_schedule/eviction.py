"""Eviction policies, which choose the chunks to evict when the device is full (PatrickStar §8.3)."""

from collections.abc import Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order in which chunks are evicted."""

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates in the order of eviction."""
        ...


class ListOrder:
    """Eviction by chunk index, used while no trace is followed."""

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates sorted by chunk index."""
        return sorted(candidates)
