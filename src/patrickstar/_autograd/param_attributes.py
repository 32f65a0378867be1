"""Rules for reading and assigning `grad` and `data` of managed parameters."""

from typing import Any

import torch

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import ChunkParameter, ChunkView
from patrickstar.errors import ModelError, TrainingError


def check_gradient_read(managed: ManagedParam, tensor: torch.Tensor) -> None:
    """Raise TrainingError if the gradient of a parameter, or of a view of one, is stored in its chunk."""
    if managed.has_gradient and isinstance(tensor, ChunkParameter):
        raise TrainingError(
            f"the gradient of {managed.name!r} is stored in its chunk: read it with "
            f"engine.gradient({managed.name!r}), clip it with engine.clip_grad_norm_(max_norm), discard it with "
            f"optimizer.zero_grad()"
        )


def check_gradient_assigned(managed: ManagedParam, value: Any) -> None:
    """Raise TrainingError if a gradient other than None is assigned to a parameter."""
    if value is not None:
        raise TrainingError(
            f"the gradient of {managed.name!r} can't be assigned: optimizer.step() uses the gradients that "
            f"engine.backward(loss) computes. Change the loss instead"
        )


def is_own_data(managed: ManagedParam, value: torch.Tensor) -> bool:
    """Return whether assigned data are the parameter's own.

    Raises:
        ModelError: They have another dtype, shape or device than the parameter in its chunk.
    """
    chunk = managed.chunk
    if (
        isinstance(value, ChunkView | ChunkParameter)
        and value._managed_params == (managed,)
        and value.dtype == chunk.dtype
    ):
        return True
    if value.dtype != chunk.dtype or value.shape != managed.shape or value.device != chunk.device:
        raise ModelError(
            f"parameter {managed.name!r} is stored in a chunk with dtype {chunk.dtype} and shape {managed.shape} "
            f"on {chunk.device}; it can't be replaced by {value.dtype}, {tuple(value.shape)}, on {value.device}. "
            f"Set precision and device in ps.Config, or load engine.state_dict() into another model"
        )
    return False
