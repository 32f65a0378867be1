"""Policy simulator: invariants of all policies, and benefits of prefetching."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_simulator import Simulated, last_uses, simulate
from prefetch_policies import LifeTime
from test_prefetch import AHEAD, POLICIES, cases, chain

from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._schedule.trace import Moment, Trace
from patrickstar.errors import BudgetError

quick = settings(deadline=None, max_examples=200, print_blob=True)
rates = st.sampled_from([0.25, 0.5, 1.0, 2.0, 64.0])
depths = st.integers(1, 8)


def run(policy: type[PrefetchPolicy], case, rate_in=1.0, rate_out=1.0, depth_bytes=4, **options) -> Simulated:
    trace, nbytes, budget_bytes = case
    return simulate(
        trace,
        policy(trace, nbytes, budget_bytes),
        nbytes,
        budget_bytes,
        seconds=[1.0] * len(trace.moments),
        rate_in=rate_in,
        rate_out=rate_out,
        depth_bytes=depth_bytes,
        **options,
    )


@quick
@given(st.sampled_from(POLICIES), cases(), rates, rates, depths)
def test_invariants_of_all_policies(policy, case, rate_in, rate_out, depth_bytes):
    """The simulator itself asserts the budget at each moment, and that no held chunk is evicted."""
    trace, nbytes, budget_bytes = case
    found = run(policy, case, rate_in, rate_out, depth_bytes)
    assert found == run(policy, case, rate_in, rate_out, depth_bytes)
    assert found.peak_bytes <= budget_bytes
    assert found.seconds == pytest.approx(len(trace.moments) + found.stall_s)
    assert found.written_bytes <= found.fetched_bytes + sum(nbytes.values())
    # Fetches share one channel; transfers in progress at the start and the end of the iteration are tolerated.
    assert found.seconds + (depth_bytes + max(nbytes.values())) / rate_in >= found.fetched_bytes / rate_in


@quick
@given(st.sampled_from(POLICIES), cases(), rates)
def test_clean_chunks_are_never_written_back(policy, case, rate_in):
    found = run(policy, case, rate_in, written={})
    assert found.written_bytes == 0


chains = st.integers(2, 9).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(2, layers + 1)))


@settings(quick, max_examples=500)
@given(st.sampled_from(AHEAD), chains, rates, rates, depths)
def test_prefetching_never_stalls_longer_over_a_chain(policy, drawn, rate_in, rate_out, depth_bytes):
    demand = run(DemandFetch, chain(*drawn), rate_in, rate_out, depth_bytes)
    ahead = run(policy, chain(*drawn), rate_in, rate_out, depth_bytes)
    assert ahead.stall_s <= demand.stall_s
    assert ahead.fetched_bytes == demand.fetched_bytes
    assert ahead.written_bytes == demand.written_bytes


@quick
@given(st.sampled_from(AHEAD), chains, depths)
def test_prefetching_never_stalls_with_ample_bandwidth(policy, drawn, depth_bytes):
    """A write-back and a fetch together take less than the compute time of one layer."""
    assert run(policy, chain(*drawn), 2.0, 2.0, depth_bytes).stall_s == 0
    layers, fit = drawn
    if fit < layers:
        assert run(DemandFetch, chain(*drawn), 2.0, 2.0, depth_bytes).stall_s > 0


def test_results_computed_by_hand():
    """Two layers, memory for one: each change of layer waits for the write-back of a gradient, then for a fetch."""
    demand = run(DemandFetch, chain(2, 1), rate_in=0.5, rate_out=0.25)
    # Layer 1 is fetched after layer 0 was used in backward (written), layer 0 after the backward of layer 1 (written).
    assert demand == Simulated(
        fetched_bytes=2, written_bytes=2, evictions=2, peak_bytes=1, stall_s=2 * (4.0 + 2.0), seconds=4 + 12.0
    )
    # With memory for both, nothing is transferred after the first iteration.
    assert run(AggressivePrefetch, chain(2, 2)) == Simulated(0, 0, 0, 2, 0.0, 4.0)
    # Lifetimes end with the iteration: the chunk of the last moment is in use at its end, the other one was evicted.
    assert run(LifeTime, chain(2, 2)).fetched_bytes == 1


def test_gradients_are_written_at_the_last_use():
    trace, _, _ = chain(2, 1)
    assert last_uses(trace) == {2: (1,), 3: (0,)}


def test_non_model_data_waits_for_evictions():
    """Memory for two, then for one: the evicted chunk was written, and its write-back takes 4 seconds."""
    trace = Trace([Moment((0,)), Moment((1,)), Moment((1,), 1)])
    found = run(DemandFetch, (trace, {0: 1, 1: 1}, 2), rate_out=0.25, written={0: (0,)}, rate_in=1.0)
    assert found == Simulated(
        fetched_bytes=1, written_bytes=1, evictions=1, peak_bytes=2, stall_s=4.0 + 1.0, seconds=3 + 5.0
    )


def test_chunks_that_do_not_fit_raise():
    trace = Trace([Moment((0, 1), 1)])
    with pytest.raises(BudgetError) as caught:
        run(DemandFetch, (trace, {0: 2, 1: 3}, 5))
    assert caught.value.short_bytes == 1
