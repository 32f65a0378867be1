"""Policies of eviction, when the device is full (PatrickStar §8.3), and of prefetch."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from patrickstar._schedule.trace import NEVER, Trace


@dataclass(frozen=True)
class PrefetchMove:
    """One chunk to fetch early, after evicting the chunks in `evict`."""

    fetch: int
    evict: tuple[int, ...]


class PrefetchPolicy(ABC):
    """Choice of early fetches and evictions, based on a trace and a budget.

    Results depend only on the arguments, not on earlier calls.
    """

    ahead = True
    """False if the policy never fetches before an access, so that it need not be asked."""

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        self.trace, self.nbytes, self.budget_bytes = trace, nbytes, budget_bytes
        self.chunkable = [budget_bytes - moment.non_model_bytes for moment in trace.moments]

    def next_use(self, chunk: int, now: int) -> int:
        """Return the first moment after `now` that needs `chunk`, within the horizon of the policy."""
        return self.trace.next_use(chunk, now)

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the eviction order on demand: furthest next use first, then by lower index."""
        return sorted(candidates, key=lambda chunk: (-self.next_use(chunk, now), chunk))

    @abstractmethod
    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Return the prefetches to issue at moment `now`, in order.

        Args:
            now: Current moment.
            present: Chunks on the device or being fetched, without those being evicted.
            held: Chunks of `present` that can't be evicted now.
            limit_bytes: Upper bound of the bytes to fetch.
        """


class DemandFetch(PrefetchPolicy):
    """Policy without prefetch: chunks are fetched when they are accessed."""

    ahead = False

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        return []


class AggressivePrefetch(PrefetchPolicy):
    """Strategy `aggressive` of integrated prefetching and caching (Cao, Felten, Karlin, Li 1995).

    It fetches the missing chunk that is needed soonest as soon as evicting the chunks with the furthest next use makes
    room, provided that these uses are later than its own. Waiting is minimal, but a chunk evicted early may be missed,
    so it can fetch more bytes than `DemandFetch`.
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._narrow = NarrowestMoments(self.chunkable)
        # A cache that only saves work: the chunks present and their bytes; no chunk is missing before moment `_known`
        # (counting on into the next iteration); no present chunk has its next use after `_horizon`.
        self._present: set[int] = set()
        self._present_bytes = 0
        self._now = self._known = 0
        self._horizon = NEVER

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Return prefetches of the chunks needed soonest, up to the first one that has to wait."""
        self._catch_up(now, present)
        fetches: list[PrefetchMove] = []
        while (chunk := self._missing()) is not None and (nbytes := self.nbytes[chunk]) <= limit_bytes:
            narrowest = self._narrow.last(now, self._known)
            short = self._present_bytes + nbytes - self.chunkable[narrowest % len(self.chunkable)]
            evicted = self._evictions_for(short, held) if short > 0 else ()
            if evicted is None:
                break
            fetches.append(PrefetchMove(chunk, evicted))
            limit_bytes -= nbytes
            self._change({chunk}, evicted)
        return fetches

    def _catch_up(self, now: int, present: Collection[int]) -> None:
        if now < self._now:
            self._known -= len(self.trace.moments)
        if now in (self._now, self._now + 1):
            uses = (self.trace.next_use(chunk, now) for chunk in self.trace.moments[now].chunks)
            self._horizon = max((self._horizon, *uses))
        else:
            self._horizon = NEVER
        self._now = now
        current = set(present)
        if current != self._present:
            lost = self._present - current
            self._known = min((self._known, *(self.trace.next_use(chunk, now) for chunk in lost)))
            self._change(current - self._present, lost)
        self._known = max(self._known, now + 1)

    def _change(self, added: Collection[int], removed: Collection[int]) -> None:
        self._present.difference_update(removed)
        self._present.update(added)
        self._present_bytes += sum(self.nbytes[chunk] for chunk in added) - sum(self.nbytes[chunk] for chunk in removed)
        self._horizon = NEVER

    def _missing(self) -> int | None:
        """Return the missing chunk that is needed soonest and set `_known` to that moment, or return None."""
        moments = self.trace.moments
        while self._known <= self._now + len(moments):
            for chunk in moments[self._known % len(moments)].chunks:
                if chunk not in self._present:
                    return chunk
            self._known += 1
        return None

    def _evictions_for(self, short: int, held: Collection[int]) -> tuple[int, ...] | None:
        """Return the evictions that free `short` bytes until moment `_known`, or None if the fetch has to wait."""
        now, use = self._now, self._known
        if self._horizon <= use:
            return None
        order = self.eviction_order(self._present, now)
        self._horizon = self.trace.next_use(order[0], now) if order else -1
        evicted = []
        for chunk in order:
            if self.trace.next_use(chunk, now) <= use:
                return None
            if chunk not in held:
                evicted.append(chunk)
                short -= self.nbytes[chunk]
            if short <= 0:
                return tuple(evicted)
        return None


class NarrowestMoments:
    """Range-minimum table of the space for chunks over a repeating iteration; moments count on past its end."""

    def __init__(self, chunkable: list[int]) -> None:
        self._length = len(chunkable)
        self._bytes = chunkable * 2
        # Row k holds, for each moment, the last of the narrowest among the 2**k moments that start there.
        self._rows = [list(range(len(self._bytes)))]
        while 1 << len(self._rows) <= len(self._bytes):
            above, half = self._rows[-1], 1 << (len(self._rows) - 1)
            self._rows.append([self._narrower(a, b) for a, b in zip(above, above[half:], strict=False)])

    def _narrower(self, a: int, b: int) -> int:
        return b if self._bytes[b] <= self._bytes[a] else a

    def last(self, begin: int, end: int) -> int:
        """Return the last of the narrowest moments from `begin` to `end` (inclusive), at most one iteration apart."""
        shift = begin - begin % self._length
        begin, end = begin - shift, end - shift
        k = (end - begin + 1).bit_length() - 1
        return shift + self._narrower(self._rows[k][begin], self._rows[k][end + 1 - (1 << k)])
