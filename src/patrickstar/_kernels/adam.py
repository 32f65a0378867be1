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
    """One update of Adam. `step` counts from 1; `decoupled` is AdamW's weight decay, else L2.

    The operations and their order are those of `torch.optim.AdamW` where PyTorch runs without fused multiply-adds:
    with `ATEN_CPU_CAPABILITY=default`, its fused kernel gives these bits. With AVX2 or AVX-512 PyTorch contracts some
    of them, and others at the end of a tensor.
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
        """Momentum and variance."""
        return (EXP_AVG, EXP_AVG_SQ)

    @property
    def mode(self) -> int:
        """0: no weight decay, 1: L2, 2: decoupled."""
        return 0 if self.weight_decay == 0 else 2 if self.decoupled else 1

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Decay, weight of the change, beta2, 1 - beta2, bias correction of v, eps, -step size, light or heavy."""
        weight = rounded(1 - self.beta1, dtype)
        light = weight < 0.5  # as `torch.lerp` does it: from the nearer end
        decay = 1 - self.lr * self.weight_decay if self.decoupled else self.weight_decay
        step_size = self.lr / (1 - self.beta1**self.step)
        correction = (1 - self.beta2**self.step) ** 0.5
        change = weight if light else weight - 1
        values = (decay, change, self.beta2, 1 - self.beta2, correction, self.eps, -step_size, float(light))
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """The list."""
        exp_avg, exp_avg_sq = states
        decay, weight1, beta2, weight2, correction2, eps, minus_step_size, light = self.scalars(master.dtype)
        if self.mode == 1:
            grad.add_(master * decay)
        if self.mode == 2:
            master.mul_(decay)
        change = (grad - exp_avg).mul_(weight1)
        torch.add(exp_avg if light else grad, change, out=exp_avg)
        exp_avg_sq.mul_(beta2).add_((grad * weight2).mul_(grad))
        # A tensor, since CUDA divides by a number by multiplying with its reciprocal.
        denominator = square_root(exp_avg_sq).div_(torch.full_like(exp_avg_sq, correction2)).add_(eps)
        master.add_((exp_avg * minus_step_size).div_(denominator))
