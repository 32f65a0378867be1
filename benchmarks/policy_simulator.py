"""Simulate a prefetch policy: replay a trace over channels of given bandwidth, without a device."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from patrickstar._schedule.prefetch import PrefetchPolicy
from patrickstar._schedule.trace import Trace
from patrickstar.errors import BudgetError


@dataclass(frozen=True)
class Simulated:
    """Result of one iteration; `seconds` include `stall_s`, the time that computation waited."""

    fetched_bytes: int
    written_bytes: int
    evictions: int
    peak_bytes: int
    stall_s: float
    seconds: float


def last_uses(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Map each moment to the chunks whose last use it is; their gradients are written then."""
    chunks: dict[int, tuple[int, ...]] = {}
    for chunk, uses in trace.uses.items():
        chunks[uses[-1]] = (*chunks.get(uses[-1], ()), chunk)
    return chunks


def simulate(
    trace: Trace,
    policy: PrefetchPolicy,
    nbytes: Mapping[int, int],
    budget_bytes: int,
    *,
    seconds: Sequence[float],
    rate_in: float,
    rate_out: float,
    depth_bytes: int,
    written: Mapping[int, Collection[int]] | None = None,
    iterations: int = 3,
) -> Simulated:
    """Simulate iterations from an empty device and return the result of the last one.

    Args:
        seconds: Compute time of each moment.
        rate_in: Bytes per second to the device, independent of `rate_out`.
        rate_out: Bytes per second from the device.
        depth_bytes: Limit of bytes in transfer to the device for prefetches.
        written: Chunks that each moment writes; by default those used for the last time.

    Raises:
        BudgetError: The chunks of one moment do not fit.
    """
    if written is None:
        written = last_uses(trace)
    device = _Device(nbytes, rate_in, rate_out)
    for _ in range(iterations):
        start, device.counts = device.clock, _Counts(peak_bytes=device.used_bytes)
        for now, moment in enumerate(trace.moments):
            device.enter(moment.chunks, budget_bytes - moment.non_model_bytes, policy, now)
            device.dirty.update(written.get(now, ()))
            held = {*moment.chunks, *device.incoming()}
            device.evict(policy.early_evictions(now, device.present, held))
            limit_bytes = depth_bytes - sum(nbytes[chunk] for chunk in device.incoming())
            for move in policy.prefetches(now, device.present, held, limit_bytes):
                assert held.isdisjoint(move.evict), "a held chunk was evicted"
                device.evict(move.evict)
                device.fetch(move.fetch)
                device.check_budget()
            device.advance(device.clock + seconds[now])
    counts = device.counts
    return Simulated(
        counts.fetched_bytes,
        counts.written_bytes,
        counts.evictions,
        counts.peak_bytes,
        counts.stall_s,
        device.clock - start,
    )


@dataclass
class _Counts:
    fetched_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    stall_s: float = 0.0


class _Device:
    """Device and its two channels. A chunk occupies memory from the start of its fetch to the end of its eviction."""

    def __init__(self, nbytes: Mapping[int, int], rate_in: float, rate_out: float) -> None:
        self.nbytes, self.rate_in, self.rate_out = nbytes, rate_in, rate_out
        self.clock = 0.0
        self.limit_bytes = 0
        self.present: set[int] = set()
        self.dirty: set[int] = set()
        self.counts = _Counts()
        self._present_bytes = 0
        self.used_bytes = 0
        self._queued: deque[int] = deque()
        self._fetching: tuple[float, int] | None = None
        self._writing: deque[tuple[float, int]] = deque()
        self._out_free = 0.0

    def incoming(self) -> list[int]:
        """Return the chunks in transfer to the device, and those queued for it."""
        return [*([self._fetching[1]] if self._fetching else []), *self._queued]

    def enter(self, chunks: Collection[int], limit_bytes: int, policy: PrefetchPolicy, now: int) -> None:
        """Start a moment with a limit of chunk bytes, and wait until its chunks are on the device."""
        self.limit_bytes = limit_bytes
        start = self.clock
        missing = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self.present]
        short = self._present_bytes + sum(self.nbytes[chunk] for chunk in missing) - limit_bytes
        for chunk in policy.eviction_order(self.present.difference(chunks), now) if short > 0 else ():
            if short <= 0:
                break
            self.evict([chunk])
            short -= self.nbytes[chunk]
        if short > 0:
            raise BudgetError(f"moment {now} accesses more chunks than fit: {short} bytes too many", short)
        for chunk in missing:
            self.fetch(chunk)
        self.check_budget()
        # Evictions must complete before non-model data can use their memory.
        while self.used_bytes > limit_bytes:
            self._step()
        while not set(chunks).isdisjoint(self.incoming()):
            self._step()
        self.counts.stall_s += self.clock - start

    def evict(self, chunks: Iterable[int]) -> None:
        """Evict chunks: a clean one is freed at once, a dirty one after its write-back."""
        for chunk in chunks:
            self.present.remove(chunk)
            self._present_bytes -= self.nbytes[chunk]
            if chunk in self._queued:
                self._queued.remove(chunk)
                continue
            while self._fetching and self._fetching[1] == chunk:
                self._step()
            self.counts.evictions += 1
            if chunk in self.dirty:
                self.dirty.remove(chunk)
                self._out_free = max(self._out_free, self.clock) + self.nbytes[chunk] / self.rate_out
                self._writing.append((self._out_free, chunk))
                self.counts.written_bytes += self.nbytes[chunk]
            else:
                self.used_bytes -= self.nbytes[chunk]
        self._begin()

    def fetch(self, chunk: int) -> None:
        """Queue the fetch of a chunk."""
        self.present.add(chunk)
        self._present_bytes += self.nbytes[chunk]
        self._queued.append(chunk)
        self._begin()

    def advance(self, until: float) -> None:
        """Advance the clock."""
        while (event := self._next_event()) is not None and event <= until:
            self._step()
        self.clock = until

    def check_budget(self) -> None:
        """Assert that the chunks respect the limit, including queued fetches."""
        assert self._present_bytes <= self.limit_bytes, (self._present_bytes, self.limit_bytes)

    def _next_event(self) -> float | None:
        running = [self._fetching, self._writing[0] if self._writing else None]
        return min((transfer[0] for transfer in running if transfer), default=None)

    def _step(self) -> None:
        """Advance the clock to the end of the next transfer."""
        event = self._next_event()
        assert event is not None, "computation waits for a transfer that never ends"
        self.clock = max(self.clock, event)
        if self._fetching and self._fetching[0] <= self.clock:
            self._fetching = None
        while self._writing and self._writing[0][0] <= self.clock:
            _, chunk = self._writing.popleft()
            self.used_bytes -= self.nbytes[chunk]
        self._begin()

    def _begin(self) -> None:
        """Start the next fetch if the channel is free, its chunk is written back, and it fits."""
        if self._fetching or not self._queued:
            return
        chunk = self._queued[0]
        if any(written == chunk for _, written in self._writing):
            return
        if self.used_bytes + self.nbytes[chunk] > self.limit_bytes:
            return
        self._queued.popleft()
        self.used_bytes += self.nbytes[chunk]
        self.counts.fetched_bytes += self.nbytes[chunk]
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.used_bytes)
        self._fetching = self.clock + self.nbytes[chunk] / self.rate_in, chunk
