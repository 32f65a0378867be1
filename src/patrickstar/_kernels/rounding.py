"""Rounding of stored values that gives the same bits on every machine."""

import numpy as np
import torch


def canonical_nan_(values: torch.Tensor) -> torch.Tensor:
    """Replace every NaN by the quiet NaN without payload, in place. See [Note: bitwise-identical backends]."""
    return values.masked_fill_(values.isnan(), float("nan")) if values.is_floating_point() else values


def round_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Round `values` to the dtype of `target` (to nearest, ties to even) and store them there."""
    # PyTorch's own conversion of a NaN to bfloat16 depends on the instruction set.
    canonical_nan_(target.copy_(values))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values rounded to a dtype, or `values` itself if it already has that dtype."""
    if values.dtype is dtype:
        return values
    result = torch.empty_like(values, dtype=dtype)
    round_into(result, values)
    return result


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root as a new tensor.

    On a CPU, PyTorch calls a vector math library, whose result is wrong by one unit in the last place for one number in
    six. NumPy uses the processor's instruction.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    roots = values.detach().clone()  # a storage shared with NumPy can't be resized, and a chunk's must be
    with np.errstate(invalid="ignore"):
        np.sqrt(roots.numpy(), out=roots.numpy())
    return roots
