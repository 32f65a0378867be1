"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.rounding import square_root
from patrickstar._kernels.update_rule import Rule, rounded
from patrickstar._layout.schema import EXP_AVG, EXP_AVG_SQ


@dataclass(frozen=True)
class AdamRule(Rule):
    """One Adam update. `step` counts from 1; `decoupled` selects AdamW's weight decay instead of L2.

    The operations and their order are those of `torch.optim.AdamW` without fused multiply-adds: its fused kernel gives
    the same bits with `ATEN_CPU_CAPABILITY=default`. With AVX2 or AVX-512, PyTorch contracts some of the operations,
    and different ones at the end of a tensor.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    code: ClassVar = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        return (EXP_AVG, EXP_AVG_SQ)

    @property
    def mode(self) -> int:
        """Weight decay: 0 none, 1 L2, 2 decoupled."""
        return 0 if self.weight_decay == 0 else 2 if self.decoupled else 1

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return decay, interpolation weight, beta2, 1 - beta2, bias correction of v, eps, -step size, and `light`."""
        weight = rounded(1 - self.beta1, dtype)
        light = weight < 0.5  # `torch.lerp` also interpolates from the nearer end
        decay = 1 - self.lr * self.weight_decay if self.decoupled else self.weight_decay
        step_size = self.lr / (1 - self.beta1**self.step)
        correction = (1 - self.beta2**self.step) ** 0.5
        change = weight if light else weight - 1
        values = (decay, change, self.beta2, 1 - self.beta2, correction, self.eps, -step_size, float(light))
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        exp_avg, exp_avg_sq = states
        decay, weight1, beta2, weight2, correction2, eps, minus_step_size, light, *_ = self.scalars(master.dtype)
        if self.mode == 1:
            grad.add_(master * decay)
        if self.mode == 2:
            master.mul_(decay)
        change = (grad - exp_avg).mul_(weight1)
        torch.add(exp_avg if light else grad, change, out=exp_avg)
        exp_avg_sq.mul_(beta2).add_((grad * weight2).mul_(grad))
        # A tensor, because on CUDA division by a scalar multiplies by its reciprocal.
        denominator = square_root(exp_avg_sq).div_(torch.full_like(exp_avg_sq, correction2)).add_(eps)
        master.add_((exp_avg * minus_step_size).div_(denominator))
