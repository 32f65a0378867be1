"""Lion, the evolved sign momentum (Chen et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.update_rule import Rule, rounded
from patrickstar._layout.schema import EXP_AVG


@dataclass(frozen=True)
class LionRule(Rule):
    """One Lion update with decoupled weight decay."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    code: ClassVar = 2

    @property
    def kinds(self) -> tuple[str, ...]:
        return (EXP_AVG,)

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return decay, beta1, 1 - beta1, beta2, 1 - beta2 and -lr."""
        decay = 1 - self.lr * self.weight_decay
        values = (decay, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, -self.lr)
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        (exp_avg,) = states
        decay, beta1, weight1, beta2, weight2, minus_lr = self.scalars(master.dtype)
        direction = (exp_avg * beta1).add_(grad * weight1)
        # `torch.sign` would turn a NaN into 0.
        zero_or_nan = direction * 0
        sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, zero_or_nan))
        master.mul_(decay).add_(sign.mul_(minus_lr))
        exp_avg.mul_(beta2).add_(grad.mul_(weight2))
