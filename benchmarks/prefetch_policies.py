"""Eviction and prefetch policies that benchmarks compare with those of the library.

`Conservative` is the second strategy of Cao, Felten, Karlin and Li (1995), `LifeTime` is Algorithm 1 of Angel-PTM, and
`NextUse` is Belady's rule. The library itself uses `AggressivePrefetch` (`patrickstar/_schedule/prefetch.py`).
"""

from collections.abc import Collection, Iterable, Mapping

from patrickstar._schedule.prefetch import AggressivePrefetch, NarrowestMoments, PrefetchMove, PrefetchPolicy
from patrickstar._schedule.trace import NEVER, Trace


class NextUse:
    """Belady's rule over the traced moments: evict the chunk whose next use is furthest."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the candidates by next use, furthest first; ties go to the lower index."""
        return sorted(candidates, key=lambda chunk: (-self.trace.next_use(chunk, now), chunk))


class LaterNarrowMoments(NarrowestMoments):
    """`NarrowestMoments` that also finds the next moment at least as narrow as a given one."""

    def __init__(self, chunkable: list[int]) -> None:
        super().__init__(chunkable)
        self._next = self._find_next()

    def _find_next(self) -> list[int]:
        """Find for each moment the next one that is at least as narrow, at most one iteration later."""
        following = [0] * self._length
        waiting: list[int] = []
        for moment, chunkable in enumerate(self._bytes):
            while waiting and chunkable <= self._bytes[waiting[-1]]:
                before = waiting.pop()
                if before < self._length:
                    following[before] = moment
            waiting.append(moment)
        return following

    def next_as_narrow(self, moment: int) -> int:
        """Return the first moment after this one that is at least as narrow."""
        index = moment % self._length
        return moment - index + self._next[index]


class Conservative(AggressivePrefetch):
    """The strategy `conservative` of Cao et al.: evict early only the chunks that on-demand fetching would evict.

    Fetches the same bytes as `DemandFetch`, but earlier; stalls longer than `AggressivePrefetch`.
    """

    # [Note: conservative evictions]
    # A chunk prefetched at `now` for its use at `use` needs memory at each moment until then. Say that the narrowest of
    # these moments lacks some bytes. On demand the chunk would be fetched at `use`, and memory would be freed then if
    # needed, or else at the first later moment that is as narrow as the narrowest. At that `turn`, of the present
    # chunks and the new one, those with the furthest next use are evicted. If these are not used before `turn`, they
    # can be evicted now as well. If one is used before, evicting another instead would cost a fetch that does not
    # happen on demand; so the prefetch waits.

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
        index = turn % len(moments)
        # Bytes missing at the turn itself: each early eviction must still be needed for these.
        short_then = self._present_bytes + self.nbytes[fetched] - self.chunkable[index]
        evicted = []
        for chunk in self.eviction_order({*self._present, fetched}.difference(moments[index].chunks), index):
            if self.trace.next_use(chunk, now) <= turn or short_then <= 0:
                return None
            if chunk in held:
                # A chunk in use is free again at the next moment. Other held chunks are skipped.
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
    """Angel-PTM's lifetime-based scheduling (its Algorithm 1): prefetch as early as memory allows, per iteration.

    The chunk needed soonest is fetched as soon as evicting chunks needed later frees enough memory. A chunk without
    further use in the iteration is evicted at once.
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._narrow = NarrowestMoments(self.chunkable)

    def next_use(self, chunk: int, now: int) -> int:
        """Return the first use after `now` in this iteration; NEVER if there is none."""
        use = self.trace.next_use(chunk, now)
        return use if use < len(self.trace.moments) else NEVER

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Prefetch chunks in order of next use, up to the first that does not fit by evicting later-used ones."""
        planned = set(present)
        planned_bytes = sum(self.nbytes[chunk] for chunk in planned)
        fetches: list[PrefetchMove] = []
        for use, chunk in sorted((self.next_use(chunk, now), chunk) for chunk in self.trace.uses.keys() - planned):
            limit_bytes -= self.nbytes[chunk]
            if use == NEVER or limit_bytes < 0:
                break
            planned_bytes += self.nbytes[chunk]
            short = planned_bytes - self.chunkable[self._narrow.last(now, use)]
            evicted = []
            for other in self.eviction_order(planned.difference(held), now):
                if short <= 0 or self.next_use(other, now) <= use:
                    break
                evicted.append(other)
                short -= self.nbytes[other]
                planned_bytes -= self.nbytes[other]
            if short > 0:
                break
            planned = planned.difference(evicted) | {chunk}
            fetches.append(PrefetchMove(chunk, tuple(evicted)))
        return fetches

    def early_evictions(self, now: int, present: Collection[int], held: Collection[int]) -> tuple[int, ...]:
        """Return the chunks without further use in this iteration."""
        return tuple(sorted(c for c in present if c not in held and self.next_use(c, now) == NEVER))
