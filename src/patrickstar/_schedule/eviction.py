"""Eviction policies, which choose the chunks to evict when the device is full (PatrickStar §8.3)."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

RECENT = 3
"""Accesses, the present one included, whose chunks `ListOrder` evicts last: experts use up to three in turn."""


class EvictionPolicy(Protocol):
    """Order in which chunks are evicted."""

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates in the order of eviction."""
        ...


class AccessHistory:
    """Accesses of chunks so far."""

    def __init__(self) -> None:
        self.last_use: dict[int, int] = {}
        """Number of the last access of each chunk."""
        self._count = 0
        self._recent: deque[tuple[int, ...]] = deque(maxlen=RECENT)

    def add(self, chunks: tuple[int, ...]) -> None:
        """Record that an operator accesses chunks."""
        self._count += 1
        self.last_use.update(dict.fromkeys(chunks, self._count))
        if chunks not in self._recent:
            self._recent.append(chunks)

    def is_recent(self, chunk: int) -> bool:
        """Return whether one of the last accesses that differ used a chunk."""
        return any(chunk in chunks for chunks in self._recent)


class ListOrder:
    """Eviction by chunk index, used in forwards without gradients that follow no trace.

    Each of them has the order of the list: the chunk that was used last is needed last, and those with a large index
    stay. The chunks of the last accesses are evicted last, because experts use several parameters in turn.
    """

    def __init__(self, history: AccessHistory | None = None) -> None:
        self._history = AccessHistory() if history is None else history

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates sorted by chunk index, those of the last accesses at the end."""
        return sorted(candidates, key=lambda chunk: (self._history.is_recent(chunk), chunk))


class LeastRecentlyUsed:
    """Eviction of the chunk whose last use is furthest in the past, used in a step that follows no trace.

    In a forward these chunks are needed last, since backward runs in the reverse order; in backward, not any more.
    """

    def __init__(self, history: AccessHistory) -> None:
        self._history = history

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates in the order of their last use, then by chunk index."""
        return sorted(candidates, key=lambda chunk: (self._history.last_use.get(chunk, 0), chunk))
