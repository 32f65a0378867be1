"""Chunk states that follow from tensor states, by Table 1."""

from itertools import combinations_with_replacement

import pytest

from patrickstar._schedule.tensor_state import TensorState, chunk_state

FREE, COMPUTE, HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
AFTER_FWD, AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD


def table_1(states: tuple[TensorState, ...]) -> TensorState:
    """Return the chunk state according to Table 1, from counts of tensors."""
    count = {state: states.count(state) for state in TensorState}
    holding = len(states) - count[FREE] - count[COMPUTE]
    if count[COMPUTE] > 0:
        return COMPUTE
    if holding == 0:
        return FREE
    if count[AFTER_FWD] == holding:
        return AFTER_FWD
    if count[AFTER_BWD] == holding:
        return AFTER_BWD
    return HOLD


@pytest.mark.parametrize("tensors", range(5))
def test_a_chunks_state_follows_table_1(tensors):
    for states in combinations_with_replacement(TensorState, tensors):
        assert chunk_state(states) is table_1(states), states
        assert chunk_state(reversed(states)) is table_1(states), "the order of tensors mattered"
