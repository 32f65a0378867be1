"""Runtime tracer: counts moments, traces the first iteration of each kind and follows the trace in later ones."""

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.iteration_mode import Mode
from patrickstar._distributed.linked_processes import LinkedProcesses
from patrickstar._hardware.memory_meter import Meter
from patrickstar._layout.schema import PARAM16
from patrickstar._schedule.eviction_prefetch import (
    AccessHistory,
    AggressivePrefetch,
    DemandFetch,
    LeastRecentlyUsed,
    ListOrder,
    PrefetchPolicy,
    StreamingPrefetch,
)
from patrickstar._schedule.placement import cautious_limit_bytes
from patrickstar._schedule.trace import Moment, Trace
from patrickstar._tiers.chunk import Chunk

_log = logging.getLogger(__name__)

MAX_TRACES = 64
"""Number of traces kept, one per kind of iteration (input shapes); the oldest is dropped first."""


class Tracer:
    """Sets the manager's current moment and expected non-model bytes at every operator boundary."""

    def __init__(
        self,
        manager: ChunkManager,
        meter: Meter,
        prefetch_policy: type[PrefetchPolicy] | None = None,
        linked: LinkedProcesses | None = None,
    ) -> None:
        self.manager, self.cache = manager, manager.cache
        self.linked = linked
        manager.cache.decides_alike = linked is not None
        self._accesses = 0
        """Hash of the chunks that all moments have accessed."""
        # Between the host tier and a CPU's device tier the compute cores do the copies: prefetching would hide nothing.
        can_overlap = manager.disk_tier is not None or manager.hardware.has_gpu
        self.prefetch_policy = prefetch_policy or (AggressivePrefetch if can_overlap else DemandFetch)
        self.meter = meter
        self.mode = Mode.DEMAND
        self.trace = Trace()
        self.traces: dict[Hashable, Trace] = {}
        """Traces of iterations by kind (input shapes)."""
        self.evaluation_traces: dict[Hashable, Trace] = {}
        """Traces of forwards without gradients, each of which is followed as an iteration of its own."""
        self._open_traces = self.traces
        """Traces among which the open iteration has its own: one of these two."""
        self._policies: dict[int, PrefetchPolicy] = {}
        self._history = AccessHistory()
        self._list_order = manager.cache.eviction_policy = ListOrder(self._history)
        self._checking = False
        """True while the followed trace is being compared with the needs of a second iteration."""
        self._entered = (0, 0)
        """Count of allocations, and non-model bytes, when the last evaluation began."""
        self._allocations = 0
        """Count of allocations when the measured moment began."""
        self.evaluation_growth: dict[Hashable, int] = {}
        """Largest increase of non-model data in evaluations that moved no chunk, by kind (input shapes)."""
        self.open_key: Hashable | None = None
        self.in_iteration_now = 0
        self.peak_non_model_bytes = 0
        """Peak of non-model data over all traced iterations."""
        self.non_model_peak = 0
        """Peak of non-model data since the step began."""

    def calibrate(self) -> None:
        self.meter.reclaim()
        self.meter.calibrate(self.cache.resident_bytes)
        self.manager.device_tier.limit_tensors(self.meter)
        self.measure()

    def invalidate(self) -> None:
        self.traces.clear()
        self.evaluation_traces.clear()
        self.evaluation_growth.clear()

    def begin_iteration(self, key: Hashable) -> bool:
        """Open an iteration of this kind, unless one is open. Return True if it follows a trace."""
        if self.open_key is None:
            key = self.common(key)
            if key in self.traces and self._fits_resident(self.traces[key]):
                self.open_key, self._open_traces, self.cache.now = key, self.traces, -1
                self._begin_resident(self.traces[key])
            else:
                self._follow_or_trace(key, self.traces)
        return self.mode is Mode.PLAN

    def common(self, key: Hashable) -> Hashable:
        """Return the key of linked processes that stands for the keys of all."""
        return key if self.linked is None else self.linked.common(key)

    def _follow_or_trace(self, key: Hashable, traces: dict[Hashable, Trace]) -> None:
        """Open an iteration that follows its trace, if there is one, or records it."""
        self.open_key, self._open_traces, self.cache.now = key, traces, -1
        if key in traces:
            self.mode, self.trace = Mode.PLAN, traces[key]
            self.cache.eviction_policy = self.cache.prefetch_policy = self._policy_of(self.trace)
            self._checking = not self.trace.checked
        else:
            _log.info("tracing an iteration with inputs %s", key)
            self.mode, self.trace = Mode.TRACE, Trace()
            self.cache.eviction_policy = self._untraced_order(traces)
        if self.mode is Mode.TRACE or self._checking:
            self.meter.reclaim()
            self.meter.restart()

    def begin_planned_evaluation(self, key: Hashable) -> bool:
        """Open a forward without gradients as an iteration of its own, if that lets chunks be fetched early.

        It does where transfers run beside operators, and while no step is open, of whose trace the forward would be a
        part. Return True if it was opened: `end_iteration` ends it.
        """
        chunks = self.manager.param16.values()
        if not self.prefetch_policy.ahead or self.open_key is not None or all(each.device.present for each in chunks):
            return False
        self._follow_or_trace(key, self.evaluation_traces)
        return True

    def end_iteration(self) -> bool:
        """Close the iteration. Return True if it produced a trace or raised the known peak of non-model data."""
        key, mode = self.open_key, self.mode
        traced = key is not None and mode is Mode.TRACE and bool(self.trace.moments)
        if traced:
            self._end_last_moment()
            self._open_traces[key] = self.trace
            if self.linked is not None:
                last = self.linked.largest_each([self.trace.last_gradients.get(i, 0) for i in self.manager.param16])
                self.trace.last_gradients = dict(zip(self.manager.param16, last, strict=True))
            if len(self._open_traces) > MAX_TRACES:
                self._open_traces.pop(next(iter(self._open_traces)))
        elif mode is Mode.RESIDENT:
            self._check_resident_peak()
        elif mode is Mode.PLAN and self.cache.now != len(self.trace.moments) - 1:
            moments = self.cache.now + 1, len(self.trace.moments)
            _log.info("trace dropped: the iteration had %d moments, the trace has %d", *moments)
            self._open_traces.pop(key, None)
        elif self._checking:
            self._end_last_moment()
            self.trace.mark_checked()
            traced = self.trace.peak_non_model_bytes > self.peak_non_model_bytes
        if traced and self._open_traces is self.traces:
            self.peak_non_model_bytes = max(self.peak_non_model_bytes, self.trace.peak_non_model_bytes)
        self._stop_following()
        return traced

    # Resident iterations. See [Note: resident iterations] in `_params/residency.py`.

    @property
    def unconfirmed(self) -> bool:
        """True in an iteration that is being traced, or follows its trace for the first time."""
        return self.mode is Mode.TRACE or self._checking

    def _fits_resident(self, trace: Trace) -> bool:
        """Return whether the parameters of an iteration fit on the device for its whole length."""
        if not trace.checked or self.meter.counts_freed or self.cache.evict_everything:
            return False
        missing_bytes = sum(chunk.nbytes for chunk in self._missing(trace))
        return trace.peak_non_model_bytes + missing_bytes <= self.manager.device_tier.free_bytes

    def _missing(self, trace: Trace) -> list[Chunk]:
        chunks = [self.manager.param16[index] for index in sorted(trace.uses, key=trace.first_use)]
        return [chunk for chunk in chunks if not chunk.device.present]

    def _begin_resident(self, trace: Trace) -> None:
        self.mode, self.trace = Mode.RESIDENT, trace
        device = self.manager.device_tier
        device.soft_limit_bytes = device.budget_bytes
        device.non_model_bytes = trace.peak_non_model_bytes
        self.meter.restart()
        if self.prefetch_policy.ahead:
            self.cache.queue_fetches(self._missing(trace))

    def evaluation_fits(self, key: Hashable) -> bool:
        """Return whether an evaluation of this kind is known to fit beside all parameters."""
        growth, chunks = self.evaluation_growth.get(key), self.manager.param16.values()
        if growth is None or self.cache.evict_everything:
            return False
        missing = sum(chunk.nbytes for chunk in chunks if not chunk.device.present)
        return self.current_non_model_bytes() + growth + missing <= self.manager.device_tier.free_bytes

    def begin_evaluation(self) -> bool:
        """Start to measure an evaluation. Return False if an open iteration is being measured."""
        if self.mode is Mode.TRACE or self._checking or self.mode is Mode.RESIDENT:
            return False
        self._entered = self.manager.device_tier.allocations, self.current_non_model_bytes()
        self.meter.restart()
        return True

    def end_evaluation(self, key: Hashable) -> None:
        """Record the evaluation's growth, unless chunks moved, which the meter would take for non-model data."""
        allocations, entered_bytes = self._entered
        if allocations == self.manager.device_tier.allocations:
            while len(self.evaluation_growth) >= MAX_TRACES:
                self.evaluation_growth.pop(next(iter(self.evaluation_growth)))
            growth = self._agreed(self.meter.peak(self.cache.resident_bytes)) - entered_bytes
            self.evaluation_growth[key] = max(0, growth, self.evaluation_growth.pop(key, 0))

    def _check_resident_peak(self) -> None:
        """Drop the trace of a resident iteration if its peak exceeded the budget."""
        peak, device = self._peak(), self.manager.device_tier
        if peak + device.used > device.budget_bytes:
            _log.info("trace dropped: a resident iteration needed %d bytes of non-model data", peak)
            self._open_traces.pop(self.open_key, None)

    def discard_iteration(self) -> None:
        """Forget the open iteration after an error, which other processes may not have."""
        self._open_traces.pop(self.open_key, None)
        linked, self.linked = self.linked, None
        try:
            self._stop_following()
        finally:
            self.linked = linked

    def _stop_following(self) -> None:
        self.open_key, self.mode, self._checking = None, Mode.DEMAND, False
        self.cache.eviction_policy = self._list_order
        self.cache.cancel_prefetch()
        self.measure()

    def _policy_of(self, trace: Trace) -> PrefetchPolicy:
        """Return the prefetch policy of a trace; create it when the trace is first followed with this budget."""
        policy = self._policies.get(id(trace))
        budget_bytes = self.cache.param_budget_bytes - self._grown_bytes(trace)
        if policy is None or policy.trace is not trace or policy.budget_bytes != budget_bytes:
            sizes = {index: chunk.nbytes for (kind, index), chunk in self.manager.chunks.items() if kind == PARAM16}
            chosen = StreamingPrefetch if self._open_traces is self.evaluation_traces else self.prefetch_policy
            policy = chosen(trace, sizes, budget_bytes)
            existing = {id(trace) for traces in (self.traces, self.evaluation_traces) for trace in traces.values()}
            self._policies = {key: old for key, old in self._policies.items() if id(old.trace) in existing}
            self._policies[id(trace)] = policy
        return policy

    def _grown_bytes(self, trace: Trace) -> int:
        """Return by how much non-model data exceed those of an evaluation's trace: the cache of a generation grows.

        Rounded up to whole chunks, so that few tokens need a policy of their own.
        """
        if self._open_traces is self.traces:
            return 0
        unit = max(chunk.nbytes for chunk in self.manager.param16.values())
        return -(-max(0, self.current_non_model_bytes() - trace.moments[0].entered_bytes) // unit) * unit

    def _untraced_order(self, traces: dict[Hashable, Trace]) -> LeastRecentlyUsed | ListOrder:
        """Return the eviction policy of an iteration, or of an evaluation, that follows no trace."""
        return LeastRecentlyUsed(self._history) if traces is self.traces else self._list_order

    @contextmanager
    def in_iteration(self) -> Iterator[None]:
        """Count every access inside the context as part of the open iteration."""
        self.in_iteration_now += 1
        try:
            yield
        finally:
            self.in_iteration_now -= 1

    def note_gradient(self, index: int) -> None:
        """Record in a trace that a gradient of a chunk is complete."""
        if self.mode is Mode.TRACE:
            self.trace.last_gradients[index] = self.cache.now

    @property
    def followed(self) -> Trace | None:
        """Trace that the iteration follows."""
        return self.trace if self.mode is Mode.PLAN else None

    def current_non_model_bytes(self) -> int:
        nbytes = self.meter.now(self.cache.resident_bytes)
        return nbytes if self.linked is None else self._agreed(nbytes)

    def _agreed(self, nbytes: int) -> int:
        """Return the largest of the linked processes' values."""
        return nbytes if self.linked is None else self.linked.largest(nbytes, self._accesses)

    def measure(self) -> None:
        """Apply the measured non-model bytes, and leave a margin for the unknown ones."""
        compute = self.manager.device_tier
        first = self.mode is Mode.TRACE and self._open_traces is self.traces and not self.peak_non_model_bytes
        cautious = cautious_limit_bytes(compute.budget_bytes, first, strictly := self.manager.hardware.has_gpu)
        compute.non_model_bytes = self._measured(cautious)
        missing = max(0, self.peak_non_model_bytes - compute.non_model_bytes)
        known = compute.budget_bytes - missing if self.peak_non_model_bytes else 0
        compute.soft_limit_bytes = known if strictly and known else max(cautious, known)

    def _measured(self, limit_bytes: int) -> int:
        """Return the non-model bytes; trim cached freed memory first if it would break the limit."""
        measured = self.current_non_model_bytes()
        if measured + self.cache.settled_bytes > limit_bytes:
            self.meter.reclaim()
            measured = self.current_non_model_bytes()
        return measured

    def begin_moment(self, chunks: tuple[int, ...], belongs: bool) -> None:
        """Begin a moment: an operator is about to access `chunks`, or has ended (empty `chunks`)."""
        if chunks:
            self._history.add(chunks)
        if self.linked is not None:
            self._accesses = hash((self._accesses, chunks))
        if self.mode is Mode.RESIDENT and (belongs or self.in_iteration_now):
            return
        if not (belongs or self.in_iteration_now) or self.open_key is None or self.mode is Mode.DEMAND:
            if self.mode is Mode.TRACE:
                self._record_peak()
            self._measure_moment()
            return
        if self._checking and self.cache.now >= 0:
            self._check_peak()
        self.cache.now += 1
        if self.mode is Mode.PLAN:
            if self.expect_traced(chunks):
                return
            self.mode, self._checking = Mode.DEMAND, False
            _log.info("trace dropped: moment %d accesses chunks %s, unlike the trace", self.cache.now, chunks)
            self._open_traces.pop(self.open_key, None)
            self.cache.eviction_policy = self._untraced_order(self._open_traces)
            self.cache.cancel_prefetch()
            self._measure_moment()
            return
        self._record_peak()
        self._measure_moment()
        self.trace.moments.append(Moment(chunks, entered_bytes=self.manager.device_tier.non_model_bytes))

    def _measure_moment(self) -> None:
        self.measure()
        self.non_model_peak = max(self.non_model_peak, self.manager.device_tier.non_model_bytes)

    def transfers_done(self) -> None:
        """Start to measure the operator's own memory, after the transfers that it needed."""
        if self.mode is Mode.TRACE or self._checking:
            # Otherwise memory freed by an earlier operator would hide what the next one allocates.
            self.meter.reclaim()
            self.meter.restart()
            self._allocations = self.manager.device_tier.allocations

    def expect_traced(self, chunks: tuple[int, ...]) -> bool:
        """Apply the non-model bytes that the followed trace expects. Return False if it is another moment's."""
        now, moments = self.cache.now, self.trace.moments
        if now >= len(moments) or moments[now].chunks != chunks:
            return False
        moment, compute = moments[now], self.manager.device_tier
        compute.soft_limit_bytes = compute.budget_bytes
        compute.non_model_bytes = moment.non_model_bytes
        missing = [chunk for index in chunks if not (chunk := self.manager.param16[index]).device.present]
        # A forward without gradients may have more non-model data than its trace: the cache of a generation grows.
        if self.meter.counts_freed or missing or self._open_traces is self.evaluation_traces:
            # Eviction keeps chunks within the budget.
            chunk_bytes = self.cache.settled_bytes + sum([chunk.nbytes for chunk in missing])
            chunk_bytes = min(chunk_bytes, compute.budget_bytes - moment.non_model_bytes)
            compute.non_model_bytes = max(moment.non_model_bytes, self._predicted_bytes(moment, chunk_bytes))
        return True

    def _predicted_bytes(self, moment: Moment, chunk_bytes: int) -> int:
        """Predict a planned moment's non-model bytes from those now."""
        predicted = self.current_non_model_bytes() + moment.growth_bytes
        if self._checking or predicted + chunk_bytes > self.manager.device_tier.budget_bytes:
            self.meter.reclaim()
            predicted = self.current_non_model_bytes() + moment.growth_bytes
        if not self._checking:
            self.non_model_peak = max(self.non_model_peak, predicted)
        return predicted

    def _peak(self) -> int:
        peak = self._agreed(self.meter.peak(self.cache.resident_bytes))
        self.non_model_peak = max(self.non_model_peak, peak)
        return peak

    def _end_last_moment(self) -> None:
        """Record what is there until the optimizer step: the batch and the loss, and what clipping needed."""
        moved = self._allocations != self.manager.device_tier.allocations  # which the meter would take for a peak
        nbytes = self.current_non_model_bytes() if moved else self._peak()
        self.trace.moments[-1].non_model_bytes = max(self.trace.moments[-1].non_model_bytes, nbytes)

    def _record_peak(self) -> None:
        peak = self._peak()
        if self.trace.moments:
            last = self.trace.moments[-1]
            last.non_model_bytes = max(last.non_model_bytes, peak)
            accessed_bytes = sum(self.manager.param16[index].nbytes for index in last.chunks)
            if peak + accessed_bytes > self.manager.device_tier.budget_bytes:
                # No eviction would have helped: the step is refused now, not when its trace is followed.
                self.manager.device_tier.non_model_bytes = peak
                self.cache.make_room(accessed_bytes, protect=())

    def _check_peak(self) -> None:
        """Raise the trace to a second iteration's needs: libraries hold from its start what they kept in the first."""
        peak, moment = self._peak(), self.trace.moments[self.cache.now]
        if peak > moment.non_model_bytes:
            moment.entered_bytes += peak - moment.non_model_bytes
            moment.non_model_bytes = peak
