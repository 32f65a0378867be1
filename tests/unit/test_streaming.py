"""The policy of repeated forwards moves what exceeds the budget, in each pass, and fetches before the use."""

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, PrefetchPolicy, StreamingPrefetch
from patrickstar._schedule.trace import Moment, Trace


def passes(policy: PrefetchPolicy, count: int) -> list[tuple[int, int]]:
    """Follow passes with transfers that end at once; return fetched bytes and fetches on demand of each pass."""
    present: set[int] = set()
    figures = []
    for _ in range(count):
        fetched = late = 0
        for now, moment in enumerate(policy.trace.moments):
            room = policy.budget_bytes - moment.non_model_bytes
            for chunk in moment.chunks:
                if chunk in present:
                    continue
                order = policy.eviction_order(present - set(moment.chunks), now)
                while size(policy, present) + policy.nbytes[chunk] > room:
                    present.remove(order.pop(0))
                present.add(chunk)
                late, fetched = late + 1, fetched + policy.nbytes[chunk]
            while size(policy, present) > room:
                present.remove(policy.eviction_order(present - set(moment.chunks), now)[0])
            for move in policy.prefetches(now, present, set(moment.chunks), policy.budget_bytes):
                assert not set(move.evict) & set(moment.chunks), "an operator reads it"
                present.difference_update(move.evict)
                assert move.fetch not in present
                present.add(move.fetch)
                fetched += policy.nbytes[move.fetch]
            assert size(policy, present) <= max(room, sum(policy.nbytes[chunk] for chunk in moment.chunks))
        figures.append((fetched, late))
    return figures


def size(policy: PrefetchPolicy, chunks: set[int]) -> int:
    return sum(policy.nbytes[chunk] for chunk in chunks)


def layer_by_layer(layers: int, operator_bytes: int = 0) -> Trace:
    """Return the trace of a forward: an operator reads a chunk, and ends."""
    moments = [part for layer in range(layers) for part in (Moment((layer,), operator_bytes), Moment((), 0))]
    return Trace(moments)


def test_a_pass_moves_what_exceeds_the_budget_and_chunks_that_are_used_twice_stay():
    trace, nbytes = layer_by_layer(20), dict.fromkeys(range(20), 10)
    fetched, late = passes(StreamingPrefetch(trace, nbytes, 120), 4)[-1]
    assert (fetched, late) == (10 * (20 - 12 + 2), 0)
    every, _ = passes(AggressivePrefetch(trace, nbytes, 120), 4)[-1]
    assert every == 10 * 20, "the policy of steps replaces every chunk"
    trace = Trace([*layer_by_layer(20).moments, Moment((0,)), Moment(())])
    policy = StreamingPrefetch(trace, dict.fromkeys(range(20), 10), 50)
    assert policy.resident == {0, 1, 2}


@settings(max_examples=draws(100), deadline=None)
@given(st.data())
def test_any_sizes_and_budget(data):
    count = data.draw(st.integers(1, 12))
    nbytes = {chunk: data.draw(st.integers(1, 20)) for chunk in range(count)}
    chunks_of = st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True)
    operators = data.draw(st.lists(chunks_of, min_size=1))
    moments = []
    for chunks in operators:
        moments += [Moment(tuple(chunks), data.draw(st.integers(0, 10))), Moment(())]
    trace = Trace(moments)
    together = max(sum(nbytes[chunk] for chunk in moment.chunks) for moment in moments)
    most = max(moment.non_model_bytes for moment in moments)
    budget = most + together + data.draw(st.integers(0, 150))
    policy = StreamingPrefetch(trace, nbytes, budget)
    figures = passes(policy, 4)
    total = sum(nbytes[chunk] for chunk in trace.uses)
    assert sum(nbytes[chunk] for chunk in policy.resident) <= max(0, budget - most - 2 * together)
    if budget - most >= total:
        assert figures[-1] == (0, 0)
    if all(len(uses) == 1 for uses in trace.uses.values()):
        assert figures[-1][0] <= total - sum(nbytes[chunk] for chunk in policy.resident)
