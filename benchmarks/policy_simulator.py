"""What a policy costs: a trace is played against channels of a given speed, moment by moment, without a device."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from patrickstar._schedule.prefetch import PrefetchPolicy
from patrickstar._schedule.trace import Trace
from patrickstar.errors import BudgetError


@dataclass(frozen=True)
class Simulated:
    """One iteration as it went; `seconds` are all of it, `stall_s` those of them in which computing waited."""

    fetched_bytes: int
    written_bytes: int
    evictions: int
    peak_bytes: int
    stall_s: float
    seconds: float


def last_uses(trace: Trace) -> dict[int, tuple[int, ...]]:
    """For each moment the chunks that are used for the last time: that is when their gradients come."""
    found: dict[int, tuple[int, ...]] = {}
    for chunk, uses in trace.uses.items():
        found[uses[-1]] = (*found.get(uses[-1], ()), chunk)
    return found


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
    """The last of some iterations that begin with nothing on the device.

    seconds: what each moment computes for. rate_in, rate_out: bytes per second to the device and from it, at the same
    time. depth_bytes: the most that may be under way to the device when more is asked for ahead of need. written: for
    each moment the chunks that are written in it, by default those used for the last time.

    Raises BudgetError if what one moment accesses doesn't fit.
    """
    if written is None:
        written = last_uses(trace)
    device = _Device(nbytes, rate_in, rate_out)
    for _ in range(iterations):
        began, device.counts = device.clock, _Counts(peak_bytes=device.used_bytes)
        for now, moment in enumerate(trace.moments):
            device.enter(moment.chunks, budget_bytes - moment.non_model_bytes, policy, now)
            device.dirty.update(written.get(now, ()))
            held = {*moment.chunks, *device.under_way()}
            device.leave(policy.early_evictions(now, device.present, held))
            limit_bytes = depth_bytes - sum(nbytes[chunk] for chunk in device.under_way())
            for move in policy.prefetches(now, device.present, held, limit_bytes):
                assert held.isdisjoint(move.evict), "a held chunk was sent away"
                device.leave(move.evict)
                device.fetch(move.fetch)
                device.check_room()
            device.advance(device.clock + seconds[now])
    counts = device.counts
    return Simulated(
        counts.fetched_bytes,
        counts.written_bytes,
        counts.evictions,
        counts.peak_bytes,
        counts.stall_s,
        device.clock - began,
    )


@dataclass
class _Counts:
    fetched_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    stall_s: float = 0.0


class _Device:
    """The device and its two channels. A chunk takes room from when its fetch begins until it has left."""

    def __init__(self, nbytes: Mapping[int, int], rate_in: float, rate_out: float) -> None:
        self.nbytes, self.rate_in, self.rate_out = nbytes, rate_in, rate_out
        self.clock = 0.0
        self.room_bytes = 0
        self.present: set[int] = set()
        self.dirty: set[int] = set()
        self.counts = _Counts()
        self._present_bytes = 0
        self.used_bytes = 0
        self._asked: deque[int] = deque()
        self._coming: tuple[float, int] | None = None
        self._writing: deque[tuple[float, int]] = deque()
        self._out_free = 0.0

    def under_way(self) -> list[int]:
        """The chunks on their way to the device, and those that wait for it."""
        return [*([self._coming[1]] if self._coming else []), *self._asked]

    def enter(self, chunks: Collection[int], room_bytes: int, policy: PrefetchPolicy, now: int) -> None:
        """Go on to a moment with this much room, and wait until its chunks are there."""
        self.room_bytes = room_bytes
        began = self.clock
        missing = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self.present]
        short = self._present_bytes + sum(self.nbytes[chunk] for chunk in missing) - room_bytes
        for chunk in policy.order(self.present.difference(chunks), now) if short > 0 else ():
            if short <= 0:
                break
            self.leave([chunk])
            short -= self.nbytes[chunk]
        if short > 0:
            raise BudgetError(f"moment {now} accesses more chunks than fit: {short} bytes too many", short)
        for chunk in missing:
            self.fetch(chunk)
        self.check_room()
        # What is on its way out has to be out before non-model data may take its place.
        while self.used_bytes > room_bytes:
            self._step()
        while not set(chunks).isdisjoint(self.under_way()):
            self._step()
        self.counts.stall_s += self.clock - began

    def leave(self, chunks: Iterable[int]) -> None:
        """Evict: a clean chunk is gone at once, a dirty one when it has been written back."""
        for chunk in chunks:
            self.present.remove(chunk)
            self._present_bytes -= self.nbytes[chunk]
            if chunk in self._asked:
                self._asked.remove(chunk)
                continue
            while self._coming and self._coming[1] == chunk:
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
        """Ask for a chunk."""
        self.present.add(chunk)
        self._present_bytes += self.nbytes[chunk]
        self._asked.append(chunk)
        self._begin()

    def advance(self, until: float) -> None:
        """Let time pass."""
        while (event := self._next_event()) is not None and event <= until:
            self._step()
        self.clock = until

    def check_room(self) -> None:
        """The budget holds, also once everything asked for has come."""
        assert self._present_bytes <= self.room_bytes, (self._present_bytes, self.room_bytes)

    def _next_event(self) -> float | None:
        under_way = [self._coming, self._writing[0] if self._writing else None]
        return min((transfer[0] for transfer in under_way if transfer), default=None)

    def _step(self) -> None:
        """Go on to the end of the next transfer."""
        event = self._next_event()
        assert event is not None, "computing waits for a transfer that never ends"
        self.clock = max(self.clock, event)
        if self._coming and self._coming[0] <= self.clock:
            self._coming = None
        while self._writing and self._writing[0][0] <= self.clock:
            _, chunk = self._writing.popleft()
            self.used_bytes -= self.nbytes[chunk]
        self._begin()

    def _begin(self) -> None:
        """Begin the next fetch if the channel is free, what it reads has been written, and there is room."""
        if self._coming or not self._asked:
            return
        chunk = self._asked[0]
        if any(leaving == chunk for _, leaving in self._writing):
            return
        if self.used_bytes + self.nbytes[chunk] > self.room_bytes:
            return
        self._asked.popleft()
        self.used_bytes += self.nbytes[chunk]
        self.counts.fetched_bytes += self.nbytes[chunk]
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.used_bytes)
        self._coming = self.clock + self.nbytes[chunk] / self.rate_in, chunk
