"""Stochastic gradient descent with momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.update_rule import Rule, rounded

MOMENTUM_BUFFER = "momentum_buffer"


@dataclass(frozen=True)
class SGDRule(Rule):
    """One update of SGD, as `torch.optim.SGD` orders it. `step` counts from 1: the first gradient fills the buffer."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int

    code: ClassVar = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return (MOMENTUM_BUFFER,) if self.momentum else ()

    @property
    def mode(self) -> int:
        """0: no momentum, 1: the first step, 2: a later one; 3 and 4: these two with Nesterov's momentum."""
        if self.momentum == 0:
            return 0
        return (1 if self.step == 1 else 2) + (2 if self.nesterov else 0)

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Decay, momentum, weight of the gradient, -lr, whether there is decay."""
        values = (self.weight_decay, self.momentum, 1 - self.dampening, -self.lr, float(self.weight_decay != 0))
        return tuple(rounded(value, dtype) for value in values)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """The list."""
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
