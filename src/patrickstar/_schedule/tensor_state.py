"""Tensor states and the chunk state that follows from them (PatrickStar §6.2, Table 1, Figure 7)."""

from collections.abc import Iterable
from enum import Enum

from patrickstar.errors import TrainingError


class TensorState(Enum):
    """What a parameter's payload is being used for. The last three are hold-like: the payload matters, nobody reads."""

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold after forward"
    HOLD_AFTER_BWD = "hold after backward"


HOLD_LIKE = frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD})

_S = TensorState
LEGAL = {
    _S.FREE: {_S.HOLD},
    # A use ends in the hold state of its phase; in backward it may also end with the gradient in place.
    _S.COMPUTE: {_S.HOLD, _S.HOLD_AFTER_FWD, _S.HOLD_AFTER_BWD},
    _S.HOLD: {_S.COMPUTE, _S.HOLD_AFTER_BWD, _S.FREE},
    _S.HOLD_AFTER_FWD: {_S.COMPUTE, _S.HOLD, _S.HOLD_AFTER_BWD, _S.FREE},
    # Only the update, or giving the gradient up, turns a gradient back into a parameter; no operator may read it.
    _S.HOLD_AFTER_BWD: {_S.HOLD, _S.FREE},
}


def check_transition(name: str, old: TensorState, new: TensorState) -> None:
    """Raise TrainingError when parameter `name` may not go from `old` to `new`."""
    if new not in LEGAL[old]:
        raise TrainingError(f"parameter {name!r} can't go from state {old.name} to {new.name}")


def chunk_state(states: Iterable[TensorState]) -> TensorState:
    """The state of a chunk whose tensors have these states.

    COMPUTE if any tensor is in use, FREE if all are free; HOLD_AFTER_FWD or HOLD_AFTER_BWD once all tensors that are
    not free have got there; HOLD otherwise.
    """
    seen = set(states)
    if TensorState.COMPUTE in seen:
        return TensorState.COMPUTE
    seen.discard(TensorState.FREE)
    if not seen:
        return TensorState.FREE
    return seen.pop() if len(seen) == 1 else TensorState.HOLD
