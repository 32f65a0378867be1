"""The clock of an iteration: counts moments, traces the first iteration of a kind, follows its trace in later ones."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import Enum

from patrickstar._layout.schema import PARAM16
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.memory_meter import Meter
from patrickstar._schedule.eviction import ListOrder
from patrickstar._schedule.placement import WARM_UP_PERCENT
from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._schedule.trace import Moment, Trace

MOST_TRACES = 64
"""Kinds of iterations (input shapes) that are remembered; the oldest is forgotten first."""


class Mode(Enum):
    """How the clock knows what is to come."""

    DEMAND = "nothing is known: fetch when asked, measure every moment"
    WATCH = "the same, and record it"
    PLAN = "as the trace of an earlier iteration says"


class Tracer:
    """Tells the manager, at every operator boundary, the moment and the non-model bytes to reckon with."""

    def __init__(self, manager: ChunkManager, meter: Meter, policy: type[PrefetchPolicy] | None = None) -> None:
        self.manager = manager
        # What the host moves to a CPU's own device tier is copied by the cores that compute: there is nothing to hide.
        worth_it = manager.disk_tier is not None or manager.hardware.has_gpu
        self.policy = policy or (AggressivePrefetch if worth_it else DemandFetch)
        self.meter = meter
        self.mode = Mode.DEMAND
        self.trace = Trace()
        self.traces: dict[Hashable, Trace] = {}
        self._policies: dict[int, PrefetchPolicy] = {}
        self._checking = False
        """Whether the trace that is followed has yet to be compared with what a second iteration needs."""
        self.open_key: Hashable | None = None
        self.in_iteration_now = 0
        self.peak_non_model_bytes = 0
        """The most non-model data that any traced iteration had."""
        self.non_model_peak = 0
        """The most that was needed since the step began: without what was freed, but kept where there was room."""

    def calibrate(self) -> None:
        """What is used now, chunks aside, was there before training."""
        self.meter.reclaim()
        self.meter.calibrate(self._bytes())
        self.measure()

    def invalidate(self) -> None:
        """What was traced no longer holds."""
        self.traces.clear()

    def begin_iteration(self, key: Hashable) -> bool:
        """Open an iteration of this kind, unless one is open; True if it follows a trace."""
        if self.open_key is None:
            self.open_key = key
            self.manager.now = -1
            if key in self.traces:
                self.mode, self.trace = Mode.PLAN, self.traces[key]
                self.manager.policy = self.manager.prefetch = self._prefetch(self.trace)
                self._checking = not self.trace.checked
            else:
                self.mode, self.trace = Mode.WATCH, Trace()
                self.manager.policy = ListOrder()
            if self.mode is Mode.WATCH or self._checking:
                # What is kept of freed memory would be taken for memory that is needed.
                self.meter.set_caching(False)
                self.meter.reclaim()
                self.meter.restart()
        return self.mode is Mode.PLAN

    def end_iteration(self) -> bool:
        """Close the iteration; True if a trace came of it, or one was found to need more than it says."""
        key, mode = self.open_key, self.mode
        traced = key is not None and mode is Mode.WATCH and bool(self.trace.moments)
        if traced:
            # What came after the last boundary, behind the last backward, is the update's affair.
            self.traces[key] = self.trace
            self.peak_non_model_bytes = max(self.peak_non_model_bytes, self.trace.peak_non_model_bytes)
            if len(self.traces) > MOST_TRACES:
                self.traces.pop(next(iter(self.traces)))
        elif mode is Mode.PLAN and self.manager.now != len(self.trace.moments) - 1:
            self.traces.pop(key, None)
        elif self._checking:
            self.trace.settle()
            traced = self.trace.peak_non_model_bytes > self.peak_non_model_bytes
            self.peak_non_model_bytes = max(self.peak_non_model_bytes, self.trace.peak_non_model_bytes)
        self._stop_following()
        return traced

    def discard_iteration(self) -> None:
        """Close the iteration without believing what was seen of it."""
        self.traces.pop(self.open_key, None)
        self._stop_following()

    def _stop_following(self) -> None:
        self.open_key, self.mode, self._checking = None, Mode.DEMAND, False
        self.manager.policy = ListOrder()
        self.manager.cancel_prefetch()
        self.meter.set_caching(True)
        self.measure()

    def _prefetch(self, trace: Trace) -> PrefetchPolicy:
        """The policy over a trace, made when the trace is first followed."""
        found = self._policies.get(id(trace))
        if found is None or found.trace is not trace:
            sizes = {index: chunk.nbytes for (kind, index), chunk in self.manager.chunks.items() if kind == PARAM16}
            found = self.policy(trace, sizes, self.manager.device_tier.budget_bytes)
            self._policies = {key: one for key, one in self._policies.items() if one.trace in self.traces.values()}
            self._policies[id(trace)] = found
        return found

    @contextmanager
    def in_iteration(self) -> Iterator[None]:
        """Inside, every access belongs to the open iteration."""
        self.in_iteration_now += 1
        try:
            yield
        finally:
            self.in_iteration_now -= 1

    def current_non_model_bytes(self) -> int:
        """Bytes of non-model data on the device."""
        return self.meter.now(self._bytes())

    def measure(self) -> None:
        """Reckon with what is measured now, and leave room for what is not yet known."""
        compute = self.manager.device_tier
        cautious = compute.budget_bytes * WARM_UP_PERCENT // 100
        now = self._measured(cautious)
        # Once a peak is known, what it leaves is safe to fill, however little is used now.
        known = compute.budget_bytes - max(0, self.peak_non_model_bytes - now)
        compute.soft_limit_bytes = max(cautious, known) if self.peak_non_model_bytes else cautious
        compute.non_model_bytes = now

    def _measured(self, limit_bytes: int) -> int:
        """Non-model bytes now, without what was freed where that would break the limit."""
        found = self.current_non_model_bytes()
        if found + self.manager.device_tier.used > limit_bytes:
            self.meter.reclaim()
            found = self.current_non_model_bytes()
        return found

    def begin_moment(self, chunks: tuple[int, ...], belongs: bool) -> None:
        """An operator boundary: `chunks` are about to be accessed, or none when an operator has ended."""
        if not (belongs or self.in_iteration_now) or self.open_key is None or self.mode is Mode.DEMAND:
            if self.mode is Mode.WATCH:
                self._record_peak()
            self._measure_moment()
            return
        if self._checking and self.manager.now >= 0:
            self._check_peak()
        self.manager.now += 1
        if self.mode is Mode.PLAN:
            if self._matches_trace(chunks):
                return
            self.mode, self._checking = Mode.DEMAND, False
            self.traces.pop(self.open_key, None)
            self.manager.policy = ListOrder()
            self.manager.cancel_prefetch()
            self._measure_moment()
            return
        self._record_peak()
        self._measure_moment()
        self.trace.moments.append(Moment(chunks, entered_bytes=self.manager.device_tier.non_model_bytes))

    def _measure_moment(self) -> None:
        self.measure()
        self.non_model_peak = max(self.non_model_peak, self.manager.device_tier.non_model_bytes)

    def transfers_done(self) -> None:
        """The chunks a tick asked for have moved; what is used from here on is not theirs."""
        if self.mode is Mode.WATCH or self._checking:
            # Else what an earlier operator freed would hide what the next one takes.
            self.meter.reclaim()
            self.meter.restart()

    def _matches_trace(self, chunks: tuple[int, ...]) -> bool:
        now, moments = self.manager.now, self.trace.moments
        if now >= len(moments) or moments[now].chunks != chunks:
            return False
        moment, compute = moments[now], self.manager.device_tier
        compute.soft_limit_bytes = compute.budget_bytes
        compute.non_model_bytes = moment.non_model_bytes
        coming = [chunk for index in chunks if not (chunk := self.manager[PARAM16, index]).device_valid]
        if self.meter.counts_freed or coming:
            # As much as there is room for will be on the device, and no more.
            chunk_bytes = compute.used + sum(chunk.nbytes for chunk in coming)
            chunk_bytes = min(chunk_bytes, compute.budget_bytes - moment.non_model_bytes)
            compute.non_model_bytes = max(moment.non_model_bytes, self._predicted_bytes(moment, chunk_bytes))
        return True

    def _predicted_bytes(self, moment: Moment, chunk_bytes: int) -> int:
        """What a planned moment will come to, from what there is now.

        What the heap keeps stays where the budget has room for that, too.
        """
        found = self.current_non_model_bytes() + moment.growth_bytes
        tight = self._checking or found + chunk_bytes > self.manager.device_tier.budget_bytes
        self.meter.set_caching(not tight)
        if tight:
            self.meter.reclaim()
            found = self.current_non_model_bytes() + moment.growth_bytes
        if not self.meter.caching and not self._checking:
            self.non_model_peak = max(self.non_model_peak, found)
        return found

    def _peak(self) -> int:
        peak = self.meter.peak(self._bytes())
        self.non_model_peak = max(self.non_model_peak, peak)
        return peak

    def _record_peak(self) -> None:
        peak = self._peak()
        if self.trace.moments:
            last = self.trace.moments[-1]
            last.non_model_bytes = max(last.non_model_bytes, peak)

    def _check_peak(self) -> None:
        """Note what a second iteration needs: what libraries came to keep in the first is there from its start."""
        peak = self._peak()
        moment = self.trace.moments[self.manager.now]
        if peak > moment.non_model_bytes:
            moment.entered_bytes += peak - moment.non_model_bytes
            moment.non_model_bytes = peak

    def _bytes(self) -> int:
        """What the meter sees and must not count: chunks, and on a CPU the host tier."""
        return self.manager.resident_bytes
