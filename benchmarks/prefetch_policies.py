"""Eviction and prefetch policies that benchmarks compare with the library's own.

`Conservative` is the second strategy of Cao, Felten, Karlin and Li (1995), `LifeTime` is Algorithm 1 of Angel-PTM, and
`NextUse` is Belady's rule. The library itself uses `AggressivePrefetch` (`patrickstar/_schedule/prefetch.py`).
"""

from collections.abc import Collection, Iterable, Mapping

from patrickstar._schedule.prefetch import AggressivePrefetch, NarrowestMoments, PrefetchMove, PrefetchPolicy
from patrickstar._schedule.trace import NEVER, Trace


class NextUse:
    """The chunk whose next use is furthest leaves first: Belady's rule over the traced moments."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def order(self, candidates: Iterable[int], now: int) -> list[int]:
        """By next use, furthest first; of equals, the lower index first."""
        return sorted(candidates, key=lambda chunk: (-self.trace.next_use(chunk, now), chunk))


class LaterNarrowMoments(NarrowestMoments):
    """`NarrowestMoments`, with the next moment that is at least as narrow as a given one."""

    def __init__(self, chunkable: list[int]) -> None:
        super().__init__(chunkable)
        self._next = self._find_next()

    def _find_next(self) -> list[int]:
        """For each moment the first after it that is at least as narrow; the same one an iteration later at most."""
        found = [0] * self._length
        waiting: list[int] = []
        for moment, chunkable in enumerate(self._bytes):
            while waiting and chunkable <= self._bytes[waiting[-1]]:
                before = waiting.pop()
                if before < self._length:
                    found[before] = moment
            waiting.append(moment)
        return found

    def next_as_narrow(self, moment: int) -> int:
        """The first moment after this one that is at least as narrow."""
        at = moment % self._length
        return moment - at + self._next[at]


class Conservative(AggressivePrefetch):
    """The same authors' strategy `conservative`: those, and only those, leave early that would leave on demand too.

    It fetches what `DemandFetch` fetches, to the byte, but earlier; it waits longer than `AggressivePrefetch`.
    """

    # [Note: who leaves early]
    # A chunk comes at `now` for its use at `use`, and needs room at each moment until then. Say that the narrowest of
    # them falls short of it by some bytes. On demand it would come at `use`, and room would be made for it then if
    # there is not enough, or else at the first later moment that is as narrow as the narrowest. At that `turn` those
    # leave whose next use after it is furthest, of who is here and the chunk itself. If they have no use left until
    # `turn`, they can leave now as well. If one has, taking another in its place would cost a fetch that on demand does
    # not happen; so the chunk waits.

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._narrow: LaterNarrowMoments = LaterNarrowMoments(self.chunkable)

    def _evictions_for(self, fetched: int, short: int, narrowest: int, held: Collection[int]) -> tuple[int, ...] | None:
        evicted = self._evictions_at(self._known, fetched, short, held)
        if evicted is None and narrowest != self._known:
            evicted = self._evictions_at(self._narrow.next_as_narrow(narrowest), fetched, short, held)
        return evicted

    def _evictions_at(self, turn: int, fetched: int, short: int, held: Collection[int]) -> tuple[int, ...] | None:
        now, moments = self._now, self.trace.moments
        at = turn % len(moments)
        # What is missing at the turn itself; the last to leave has to be one whom that takes along.
        short_then = self._present_bytes + self.nbytes[fetched] - self.chunkable[at]
        evicted = []
        for chunk in self.order({*self._present, fetched}.difference(moments[at].chunks), at):
            if self.trace.next_use(chunk, now) <= turn or short_then <= 0:
                return None
            if chunk in held:
                # It is being used and will be free in a moment. Others that can't leave are left out of account.
                if chunk in moments[now].chunks:
                    return None
                continue
            evicted.append(chunk)
            short -= self.nbytes[chunk]
            short_then -= self.nbytes[chunk]
            if short <= 0:
                return tuple(evicted)
        return None


class LifeTime(PrefetchPolicy):
    """Angel-PTM's scheduling by life-times (its Algorithm 1): as early as memory allows, one iteration at a time.

    What is needed soonest comes as soon as those needed later make enough room. What has no use left in this
    iteration leaves at once.
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._narrow = NarrowestMoments(self.chunkable)

    def next_use(self, chunk: int, now: int) -> int:
        """The first moment after `now` in this iteration; NEVER if there is none."""
        use = self.trace.next_use(chunk, now)
        return use if use < len(self.trace.moments) else NEVER

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Those needed soonest in this iteration, up to the first for which those needed later make no room."""
        there = set(present)
        there_bytes = sum(self.nbytes[chunk] for chunk in there)
        moves: list[PrefetchMove] = []
        for use, chunk in sorted((self.next_use(chunk, now), chunk) for chunk in self.trace.uses.keys() - there):
            limit_bytes -= self.nbytes[chunk]
            if use == NEVER or limit_bytes < 0:
                break
            there_bytes += self.nbytes[chunk]
            short = there_bytes - self.chunkable[self._narrow.last(now, use)]
            leave = []
            for other in self.order(there.difference(held), now):
                if short <= 0 or self.next_use(other, now) <= use:
                    break
                leave.append(other)
                short -= self.nbytes[other]
                there_bytes -= self.nbytes[other]
            if short > 0:
                break
            there = there.difference(leave) | {chunk}
            moves.append(PrefetchMove(chunk, tuple(leave)))
        return moves

    def early_evictions(self, now: int, present: Collection[int], held: Collection[int]) -> tuple[int, ...]:
        """Those whose life-time is over."""
        return tuple(sorted(c for c in present if c not in held and self.next_use(c, now) == NEVER))
