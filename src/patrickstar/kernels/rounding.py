"""What is stored: one NaN, and 16 bits rounded to nearest, whatever the machine."""

import torch


def canonical_nan_(values: torch.Tensor) -> torch.Tensor:
    """Make every NaN the quiet one without payload, in place. See [Note: the same bits everywhere]."""
    return values.masked_fill_(values.isnan(), float("nan"))


def round_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` into `target` in its dtype, to nearest, ties to even."""
    # PyTorch's own conversion of a NaN to bfloat16 depends on the instruction set.
    canonical_nan_(target.copy_(values))


def square_root(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root.

    On a CPU, PyTorch's own of float32 is the vector math library's, which is one unit in the last place off for one
    number in six. In double precision it is near enough to round to the right float32, always: the square root of a
    24-bit number is never as close as that to the middle between two others.
    """
    return values.to(torch.float64, copy=True).sqrt_().to(values.dtype)
