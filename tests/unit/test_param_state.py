"""Tensor state of a parameter: it follows from its uses and from what its payload is."""

import pytest

from patrickstar._params.param_state import ParamState
from patrickstar._schedule.tensor_state import TensorState
from patrickstar.errors import TrainingError

FREE, COMPUTE, HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
AFTER_FWD, AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD


def in_state(tensor: TensorState) -> ParamState:
    state = ParamState("layer.weight", hold=FREE if tensor is FREE else HOLD)
    if tensor in (COMPUTE, AFTER_FWD):
        state.begin_use()
    if tensor is AFTER_FWD:
        state.end_use(AFTER_FWD)
    if tensor is AFTER_BWD:
        state.overlay(1, 0)
    assert state.tensor is tensor
    return state


TRANSITIONS = {
    "an operator reads it": (HOLD, lambda state: state.begin_use(), COMPUTE),
    "the next operator reads it during forward": (AFTER_FWD, lambda state: state.begin_use(), COMPUTE),
    "a second operator reads it": (COMPUTE, lambda state: state.begin_use(), COMPUTE),
    "released in backward": (COMPUTE, lambda state: state.end_use(HOLD), HOLD),
    "released in forward": (COMPUTE, lambda state: state.end_use(AFTER_FWD), AFTER_FWD),
    "released in backward, overwritten": (COMPUTE, lambda state: (state.overlay(1, 0), state.end_use(HOLD)), AFTER_BWD),
    "its gradient is stored in its window": (COMPUTE, lambda state: state.overlay(1, 0), COMPUTE),
    "the forward is over": (AFTER_FWD, lambda state: state.end_forward(), HOLD),
    "the forward is over, and it is used": (COMPUTE, lambda state: state.end_forward(), COMPUTE),
    "its gradient is stored while no operator reads it": (HOLD, lambda state: state.overlay(1, 0), AFTER_BWD),
    "the same in a backward during forward": (AFTER_FWD, lambda state: state.overlay(1, 0), AFTER_BWD),
    "updated": (AFTER_BWD, lambda state: state.consume(), HOLD),
    "its gradient dropped": (AFTER_BWD, lambda state: state.remove_overlay(), HOLD),
    "an exception": (COMPUTE, lambda state: state.end_all_uses(), HOLD),
    "an exception after its gradient": (COMPUTE, lambda state: (state.overlay(1, 0), state.end_all_uses()), AFTER_BWD),
}


@pytest.mark.parametrize("event", TRANSITIONS)
def test_an_event_leads_to_the_next_state(event):
    before, happen, after = TRANSITIONS[event]
    state = in_state(before)
    happen(state)
    assert state.tensor is after


@pytest.mark.parametrize("tensor", [FREE, AFTER_BWD])
def test_a_gradient_or_nothing_is_never_read_as_a_parameter(tensor):
    with pytest.raises(TrainingError, match=rf"'layer\.weight'.*\b{tensor.name}\b.*\bCOMPUTE\b"):
        in_state(tensor).begin_use()
