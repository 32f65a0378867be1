"""Linear interpolation with the operations of `torch.lerp`, and no fused multiply-add."""

import torch

from patrickstar._kernels.update_rule import rounded


def interpolate_(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Move `start` towards `end` by the fraction `weight`, in place, and return it.

    Args:
        start: Values to be moved.
        end: Values of the same shape and dtype.
        weight: Fraction, rounded to the dtype. From 1/2 on, the result is computed from the nearer end, as `torch.lerp`
            does.
    """
    weight = rounded(weight, start.dtype)
    if weight == 1.0:
        return start.copy_(end)
    if abs(weight) < 0.5:
        return start.add_((end - start).mul_(weight))
    return torch.add(end, (end - start).mul_(rounded(weight - 1.0, start.dtype)), out=start)
