"""Tensor states, and the chunk state that follows from them (PatrickStar §6.2, Table 1, Figure 7)."""

from collections.abc import Iterable
from enum import Enum


class TensorState(Enum):
    """Use of a parameter's payload. In the last three states (hold-like) it is needed but no operator reads it."""

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold after forward"
    HOLD_AFTER_BWD = "hold after backward"


def chunk_state(states: Iterable[TensorState]) -> TensorState:
    """Return the state of a chunk whose tensors have these states.

    COMPUTE if any tensor is in use, FREE if all are free, HOLD_AFTER_FWD or HOLD_AFTER_BWD if all tensors that are not
    free are in that state, HOLD otherwise.
    """
    seen = set(states)
    if TensorState.COMPUTE in seen:
        return TensorState.COMPUTE
    seen.discard(TensorState.FREE)
    if not seen:
        return TensorState.FREE
    return seen.pop() if len(seen) == 1 else TensorState.HOLD
