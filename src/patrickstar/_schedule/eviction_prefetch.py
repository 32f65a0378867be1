"""Policies of eviction, when the device is full (PatrickStar §8.3), and of prefetch."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from patrickstar._schedule.trace import NEVER, Trace

# [Note: passes in one direction]
# A step uses chunks in one order and then in the reverse one, so that the chunk used last is needed soonest. Passes
# that all have the same direction are the opposite: the chunk just used is needed last. A fetch that evicts it as soon
# as possible would then replace every chunk in every pass, although the pass only lacks what exceeds the budget. So a
# fixed set of chunks stays, which leaves room for two others: one that an operator uses, and one on its way. A pass
# moves the other chunks and no more: the bytes of the model less the budget, plus these two.

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

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the eviction order on demand: furthest next use first, then by lower index."""
        return self.trace.furthest_first(candidates, now)

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


class StreamingPrefetch(PrefetchPolicy):
    """Keeps a fixed set of chunks on the device, and fetches the others in order, each before its use.

    For forwards that repeat, as each token of a generation does: see [Note: passes in one direction].
    """

    def __init__(self, trace: Trace, nbytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(trace, nbytes, budget_bytes)
        self._room = min(self.chunkable, default=0)
        order = sorted(trace.uses, key=lambda chunk: (-len(trace.uses[chunk]), trace.first_use(chunk)))
        together = (sum(nbytes[chunk] for chunk in moment.chunks) for moment in trace.moments)
        room = self._room - 2 * max(together, default=0)
        self.resident: set[int] = set()
        for chunk in order:
            if nbytes[chunk] > room:
                break
            self.resident.add(chunk)
            room -= nbytes[chunk]

    def eviction_order(self, candidates: Iterable[int], now: int) -> list[int]:
        """Return the streamed chunks before those that stay, each furthest next use first."""
        order = self.trace.furthest_first(candidates, now)
        return sorted(order, key=self.resident.__contains__)

    def prefetches(
        self, now: int, present: Collection[int], held: Collection[int], limit_bytes: int
    ) -> list[PrefetchMove]:
        """Return fetches of the next missing chunks, in place of streamed ones that are needed later."""
        on_device, fetches = set(present), list[PrefetchMove]()
        used = sum(self.nbytes[chunk] for chunk in on_device)
        streamed = [chunk for chunk in self.eviction_order(on_device - self.resident, now) if chunk not in held]
        for chunk in self._missing(now, on_device):
            nbytes, evicted = self.nbytes[chunk], list[int]()
            while used + nbytes > self._room and streamed and self._is_later(streamed[0], chunk, now):
                evicted.append(streamed.pop(0))
                used -= self.nbytes[evicted[-1]]
            if used + nbytes > self._room or nbytes > limit_bytes:
                break  # what was not evicted for it stays
            fetches.append(PrefetchMove(chunk, tuple(evicted)))
            used, limit_bytes = used + nbytes, limit_bytes - nbytes
        return fetches

    def _missing(self, now: int, present: Collection[int]) -> Iterator[int]:
        """Yield the missing chunks in the order of their next use, in this pass or the next."""
        found, moments = set(present), self.trace.moments
        for number in range(now + 1, now + 1 + len(moments)):
            for chunk in moments[number % len(moments)].chunks:
                if chunk not in found:
                    found.add(chunk)
                    yield chunk

    def _is_later(self, chunk: int, other: int, now: int) -> bool:
        return self.trace.next_use(chunk, now) > self.trace.next_use(other, now)


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
