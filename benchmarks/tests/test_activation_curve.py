"""Activation curve: non-model data over a step, and the transfers that it causes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from patrickstar_v043.activation_curve import non_model_bytes, simulate_transfers

from patrickstar._perf_model.gpt_costs import Gpt

quick = settings(derandomize=True, deadline=None, max_examples=60)


@quick
@given(st.integers(1, 40), st.integers(1, 50))
def test_chunks_that_do_not_fit_are_fetched_and_evicted_twice(chunks, capacity):
    transfers = simulate_transfers([capacity] * (2 * chunks), chunks)
    assert transfers.fetched == transfers.evicted == 2 * max(0, chunks - capacity)
    # After backward the first chunks are held: they are used next.
    assert transfers.held == frozenset(range(min(chunks, capacity)))


@quick
@given(st.lists(st.integers(1, 10), min_size=2, max_size=20).filter(lambda capacities: len(capacities) % 2 == 0))
def test_fetches_equal_evictions(capacities):
    transfers = simulate_transfers(capacities, len(capacities) // 2)
    assert transfers.fetched == transfers.evicted
    assert len(transfers.held) <= capacities[-1]


def test_non_model_data_grows_in_forward_and_shrinks_in_backward():
    gpt = Gpt(20, 2048, 16, head=False)
    curve = non_model_bytes(gpt, 16, 10)
    assert curve[:10] == sorted(curve[:10]) and curve[10:] == sorted(curve[10:], reverse=True)
    assert curve[10] - curve[-1] == gpt.checkpoint_bytes(16) - gpt.checkpoint_bytes(16, 2)


def test_logits_count_between_forward_and_backward_if_larger_than_a_layer():
    with_head, without = (Gpt(2, 256, 4, vocab=500_000, head=head) for head in (True, False))
    high, low = non_model_bytes(with_head, 4, 5), non_model_bytes(without, 4, 5)
    assert high[5] == with_head.checkpoint_bytes(4) + with_head.logit_bytes(4) > low[5]
    assert high[:5] + high[6:] == low[:5] + low[6:]
