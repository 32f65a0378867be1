"""Trace of one iteration (PatrickStar §8.1): chunk accesses and non-model data at each moment."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

NEVER = 1 << 62
"""Moment later than any other."""


@dataclass
class Moment:
    """Interval between two operator boundaries.

    `chunks` are accessed at its start (none if an operator ends there). `non_model_bytes` is the peak of non-model data
    on the device during the moment, `entered_bytes` the amount at its start.
    """

    chunks: tuple[int, ...]
    non_model_bytes: int = 0
    entered_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        """Largest increase of non-model data during the moment."""
        return max(0, self.non_model_bytes - self.entered_bytes)


@dataclass
class Trace:
    """Moments of one iteration in order. Accesses are indices of `param16` chunks, the only ones operators read."""

    moments: list[Moment] = field(default_factory=list)
    checked: bool = field(default=False, compare=False)
    """True if a second iteration confirmed the memory figures."""

    last_gradients: dict[int, int] = field(default_factory=dict, compare=False)
    """Moment after which all gradients of a chunk are there, if linked processes reduce it then."""

    def is_last_use(self, chunk: int, now: int) -> bool:
        """Return whether no operator of the iteration uses a chunk after `now`, and all its gradients are there."""
        return self.next_use(chunk, now) >= len(self.moments) and now >= self.last_gradients.get(chunk, 0)

    def mark_checked(self) -> None:
        """Mark the trace as confirmed after a second iteration has updated it."""
        self.checked = True
        self.__dict__.pop("peak_non_model_bytes", None)

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """Sorted access moments of each chunk. Valid only once the trace is complete."""
        uses: dict[int, list[int]] = {}
        for now, moment in enumerate(self.moments):
            for chunk in moment.chunks:
                uses.setdefault(chunk, []).append(now)
        return uses

    @cached_property
    def peak_non_model_bytes(self) -> int:
        """Peak of non-model data over all moments."""
        return max((moment.non_model_bytes for moment in self.moments), default=0)

    def first_use(self, chunk: int) -> int:
        """Return the first moment that accesses `chunk`, or NEVER."""
        uses = self.uses.get(chunk)
        return uses[0] if uses else NEVER

    def next_use(self, chunk: int, now: int) -> int:
        """Return the first access of `chunk` after `now`, counting on into the next iteration, in O(log moments)."""
        uses = self.uses.get(chunk)
        if not uses:
            return NEVER
        index = bisect_right(uses, now)
        return uses[index] if index < len(uses) else len(self.moments) + uses[0]

    def furthest_first(self, chunks: Iterable[int], now: int) -> list[int]:
        """Return chunks by their next use after `now`, the furthest first, then by index: as `next_use`, at once."""
        uses, length, order = self.uses, len(self.moments), []
        for chunk in chunks:
            moments = uses.get(chunk)
            if not moments:
                order.append((-NEVER, chunk))
                continue
            index = bisect_right(moments, now)
            order.append((-(moments[index] if index < len(moments) else length + moments[0]), chunk))
        return [chunk for _, chunk in sorted(order)]
