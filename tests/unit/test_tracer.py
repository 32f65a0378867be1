"""The clock: an iteration is watched, the next of its kind follows the trace, and departs from it without failing."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefetch_policies import Conservative

from patrickstar._layout.schema import PARAM16
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.tracer import MAX_TRACES, Mode, Tracer
from patrickstar._memory.vm_pool import round_up
from patrickstar._schedule.eviction import ListOrder
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._schedule.trace import Moment
from patrickstar.testing import NoMeter

quick = settings(derandomize=True, deadline=None, max_examples=100)

BUDGET = 1000
CAUTIOUS = 800
CHUNKS = 4


class HandMeter(NoMeter):
    """A meter whose figures are set by hand; `freed` bytes count as used until they are reclaimed."""

    counts_freed = True

    def __init__(self):
        self.used = self.high = self.freed = self.reclaims = 0
        self.kept = []
        self.chunk_bytes = []

    def use(self, nbytes):
        self.used = nbytes
        self.high = max(self.high, self.used + self.freed)

    def calibrate(self, chunk_bytes):
        self.chunk_bytes.append(chunk_bytes)

    def now(self, chunk_bytes):
        self.chunk_bytes.append(chunk_bytes)
        return self.used + self.freed

    def peak(self, chunk_bytes):
        return self.high

    def restart(self):
        self.high = self.used + self.freed

    def reclaim(self):
        self.reclaims += 1
        self.freed = 0

    def set_caching(self, allowed):
        self.kept.append(allowed)
        self.caching = allowed


@pytest.fixture
def clock():
    return new_clock()


def new_clock(policy=None):
    manager = ChunkManager(torch.device("cpu"), BUDGET, 10_000, poison=False)
    for index in range(CHUNKS):
        manager.new_chunk(PARAM16, index, 8, "bfloat16", Tier.DEVICE)
    return Tracer(manager, HandMeter(), policy)


def access(clock, chunks, belongs=True, *, transient=0, kept=0):
    """A boundary, then an operator that uses `transient` bytes and leaves `kept`."""
    clock.begin_moment(chunks, belongs)
    clock.transfers_done()
    clock.meter.use(transient)
    clock.meter.use(kept)


def iterate(clock, key, accesses):
    """One iteration, its accesses given as (chunks, transient bytes, bytes kept); whether it followed a trace."""
    follows = clock.begin_iteration(key)
    with clock.in_iteration():
        for chunks, transient, kept in accesses:
            access(clock, chunks, transient=transient, kept=kept)
    clock.meter.use(0)
    clock.end_iteration()
    return follows


ACCESSES = [((0,), 50, 10), ((), 5, 10), ((1, 2), 300, 20), ((), 0, 0)]
SHAPE = [chunks for chunks, _, _ in ACCESSES]


def test_a_new_clock_knows_nothing_and_fetches_on_demand(clock):
    assert clock.mode is Mode.DEMAND
    clock.begin_moment((0,), belongs=True)
    assert clock.mode is Mode.DEMAND and clock.traces == {}


def test_an_iteration_is_watched_with_the_peak_of_every_moment(clock):
    assert not iterate(clock, "a", ACCESSES)
    trace = clock.traces["a"]
    assert [moment.chunks for moment in trace.moments] == SHAPE
    assert [moment.non_model_bytes for moment in trace.moments[:3]] == [50, 10, 300]
    assert clock.peak_non_model_bytes == trace.peak_non_model_bytes == 300


def test_while_watching_eviction_is_in_list_order_under_a_part_of_the_budget(clock):
    clock.begin_iteration("a")
    clock.meter.use(70)
    clock.begin_moment((0,), belongs=True)
    manager = clock.manager
    assert clock.mode is Mode.TRACE
    assert isinstance(manager.policy, ListOrder)
    assert (manager.device_tier.soft_limit_bytes, manager.device_tier.non_model_bytes, manager.now) == (CAUTIOUS, 70, 0)


def test_the_next_iteration_of_a_kind_follows_the_trace(clock):
    iterate(clock, "a", ACCESSES)
    assert clock.begin_iteration("a")
    manager, trace = clock.manager, clock.traces["a"]
    assert isinstance(manager.policy, PrefetchPolicy) and manager.policy.trace is trace
    assert manager.prefetch is manager.policy
    assert dict(manager.policy.nbytes) == dict.fromkeys(range(CHUNKS), 16)
    for now, chunks in enumerate(SHAPE):
        clock.begin_moment(chunks, belongs=True)
        assert (clock.mode, manager.now) == (Mode.PLAN, now)
        assert manager.device_tier.non_model_bytes == trace.moments[now].non_model_bytes
        assert manager.device_tier.soft_limit_bytes == BUDGET
    assert not clock.end_iteration()
    assert clock.traces == {"a": trace}
    assert (clock.mode, clock.open_key) == (Mode.DEMAND, None)


def test_a_plan_reckons_with_what_is_measured_where_that_is_more(clock):
    iterate(clock, "a", ACCESSES)
    clock.begin_iteration("a")
    clock.meter.use(120)
    clock.begin_moment((0,), belongs=True)
    assert clock.manager.device_tier.non_model_bytes == 120 + 50, "what is there, and what comes in this moment"
    clock.meter.used, clock.meter.freed = 20, BUDGET
    clock.begin_moment((), belongs=True)
    assert clock.manager.device_tier.non_model_bytes == 20, "what was freed was not reclaimed"


def test_what_is_freed_is_kept_only_while_the_budget_has_room_for_it(clock):
    iterate(clock, "a", ACCESSES)
    assert clock.meter.kept == [False, True], "a trace is of memory that is needed"
    clock.meter.kept.clear()
    iterate(clock, "a", ACCESSES)
    assert set(clock.meter.kept[:-1]) == {False} and clock.meter.kept[-1], "and is checked by a second iteration"
    clock.begin_iteration("a")
    clock.meter.freed = BUDGET - CHUNKS * 16 - 50
    clock.begin_moment((0,), belongs=True)
    assert clock.meter.kept[-1] and clock.meter.freed, "all fits"
    clock.begin_moment((), belongs=True)
    clock.begin_moment((1, 2), belongs=True)
    assert not clock.meter.kept[-1] and not clock.meter.freed, "but not beside 300 bytes more"
    clock.begin_moment((), belongs=True)
    clock.end_iteration()
    assert clock.meter.kept[-1]


@pytest.mark.parametrize("at", range(len(SHAPE)))
@pytest.mark.parametrize("unexpected", [(3,), (0, 1), (2, 1)])
def test_an_unexpected_access_departs_from_the_plan_and_the_trace_is_taken_again(clock, at, unexpected):
    iterate(clock, "a", ACCESSES)
    clock.begin_iteration("a")
    for chunks in SHAPE[:at]:
        clock.begin_moment(chunks, belongs=True)
    clock.meter.use(77)
    clock.begin_moment(unexpected, belongs=True)
    assert clock.mode is Mode.DEMAND
    assert clock.traces == {}
    assert isinstance(clock.manager.policy, ListOrder) and clock.manager.prefetch is None
    assert clock.manager.device_tier.non_model_bytes == 77
    clock.begin_moment((0,), belongs=True)
    assert clock.mode is Mode.DEMAND
    assert not clock.end_iteration()
    assert not iterate(clock, "a", ACCESSES), "nothing is left to follow"
    assert iterate(clock, "a", ACCESSES)


def test_an_iteration_that_goes_on_after_the_plan_departs(clock):
    iterate(clock, "a", ACCESSES)
    iterate(clock, "a", [*ACCESSES, ((3,), 0, 0)])
    assert clock.traces == {}


def test_an_iteration_that_ends_before_the_plan_has_its_trace_taken_again(clock):
    iterate(clock, "a", ACCESSES)
    assert iterate(clock, "a", ACCESSES[:-1])
    assert clock.traces == {}


def test_a_second_iteration_corrects_the_trace_and_makes_a_new_plan(clock):
    iterate(clock, "a", ACCESSES)
    trace = clock.traces["a"]
    assert (trace.checked, trace.peak_non_model_bytes, clock.peak_non_model_bytes) == (False, 300, 300)
    clock.begin_iteration("a")
    with clock.in_iteration():
        clock.meter.use(30)  # what libraries have kept since the trace was taken
        for chunks, transient, kept in ACCESSES:
            access(clock, chunks, transient=30 + transient, kept=30 + kept)
    assert clock.end_iteration(), "more is needed than the plan says"
    assert [moment.non_model_bytes for moment in trace.moments[:3]] == [80, 40, 330]
    assert (trace.checked, trace.peak_non_model_bytes, clock.peak_non_model_bytes) == (True, 330, 330)
    clock.meter.use(0)
    assert iterate(clock, "a", ACCESSES) and clock.peak_non_model_bytes == 330, "a third changes nothing"


def test_every_kind_has_its_trace(clock):
    iterate(clock, "long", ACCESSES)
    assert not iterate(clock, "short", ACCESSES[:2])
    assert iterate(clock, "long", ACCESSES)
    assert iterate(clock, "short", ACCESSES[:2])
    iterate(clock, "short", ACCESSES[1:3])
    assert list(clock.traces) == ["long"]
    assert clock.peak_non_model_bytes == 300


def test_the_oldest_of_too_many_kinds_is_forgotten(clock):
    for key in range(MAX_TRACES + 2):
        iterate(clock, key, ACCESSES[:1])
    assert list(clock.traces) == list(range(2, MAX_TRACES + 2))
    clock.invalidate()
    assert clock.traces == {}


def test_what_begins_inside_an_iteration_belongs_to_it(clock):
    clock.begin_iteration("a")
    access(clock, (0,))
    assert not clock.begin_iteration("b")
    access(clock, (1,))
    assert clock.end_iteration()
    assert [moment.chunks for moment in clock.traces["a"].moments] == [(0,), (1,)]


def test_an_iteration_without_accesses_leaves_no_trace(clock):
    clock.begin_iteration("a")
    assert not clock.end_iteration()
    assert clock.traces == {}
    assert not clock.end_iteration(), "there was none to end"


def test_an_abandoned_iteration_is_not_believed(clock):
    iterate(clock, "a", ACCESSES)
    iterate(clock, "b", ACCESSES)
    for _ in range(2):
        clock.begin_iteration("a")
        clock.begin_moment((0,), belongs=True)
        clock.discard_iteration()
        assert (clock.mode, clock.open_key) == (Mode.DEMAND, None)
        assert isinstance(clock.manager.policy, ListOrder) and clock.manager.prefetch is None
        assert list(clock.traces) == ["b"]
    clock.discard_iteration()
    assert list(clock.traces) == ["b"]


def test_what_does_not_belong_is_no_moment(clock):
    iterate(clock, "a", ACCESSES)
    clock.begin_iteration("a")
    clock.begin_moment((0,), belongs=True)
    clock.meter.use(33)
    clock.begin_moment((3,), belongs=False)
    assert (clock.mode, clock.manager.now) == (Mode.PLAN, 0)
    assert clock.manager.device_tier.non_model_bytes == 33
    for chunks in SHAPE[1:]:
        clock.begin_moment(chunks, belongs=True)
        assert clock.mode is Mode.PLAN
    clock.end_iteration()
    assert list(clock.traces) == ["a"]


def test_a_peak_is_not_forgotten_because_of_what_does_not_belong(clock):
    clock.begin_iteration("a")
    access(clock, (0,), transient=400)
    access(clock, (3,), belongs=False, transient=200)
    access(clock, ())
    assert clock.trace.moments[0].non_model_bytes == 400
    assert clock.non_model_peak == 400


def test_everything_inside_belongs_and_an_exception_ends_that(clock):
    clock.begin_iteration("a")
    with pytest.raises(ZeroDivisionError), clock.in_iteration(), clock.in_iteration():
        clock.begin_moment((1,), belongs=False)
        raise ZeroDivisionError
    assert clock.inside == 0
    clock.begin_moment((2,), belongs=False)
    assert [moment.chunks for moment in clock.trace.moments] == [(1,)]


def test_chunks_and_offloaded_activations_are_not_counted_as_used(clock):
    manager = clock.manager
    manager.new_chunk(PARAM16, 9, 8, "bfloat16", Tier.HOST)
    manager.host_tier.allocate_block(128)
    clock.calibrate()
    assert clock.meter.reclaims == 1
    above = CHUNKS * (
        16 if manager.device_tier.page_pool is None else round_up(16)
    )  # what really is resident: whole pages
    below = mmap.PAGESIZE
    assert clock.meter.chunk_bytes == [above + below] * 2
    assert manager.resident_bytes == above + below


def test_pages_that_nobody_needs_any_more_are_not_counted_as_used_either():
    clock = new_clock()
    manager = clock.manager
    if manager.device_tier.page_pool is None:
        pytest.skip("this system moves no pages")
    before = manager.resident_bytes
    manager.move_to_tier(manager[PARAM16, 0], Tier.HOST)
    below = mmap.PAGESIZE
    assert manager.resident_bytes == before + below, "its pages are parked, not gone"
    manager.device_tier.page_pool.trim(0)
    assert manager.resident_bytes == before + below - round_up(16)


@pytest.mark.parametrize("policy", [DemandFetch, AggressivePrefetch, Conservative])
def test_a_policy_is_made_once_for_a_trace_and_goes_with_it(policy):
    clock = new_clock(policy)
    made = {}
    for _ in range(3):
        for key in "ab":
            if iterate(clock, key, ACCESSES):
                continue
            clock.begin_iteration(key)
            made[key] = clock.manager.prefetch
            assert type(made[key]) is policy and made[key].trace is clock.traces[key]
            for chunks in SHAPE:
                clock.begin_moment(chunks, belongs=True)
            clock.end_iteration()
        for key, first in made.items():
            clock.begin_iteration(key)
            assert clock.manager.prefetch is first
            for chunks in SHAPE:
                clock.begin_moment(chunks, belongs=True)
            clock.end_iteration()
    iterate(clock, "a", ACCESSES[:1])
    iterate(clock, "a", ACCESSES)
    clock.begin_iteration("a")
    assert clock.manager.prefetch is not made["a"] and clock.manager.prefetch.trace is clock.traces["a"]


def test_where_the_cores_that_compute_would_copy_nothing_comes_ahead_of_need(clock):
    assert clock.policy is DemandFetch
    assert new_clock(AggressivePrefetch).policy is AggressivePrefetch


def test_memory_that_was_freed_is_reclaimed_before_chunks_have_to_leave_for_it(clock):
    clock.meter.freed = CAUTIOUS - CHUNKS * 16
    clock.measure()
    assert (clock.meter.reclaims, clock.manager.device_tier.non_model_bytes) == (0, CAUTIOUS - CHUNKS * 16)
    clock.meter.freed += 1
    clock.measure()
    assert (clock.meter.reclaims, clock.manager.device_tier.non_model_bytes) == (1, 0)


@quick
@given(st.integers(0, BUDGET), st.integers(0, BUDGET))
def test_chunks_may_fill_what_the_known_peak_leaves_and_no_less_than_the_warm_up_may(peak, now):
    clock = new_clock()
    clock.peak_non_model_bytes = peak
    clock.meter.use(now)
    clock.measure()
    chunkable = clock.manager.device_tier.soft_limit_bytes - clock.manager.device_tier.non_model_bytes
    assert chunkable == max(CAUTIOUS - now, BUDGET - max(peak, now) if peak else 0)


shapes = st.lists(st.sampled_from([(), (0,), (1, 2)]), min_size=1, max_size=3)


@quick
@given(st.lists(st.tuples(st.sampled_from("ab"), shapes), max_size=12))
def test_a_trace_is_followed_exactly_when_the_last_iteration_of_its_kind_was_as_expected(iterations):
    clock = new_clock()
    expected = {}
    for key, accesses in iterations:
        assert iterate(clock, key, [(chunks, 0, 0) for chunks in accesses]) is (key in expected)
        if expected.get(key, accesses) == accesses:
            expected[key] = accesses
        else:
            del expected[key]
        assert {key: [Moment(chunks) for chunks in found] for key, found in expected.items()} == {
            key: trace.moments for key, trace in clock.traces.items()
        }
