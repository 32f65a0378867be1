"""What comes to the device before it is needed, and who goes for it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from patrickstar._schedule.trace import NEVER, Trace


@dataclass(frozen=True)
class PrefetchMove:
    """One chunk comes early; those in `leave` go first."""

    fetch: int
    evict: tuple[int, ...]


class PrefetchPolicy(ABC):
    """When chunks come and go, decided from a trace and a budget.

    Answers depend on the arguments alone, whatever was asked before.
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        self.trace, self.nbytes = trace, nbytes
        self.chunkable = [budget_bytes - moment.non_model_bytes for moment in trace.moments]

    def next_use(self, chunk: int, now: int) -> int:
        """The first moment after `now` that needs `chunk`, as far as the policy looks."""
        return self.trace.next_use(chunk, now)

    def order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Who leaves when room is needed at once: by next use, furthest first; of equals, the lower index first."""
        return sorted(candidates, key=lambda chunk: (-self.next_use(chunk, now), chunk))

    @abstractmethod
    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """What shall come now, in this order, though nothing waits for it yet.

        present: the chunks on the device or on their way there, without those that are leaving. held: those of them
        that can't leave now. limit_bytes: the most that may be fetched.
        """

    def early_evictions(self, now: int, present: Collection[int], held: Collection[int]) -> tuple[int, ...]:
        """Who shall leave now although nobody needs the room."""
        return ()


class DemandFetch(PrefetchPolicy):
    """Nothing comes before it is accessed."""

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Nothing."""
        return []


class AggressivePrefetch(PrefetchPolicy):
    """Integrated prefetching and caching (Cao, Felten, Karlin, Li 1995), by their strategy `aggressive`.

    What is needed soonest comes next, as soon as those whose next use is furthest make room, if that use is later than
    its own. It waits least; what leaves early may be missed, so it can fetch more than `DemandFetch` does.
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._narrow = NarrowestMoments(self.chunkable)
        # What follows only saves work: what was present, its bytes, that up to moment `_known`, counted on into the
        # next iteration, nothing is missing, and that nobody has a next use after `_horizon`.
        self._there: set[int] = set()
        self._there_bytes = 0
        self._now = self._known = 0
        self._horizon = NEVER

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Those needed soonest, up to the first that has to wait."""
        self._catch_up(now, present)
        moves: list[PrefetchMove] = []
        while (chunk := self._missing()) is not None and (nbytes := self.nbytes[chunk]) <= limit_bytes:
            narrowest = self._narrow.last(now, self._known)
            short = self._there_bytes + nbytes - self.chunkable[narrowest % len(self.chunkable)]
            leave = self._leave_for(chunk, short, narrowest, held) if short > 0 else ()
            if leave is None:
                break
            moves.append(PrefetchMove(chunk, leave))
            limit_bytes -= nbytes
            self._change({chunk}, leave)
        return moves

    def _catch_up(self, now: int, present: Collection[int]) -> None:
        if now < self._now:
            self._known -= len(self.trace.moments)
        if now in (self._now, self._now + 1):
            uses = (self.trace.next_use(chunk, now) for chunk in self.trace.moments[now].chunks)
            self._horizon = max((self._horizon, *uses))
        else:
            self._horizon = NEVER
        self._now = now
        there = set(present)
        if there != self._there:
            lost = self._there - there
            self._known = min((self._known, *(self.trace.next_use(chunk, now) for chunk in lost)))
            self._change(there - self._there, lost)
        self._known = max(self._known, now + 1)

    def _change(self, come: Collection[int], leave: Collection[int]) -> None:
        self._there.difference_update(leave)
        self._there.update(come)
        self._there_bytes += sum(self.nbytes[chunk] for chunk in come) - sum(self.nbytes[chunk] for chunk in leave)
        self._horizon = NEVER

    def _missing(self) -> int | None:
        """The chunk that is needed soonest of those not there, at moment `_known`; None if nothing is missing."""
        moments = self.trace.moments
        while self._known <= self._now + len(moments):
            for chunk in moments[self._known % len(moments)].chunks:
                if chunk not in self._there:
                    return chunk
            self._known += 1
        return None

    def _leave_for(self, comes: int, short: int, narrowest: int, held: Collection[int]) -> tuple[int, ...] | None:
        """Who leaves so that this chunk has room until moment `_known`; None if it has to wait.

        It is `short` of room by so many bytes, most of all at moment `narrowest`.
        """
        now, use = self._now, self._known
        if self._horizon <= use:
            return None
        order = self.order(self._there, now)
        self._horizon = self.trace.next_use(order[0], now) if order else -1
        leave = []
        for chunk in order:
            if self.trace.next_use(chunk, now) <= use:
                return None
            if chunk not in held:
                leave.append(chunk)
                short -= self.nbytes[chunk]
            if short <= 0:
                return tuple(leave)
        return None


class NarrowestMoments:
    """The narrowest moments of an iteration that repeats: moments are counted on into the iterations that follow."""

    def __init__(self, chunkable: list[int]) -> None:
        self._length = len(chunkable)
        self._bytes = chunkable * 2
        # Row k has, for each moment, the last of the narrowest among the 2**k that begin there.
        self._rows = [list(range(len(self._bytes)))]
        while 1 << len(self._rows) <= len(self._bytes):
            above, half = self._rows[-1], 1 << (len(self._rows) - 1)
            self._rows.append([self._narrower(a, b) for a, b in zip(above, above[half:], strict=False)])

    def _narrower(self, a: int, b: int) -> int:
        return b if self._bytes[b] <= self._bytes[a] else a

    def last(self, begin: int, end: int) -> int:
        """The last of the narrowest moments from `begin` to `end`, both included; at most one iteration apart."""
        shift = begin - begin % self._length
        begin, end = begin - shift, end - shift
        k = (end - begin + 1).bit_length() - 1
        return shift + self._narrower(self._rows[k][begin], self._rows[k][end + 1 - (1 << k)])
