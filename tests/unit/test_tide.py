"""Non-model data through a step, and what moves for its sake."""

from hypothesis import given, settings
from hypothesis import strategies as st
from patrickstar_v043.activation_curve import non_model_bytes, simulate_transfers

from patrickstar._perf_model.gpt_costs import Gpt

quick = settings(derandomize=True, deadline=None, max_examples=60)


@quick
@given(st.integers(1, 40), st.integers(1, 50))
def test_what_does_not_fit_is_fetched_twice_and_evicted_twice(chunks, room):
    moved = simulate_transfers([room] * (2 * chunks), chunks)
    assert moved.fetched == moved.evicted == 2 * max(0, chunks - room)
    # After backward it is the first that are there: they are the next to be used.
    assert moved.held == frozenset(range(min(chunks, room)))


@quick
@given(st.lists(st.integers(1, 10), min_size=2, max_size=20).filter(lambda rooms: len(rooms) % 2 == 0))
def test_what_is_fetched_is_evicted(rooms):
    moved = simulate_transfers(rooms, len(rooms) // 2)
    assert moved.fetched == moved.evicted
    assert len(moved.held) <= rooms[-1]


def test_the_tide_rises_in_forward_and_falls_in_backward():
    gpt = Gpt(20, 2048, 16, head=False)
    tide = non_model_bytes(gpt, 16, 10)
    assert tide[:10] == sorted(tide[:10]) and tide[10:] == sorted(tide[10:], reverse=True)
    assert tide[10] - tide[-1] == gpt.checkpoint_bytes(16) - gpt.checkpoint_bytes(16, 2)


def test_logits_count_at_the_turn_where_they_are_more_than_a_layer():
    with_head, without = (Gpt(2, 256, 4, vocab=500_000, head=head) for head in (True, False))
    high, low = non_model_bytes(with_head, 4, 5), non_model_bytes(without, 4, 5)
    assert high[5] == with_head.checkpoint_bytes(4) + with_head.logit_bytes(4) > low[5]
    assert high[:5] + high[6:] == low[:5] + low[6:]
