"""The trace of one iteration (PatrickStar §8.1): what was accessed at which moment, beside how much non-model data."""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

NEVER = 1 << 62
"""A moment after every other."""


@dataclass
class Moment:
    """The stretch from one operator boundary to the next.

    `chunks` are accessed as it begins (empty when an operator ends there); `non_model_bytes` is the largest amount of
    non-model data on the device until the next moment begins, `entered_bytes` what was there as it began.
    """

    chunks: tuple[int, ...]
    non_model_bytes: int = 0
    entered_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        """What comes to the non-model data, at most, after the moment has begun."""
        return max(0, self.non_model_bytes - self.entered_bytes)


@dataclass
class Trace:
    """The moments of one iteration, in order. Chunks are named by index: only `param16` is accessed by operators."""

    moments: list[Moment] = field(default_factory=list)
    checked: bool = field(default=False, compare=False)
    """Whether a second iteration was seen to need no more."""

    def settle(self) -> None:
        """A second iteration was seen, and is reckoned with."""
        self.checked = True
        self.__dict__.pop("peak_non_model_bytes", None)

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """For each chunk the sorted moments it is accessed at. Read it once the trace is complete."""
        found: dict[int, list[int]] = {}
        for now, moment in enumerate(self.moments):
            for chunk in moment.chunks:
                found.setdefault(chunk, []).append(now)
        return found

    @cached_property
    def peak_non_model_bytes(self) -> int:
        """The most non-model data at any moment."""
        return max((moment.non_model_bytes for moment in self.moments), default=0)

    def first_use(self, chunk: int) -> int:
        """The first moment that accesses `chunk`; NEVER if none does."""
        uses = self.uses.get(chunk)
        return uses[0] if uses else NEVER

    def next_use(self, chunk: int, now: int) -> int:
        """The first moment after `now` that accesses `chunk`, counted on into the next iteration; O(log moments)."""
        uses = self.uses.get(chunk)
        if not uses:
            return NEVER
        at = bisect_right(uses, now)
        return uses[at] if at < len(uses) else len(self.moments) + uses[0]
