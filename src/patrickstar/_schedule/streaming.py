"""Policy for forwards that repeat, as each token of a generation does: keep what fits, and stream the rest."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from patrickstar._schedule.prefetch import PrefetchMove, PrefetchPolicy
from patrickstar._schedule.trace import Trace

# [Note: passes in one direction]
# A step uses chunks in one order and then in the reverse one, so that the chunk used last is needed soonest. Passes
# that all have the same direction are the opposite: the chunk just used is needed last. A fetch that evicts it as soon
# as possible would then replace every chunk in every pass, although the pass only lacks what exceeds the budget. So a
# fixed set of chunks stays, which leaves room for two others: one that an operator uses, and one on its way. A pass
# moves the other chunks and no more: the bytes of the model less the budget, plus these two.


class StreamingPrefetch(PrefetchPolicy):
    """Keeps a fixed set of chunks on the device, and fetches the others in order, each before its use."""

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
        return sorted(candidates, key=lambda chunk: (chunk in self.resident, -self.next_use(chunk, now), chunk))

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
        return self.next_use(chunk, now) > self.next_use(other, now)
