"""Stochastic gradient descent with momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.update_rule import Rule, rounded

MOMENTUM_BUFFER = "momentum_buffer"


@dataclass(frozen=True)
class SGDRule(Rule):
    """One SGD update in the operation order of `torch.optim.SGD`. Step 1 copies the gradient to the momentum buffer."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int

    code: ClassVar = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        return (MOMENTUM_BUFFER,) if self.momentum else ()

    @property
    def mode(self) -> int:
        """Variant: 0 no momentum, 1 first step, 2 later steps, 3 and 4 the same with Nesterov momentum."""
        if self.momentum == 0:
            return 0
        return (1 if self.step == 1 else 2) + (2 if self.nesterov else 0)

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return decay, momentum, gradient weight, -lr, and 1 if there is weight decay."""
        values = (self.weight_decay, self.momentum, 1 - self.dampening, -self.lr, float(self.weight_decay != 0))
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        decay, momentum, weight, minus_lr, decays = self.scalars(master.dtype)
        if decays:
            grad.add_(master * decay)
        if self.mode:
            buffer = states[0]
            if self.step == 1:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad * weight)
            grad = grad.add_(buffer * momentum) if self.nesterov else buffer
        master.add_(grad * minus_lr)
