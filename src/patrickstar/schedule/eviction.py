"""Who leaves the device when room is needed (PatrickStar §8.3)."""

from collections.abc import Iterable
from typing import Protocol

from patrickstar.schedule.trace import Trace


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


class NextUse:
    """The chunk whose next use is furthest leaves first: Belady's rule over the traced moments."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def order(self, candidates: Iterable[int], now: int) -> list[int]:
        """By next use, furthest first; of equals, the lower index first."""
        return sorted(candidates, key=lambda chunk: (-self.trace.next_use(chunk, now), chunk))
