"""Schedule-free AdamW (Defazio et al. 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.rounding import square_root
from patrickstar._kernels.update_rule import Rule, rounded
from patrickstar._layout.schema import EXP_AVG_SQ

Z = "z"
"""State: the sequence of the plain steps, from which the average is computed."""


@dataclass(frozen=True)
class ScheduleFreeRule(Rule):
    """One update, with the operations of `schedulefree.AdamWScheduleFree` without fused multiply-adds.

    The master is the paper's y, at which gradients are computed. `weight` is the share of the state z in the average.
    Step 1 copies the master to z.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    weight: float
    step: int

    code: ClassVar = 3

    @property
    def kinds(self) -> tuple[str, ...]:
        return (Z, EXP_AVG_SQ)

    @property
    def mode(self) -> int:
        """Variant: the sum of 1 with weight decay, 2 if `weight` is below 1/2, and 4 in the first step."""
        return (self.weight_decay != 0) + 2 * (rounded(self.weight, torch.float32) < 0.5) + 4 * (self.step == 1)

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return decay, beta2, 1 - beta2, bias correction, eps, interpolation weight, step of y, and -lr."""
        weight = rounded(self.weight, dtype)
        values = (
            self.weight_decay,
            self.beta2,
            1 - self.beta2,
            1 - self.beta2**self.step,
            self.eps,
            weight if self.mode & 2 else weight - 1,
            self.lr * (self.beta1 * (1 - self.weight) - 1),
            -self.lr,
        )
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        z, exp_avg_sq = states
        decay, beta2, weight2, correction2, eps, change, step_of_y, minus_lr = self.scalars(master.dtype)
        if self.mode & 4:
            z.copy_(master)
        exp_avg_sq.mul_(beta2).add_((grad * weight2).mul_(grad))
        # A tensor, because on CUDA division by a scalar multiplies by its reciprocal.
        direction = grad.div_(square_root(exp_avg_sq / torch.full_like(exp_avg_sq, correction2)).add_(eps))
        if self.mode & 1:
            direction.add_(master * decay)
        moved = (z - master).mul_(change)
        torch.add(master if self.mode & 2 else z, moved, out=master)
        master.add_(direction * step_of_y)
        z.add_(direction * minus_lr)
