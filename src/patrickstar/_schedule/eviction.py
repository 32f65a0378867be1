"""Who leaves the device when room is needed (PatrickStar §8.3)."""

from collections.abc import Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the chunks that may leave."""

    def order(self, candidates: Iterable[int], now: int) -> list[int]:
        """The candidates, the first to leave first."""
        ...


class ListOrder:
    """In the order of the list: what the warm-up does, before anything is known."""

    def order(self, candidates: Iterable[int], now: int) -> list[int]:
        """By chunk index."""
        return sorted(candidates)
