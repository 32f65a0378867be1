"""Test the tracer: traced iterations, planned iterations, and departures from the plan."""

import mmap

import pytest
import torch
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.iteration_mode import Mode
from patrickstar._chunks.tracer import MAX_TRACES, Tracer
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.schema import PARAM16
from patrickstar._schedule.eviction_prefetch import (
    AggressivePrefetch,
    DemandFetch,
    LeastRecentlyUsed,
    ListOrder,
    PrefetchPolicy,
)
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.trace import Moment
from patrickstar.testing import NoMeter

given = fixed_draws(100)

BUDGET = 1000
CAUTIOUS = 800
CHUNKS = 4


class HandMeter(NoMeter):
    """Meter with values set by the test; `freed` bytes count as used until they are reclaimed."""

    counts_freed = True

    def __init__(self):
        self.used = self.peak_bytes = self.freed = self.reclaims = 0
        self.chunk_bytes = []

    def use(self, nbytes):
        self.used = nbytes
        self.peak_bytes = max(self.peak_bytes, self.used + self.freed)

    def calibrate(self, chunk_bytes):
        self.chunk_bytes.append(chunk_bytes)

    def now(self, chunk_bytes):
        self.chunk_bytes.append(chunk_bytes)
        return self.used + self.freed

    def peak(self, chunk_bytes):
        return self.peak_bytes

    def restart(self):
        self.peak_bytes = self.used + self.freed

    def reclaim(self):
        self.reclaims += 1
        self.freed = 0


@pytest.fixture
def tracer():
    return new_tracer()


def new_tracer(policy=None):
    manager = ChunkManager(torch.device("cpu"), BUDGET, 10_000, poison=False)
    for index in range(CHUNKS):
        manager.new_chunk(PARAM16, index, 8, "bfloat16", Tier.DEVICE)
    return Tracer(manager, HandMeter(), policy)


def access(tracer, chunks, belongs=True, *, transient=0, retained=0):
    """Run an operator that uses `transient` bytes and leaves `retained`."""
    tracer.begin_moment(chunks, belongs)
    tracer.transfers_done()
    tracer.meter.use(transient)
    tracer.meter.use(retained)


def iterate(tracer, key, accesses):
    """Run an iteration of (chunks, transient bytes, retained bytes); return True if it followed a trace."""
    follows = tracer.begin_iteration(key)
    with tracer.in_iteration():
        for chunks, transient, retained in accesses:
            access(tracer, chunks, transient=transient, retained=retained)
    tracer.meter.use(0)
    tracer.end_iteration()
    return follows


ACCESSES = [((0,), 50, 10), ((), 5, 10), ((1, 2), 300, 20), ((), 0, 0)]
SHAPE = [chunks for chunks, _, _ in ACCESSES]


def test_traced_iteration_evicts_the_least_recently_used_and_records_peak_of_every_moment(tracer):
    tracer.begin_iteration("b")
    tracer.meter.use(70)
    tracer.begin_moment((0,), belongs=True)
    assert tracer.mode is Mode.TRACE and isinstance(tracer.manager.cache.eviction_policy, LeastRecentlyUsed)
    device = tracer.manager.device_tier
    assert (device.soft_limit_bytes, device.non_model_bytes, tracer.manager.cache.now) == (CAUTIOUS, 70, 0)
    tracer.discard_iteration()
    tracer.meter.use(0)
    assert not iterate(tracer, "a", ACCESSES)
    trace = tracer.traces["a"]
    assert [moment.chunks for moment in trace.moments] == SHAPE
    assert [moment.non_model_bytes for moment in trace.moments[:3]] == [50, 10, 300]
    assert tracer.peak_non_model_bytes == trace.peak_non_model_bytes == 300


def test_next_iteration_of_a_kind_follows_the_trace(tracer):
    iterate(tracer, "a", ACCESSES)
    assert tracer.begin_iteration("a")
    manager, trace = tracer.manager, tracer.traces["a"]
    assert isinstance(manager.cache.eviction_policy, PrefetchPolicy) and manager.cache.eviction_policy.trace is trace
    assert manager.cache.prefetch_policy is manager.cache.eviction_policy
    assert dict(manager.cache.eviction_policy.nbytes) == dict.fromkeys(range(CHUNKS), 16)
    for now, chunks in enumerate(SHAPE):
        tracer.begin_moment(chunks, belongs=True)
        assert (tracer.mode, manager.cache.now) == (Mode.PLAN, now)
        assert manager.device_tier.non_model_bytes == trace.moments[now].non_model_bytes
        assert manager.device_tier.soft_limit_bytes == BUDGET
    assert not tracer.end_iteration()
    assert tracer.traces == {"a": trace}
    assert (tracer.mode, tracer.open_key) == (Mode.DEMAND, None)


def test_plan_uses_measured_bytes_where_larger(tracer):
    iterate(tracer, "a", ACCESSES)
    tracer.begin_iteration("a")
    tracer.meter.use(120)
    tracer.begin_moment((0,), belongs=True)
    assert tracer.manager.device_tier.non_model_bytes == 120 + 50, "current bytes plus the growth of this moment"
    tracer.meter.used, tracer.meter.freed = 20, BUDGET
    tracer.begin_moment((), belongs=True)
    assert tracer.manager.device_tier.non_model_bytes == 20, "what was freed was not reclaimed"


@pytest.mark.parametrize("at", range(len(SHAPE)))
@pytest.mark.parametrize("unexpected", [(3,), (0, 1), (2, 1)])
def test_unexpected_access_departs_from_plan_and_retraces(tracer, at, unexpected):
    iterate(tracer, "a", ACCESSES)
    tracer.begin_iteration("a")
    for chunks in SHAPE[:at]:
        tracer.begin_moment(chunks, belongs=True)
    tracer.meter.use(77)
    tracer.begin_moment(unexpected, belongs=True)
    assert tracer.mode is Mode.DEMAND
    assert tracer.traces == {}
    assert (
        isinstance(tracer.manager.cache.eviction_policy, LeastRecentlyUsed)
        and tracer.manager.cache.prefetch_policy is None
    )
    assert tracer.manager.device_tier.non_model_bytes == 77
    tracer.begin_moment((0,), belongs=True)
    assert tracer.mode is Mode.DEMAND
    assert not tracer.end_iteration()
    assert not iterate(tracer, "a", ACCESSES), "no trace is left"
    assert iterate(tracer, "a", ACCESSES)


def test_second_iteration_corrects_the_trace(tracer):
    iterate(tracer, "a", ACCESSES)
    trace = tracer.traces["a"]
    assert (trace.checked, trace.peak_non_model_bytes, tracer.peak_non_model_bytes) == (False, 300, 300)
    tracer.begin_iteration("a")
    with tracer.in_iteration():
        tracer.meter.use(30)  # libraries have kept memory since the trace was recorded
        for chunks, transient, retained in ACCESSES:
            access(tracer, chunks, transient=30 + transient, retained=30 + retained)
    assert tracer.end_iteration(), "more memory is needed than in the plan"
    assert [moment.non_model_bytes for moment in trace.moments[:3]] == [80, 40, 330]
    assert (trace.checked, trace.peak_non_model_bytes, tracer.peak_non_model_bytes) == (True, 330, 330)
    tracer.meter.use(0)
    assert iterate(tracer, "a", ACCESSES) and tracer.peak_non_model_bytes == 330, "a third changes nothing"


def test_oldest_trace_is_dropped_above_the_limit(tracer):
    for key in range(MAX_TRACES + 2):
        iterate(tracer, key, ACCESSES[:1])
    assert list(tracer.traces) == list(range(2, MAX_TRACES + 2))
    tracer.invalidate()
    assert tracer.traces == {}


def test_nested_iteration_belongs_to_the_open_one(tracer):
    tracer.begin_iteration("a")
    access(tracer, (0,))
    assert not tracer.begin_iteration("b")
    access(tracer, (1,))
    assert tracer.end_iteration()
    assert [moment.chunks for moment in tracer.traces["a"].moments] == [(0,), (1,)]


def test_accesses_without_iteration_and_iterations_without_accesses_leave_no_trace(tracer):
    assert tracer.mode is Mode.DEMAND
    tracer.begin_moment((0,), belongs=True)
    assert tracer.mode is Mode.DEMAND
    tracer.begin_iteration("a")
    assert not tracer.end_iteration()
    assert tracer.traces == {}
    assert not tracer.end_iteration(), "there was none to end"


def test_discarded_iteration_drops_its_trace(tracer):
    iterate(tracer, "a", ACCESSES)
    iterate(tracer, "b", ACCESSES)
    for _ in range(2):
        tracer.begin_iteration("a")
        tracer.begin_moment((0,), belongs=True)
        tracer.discard_iteration()
        assert (tracer.mode, tracer.open_key) == (Mode.DEMAND, None)
        assert (
            isinstance(tracer.manager.cache.eviction_policy, ListOrder) and tracer.manager.cache.prefetch_policy is None
        )
        assert list(tracer.traces) == ["b"]
    tracer.discard_iteration()
    assert list(tracer.traces) == ["b"]


def test_access_outside_the_iteration_is_no_moment(tracer):
    iterate(tracer, "a", ACCESSES)
    tracer.begin_iteration("a")
    tracer.begin_moment((0,), belongs=True)
    tracer.meter.use(33)
    tracer.begin_moment((3,), belongs=False)
    assert (tracer.mode, tracer.manager.cache.now) == (Mode.PLAN, 0)
    assert tracer.manager.device_tier.non_model_bytes == 33
    for chunks in SHAPE[1:]:
        tracer.begin_moment(chunks, belongs=True)
        assert tracer.mode is Mode.PLAN
    tracer.end_iteration()
    assert list(tracer.traces) == ["a"]


def test_peak_survives_access_outside_the_iteration(tracer):
    tracer.begin_iteration("a")
    access(tracer, (0,), transient=400)
    access(tracer, (3,), belongs=False, transient=200)
    access(tracer, ())
    assert tracer.trace.moments[0].non_model_bytes == 400
    assert tracer.non_model_peak == 400


def test_in_iteration_marks_accesses_until_an_exception(tracer):
    tracer.begin_iteration("a")
    with pytest.raises(ZeroDivisionError), tracer.in_iteration(), tracer.in_iteration():
        tracer.begin_moment((1,), belongs=False)
        raise ZeroDivisionError
    assert tracer.in_iteration_now == 0
    tracer.begin_moment((2,), belongs=False)
    assert [moment.chunks for moment in tracer.trace.moments] == [(1,)]


def test_chunks_and_offloaded_activations_are_not_counted(tracer):
    manager = tracer.manager
    manager.new_chunk(PARAM16, 9, 8, "bfloat16", Tier.HOST)
    manager.host_tier.allocate_block(128)
    tracer.calibrate()
    assert tracer.meter.reclaims == 1
    above = CHUNKS * (16 if manager.device_tier.page_pool is None else round_up(16))  # whole pages are resident
    below = mmap.PAGESIZE
    assert tracer.meter.chunk_bytes == [above + below] * 2
    assert manager.cache.resident_bytes == above + below


def test_parked_pages_are_not_counted():
    tracer = new_tracer()
    manager = tracer.manager
    if manager.device_tier.page_pool is None:
        pytest.skip("this system cannot move pages")
    before = manager.cache.resident_bytes
    manager.move_to_tier(manager[PARAM16, 0], Tier.HOST)
    below = mmap.PAGESIZE
    assert manager.cache.resident_bytes == before + below, "its pages are parked, not unmapped"
    manager.device_tier.page_pool.trim(0)
    assert manager.cache.resident_bytes == before + below - round_up(16)


@pytest.mark.parametrize("policy", [DemandFetch, AggressivePrefetch])
def test_policy_is_created_once_per_trace(policy):
    assert new_tracer().prefetch_policy is DemandFetch, "a CPU without a disk does not prefetch"
    tracer = new_tracer(policy)
    assert tracer.prefetch_policy is policy
    tracer.manager.cache.evict_everything = True  # no iteration is resident

    def followed(key):
        tracer.begin_iteration(key)
        found = tracer.manager.cache.prefetch_policy
        for chunks in SHAPE:
            tracer.begin_moment(chunks, belongs=True)
        tracer.end_iteration()
        return found

    for key in "ab":
        iterate(tracer, key, ACCESSES)
    policies = {key: followed(key) for key in "ab"}
    assert all(type(found) is policy and found.trace is tracer.traces[key] for key, found in policies.items())
    assert all(followed(key) is policies[key] for key in "abba")
    iterate(tracer, "a", ACCESSES[:1])
    iterate(tracer, "a", ACCESSES)
    assert followed("a") is not policies["a"] and followed("a").trace is tracer.traces["a"]


def test_freed_memory_is_reclaimed_before_chunks_are_evicted(tracer):
    tracer.meter.freed = CAUTIOUS - CHUNKS * 16
    tracer.measure()
    assert (tracer.meter.reclaims, tracer.manager.device_tier.non_model_bytes) == (0, CAUTIOUS - CHUNKS * 16)
    tracer.meter.freed += 1
    tracer.measure()
    assert (tracer.meter.reclaims, tracer.manager.device_tier.non_model_bytes) == (1, 0)


@given(st.integers(0, BUDGET), st.integers(0, BUDGET))
def test_chunks_may_fill_the_budget_below_the_known_peak(peak, now):
    tracer = new_tracer()
    tracer.peak_non_model_bytes = peak
    tracer.meter.use(now)
    tracer.measure()
    chunkable = tracer.manager.device_tier.soft_limit_bytes - tracer.manager.device_tier.non_model_bytes
    assert chunkable == max(CAUTIOUS - now, BUDGET - max(peak, now) if peak else 0)


shapes = st.lists(st.sampled_from([(), (0,), (1, 2)]), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.sampled_from("ab"), shapes), max_size=12))
def test_trace_is_followed_iff_last_iteration_matched(iterations):
    tracer = new_tracer()
    expected = {}
    for key, accesses in iterations:
        assert iterate(tracer, key, [(chunks, 0, 0) for chunks in accesses]) is (key in expected)
        if expected.get(key, accesses) == accesses:
            expected[key] = accesses
        else:
            del expected[key]
        assert {key: [Moment(chunks) for chunks in found] for key, found in expected.items()} == {
            key: trace.moments for key, trace in tracer.traces.items()
        }


def test_the_last_moment_has_what_is_there_until_the_step():
    """The batch and the loss, what clipping needed, and in a second iteration what is more."""
    tracer = new_tracer()
    for key, retained, peak, expected in (("a", 40, 90, 90), ("a", 60, 60, 90), ("a", 10, 30, 90), ("b", 40, 90, 40)):
        tracer.begin_iteration(key)
        with tracer.in_iteration():
            for chunks in SHAPE:
                access(tracer, chunks)
        tracer.manager.device_tier.allocations += key == "b"  # the peak may be that of a chunk
        tracer.meter.use(peak)
        tracer.meter.use(retained)
        tracer.end_iteration()
        assert tracer.traces[key].moments[-1].non_model_bytes == expected


def test_beside_an_accelerator_no_iteration_fills_what_operators_may_need():
    """The first one may need all; later ones without a trace leave room for the peak that is known."""
    tracer = new_tracer()
    tracer.manager.hardware.has_gpu = True
    device = tracer.manager.device_tier
    tracer.begin_iteration("a")
    access(tracer, (0,), transient=600)
    assert device.soft_limit_bytes == 0
    tracer.end_iteration()
    tracer.begin_iteration("b")
    tracer.meter.use(100)
    tracer.begin_moment((0,), belongs=True)
    assert tracer.mode is Mode.TRACE
    assert device.soft_limit_bytes - device.non_model_bytes == BUDGET - 600
