"""Eviction in the order of lists, of last and of next uses; `test_prefetch.py` compares the latter with the optimum."""

from itertools import product

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._schedule.eviction_prefetch import (
    AccessHistory,
    DemandFetch,
    EvictionPolicy,
    LeastRecentlyUsed,
    ListOrder,
)
from patrickstar._schedule.trace import Moment, Trace

given = fixed_draws(400)

Accesses = list[tuple[int, ...]]


@st.composite
def cases(draw, max_chunks=4):
    """Draw a capacity in chunks and accesses that each fit into it."""
    capacity = draw(st.integers(1, max_chunks))
    access = st.sets(st.integers(0, 4), max_size=capacity).map(lambda drawn: tuple(sorted(drawn)))
    return capacity, draw(st.lists(access, min_size=1, max_size=10))


def fetches(policy: EvictionPolicy, accesses: Accesses, capacity: int, iterations: int = 1, history=None) -> int:
    """Count the fetches of a device with room for `capacity` chunks that is empty at first."""
    resident: set[int] = set()
    count = 0
    for _ in range(iterations):
        for now, chunks in enumerate(accesses):
            missing = set(chunks) - resident
            if history is not None:
                history.add(chunks)
            for evicted in policy.eviction_order(resident - set(chunks), now):
                if len(resident) + len(missing) <= capacity:
                    break
                resident.remove(evicted)
            resident |= missing
            count += len(missing)
            assert len(resident) <= capacity
    return count


def next_use(accesses: Accesses) -> DemandFetch:
    return DemandFetch(Trace([Moment(chunks) for chunks in accesses]), {}, 0)


def layers_of_experts(layers, experts, parameters):
    """Return the accesses of a forward in which experts use the stacked parameters of their layer in turn."""
    every = product(range(layers), range(experts), range(parameters))
    return [(layer * parameters + number,) for layer, _, number in every]


@pytest.mark.parametrize("parameters", [1, 2, 3])
def test_parameters_that_experts_use_in_turn_stay_until_the_layer_ends(parameters):
    forward = layers_of_experts(8, 6, parameters)
    step = [*forward, *reversed(forward)]
    chunks, capacity = 8 * parameters, 2 * parameters + 2
    history = AccessHistory()
    assert fetches(LeastRecentlyUsed(history), step, capacity, history=history) == 2 * chunks - capacity
    histories = AccessHistory(), AccessHistory()
    four, five = (fetches(ListOrder(h), forward, capacity, n, h) for n, h in zip((4, 5), histories, strict=True))
    assert five - four <= chunks - (capacity - parameters - 2), "what fits stays, except those of one layer"


@given(cases(), st.sets(st.integers(0, 9)), st.integers(-1, 9))
def test_an_order_is_a_permutation_of_the_candidates(case, candidates, now):
    _, accesses = case
    assert ListOrder().eviction_order(candidates, now) == sorted(candidates)
    policy = next_use(accesses)
    order = policy.eviction_order(iter(candidates), now)
    assert sorted(order) == sorted(candidates)
    keys = [(-policy.trace.next_use(chunk, now), chunk) for chunk in order]
    assert keys == sorted(keys)
