"""What is stored: one NaN, and 16 bits rounded to nearest, whatever the machine."""

import numpy as np
import torch


def canonical_nan_(values: torch.Tensor) -> torch.Tensor:
    """Make every NaN the quiet one without payload, in place. See [Note: the same bits everywhere]."""
    return values.masked_fill_(values.isnan(), float("nan"))


def round_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` into `target` in its dtype, to nearest, ties to even."""
    # PyTorch's own conversion of a NaN to bfloat16 depends on the instruction set.
    canonical_nan_(target.copy_(values))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in a dtype: these themselves, if they have it."""
    if values.dtype is dtype:
        return values
    found = torch.empty_like(values, dtype=dtype)
    round_into(found, values)
    return found


def square_root(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root; `values` are not changed.

    On a CPU, PyTorch's own is the vector math library's, which is one unit in the last place off for one number in six.
    NumPy's is the processor's instruction.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    roots = values.detach().clone()  # a storage that NumPy has seen can't be resized any more, and a chunk's must be
    with np.errstate(invalid="ignore"):
        np.sqrt(roots.numpy(), out=roots.numpy())
    return roots
