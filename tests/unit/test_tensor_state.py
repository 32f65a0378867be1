"""Tensor states: legal and illegal transitions, and the chunk state of Table 1."""

from contextlib import nullcontext
from itertools import combinations_with_replacement, product

import pytest

from patrickstar._params.param_state import ParamState
from patrickstar._schedule.tensor_state import HOLD_LIKE, TensorState, chunk_state
from patrickstar.errors import TrainingError

FREE, COMPUTE, HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
AFTER_FWD, AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD

LEGAL = {
    (FREE, HOLD): "the payload is stored",
    (HOLD, COMPUTE): "an operator reads it",
    (AFTER_FWD, COMPUTE): "the next operator reads it during forward",
    (COMPUTE, HOLD): "released outside an iteration",
    (COMPUTE, AFTER_FWD): "released in forward",
    (COMPUTE, AFTER_BWD): "released in backward, overwritten by its gradient",
    (AFTER_FWD, HOLD): "the forward is over",
    (HOLD, AFTER_BWD): "its gradient is stored while no operator reads it",
    (AFTER_FWD, AFTER_BWD): "the same in a backward during forward",
    (AFTER_BWD, HOLD): "updated, or its gradient dropped",
    (HOLD, FREE): "freed",
    (AFTER_FWD, FREE): "freed",
    (AFTER_BWD, FREE): "freed",
}


@pytest.mark.parametrize(("old", "new"), list(product(TensorState, repeat=2)))
def test_a_legal_transition_passes_and_another_names_the_parameter_and_both_states(old, new):
    refused = pytest.raises(TrainingError, match=rf"'layer\.weight'.*\b{old.name}\b.*\b{new.name}\b")
    state = ParamState("layer.weight", old)
    with nullcontext() if old is new or (old, new) in LEGAL else refused:
        state._move_to(new)
    assert state.tensor is (new if (old, new) in LEGAL else old)


def test_hold_like_states_are_the_three_whose_payload_is_needed_but_not_read():
    assert set(TensorState) - {FREE, COMPUTE} == HOLD_LIKE


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
