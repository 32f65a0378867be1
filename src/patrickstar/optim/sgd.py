"""Stochastic gradient descent."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from patrickstar._kernels.sgd import SGDRule
from patrickstar.optim.optimizer import Optimizer, not_negative


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`: 6 bytes of model data per parameter, 10 with momentum."""

    lr: float = 1e-3
    """Learning rate. Default 1e-3."""
    momentum: float = 0.0
    """Momentum factor. Default 0.0: no momentum."""
    dampening: float = 0.0
    """Dampening of the momentum. Default 0.0."""
    weight_decay: float = 0.0
    """L2 weight decay coefficient. Default 0.0."""
    nesterov: bool = False
    """Use Nesterov momentum, which needs momentum and no dampening. Default False."""

    _checked = field_validator("lr", "momentum", "weight_decay")(not_negative)

    @property
    def needs_count(self) -> bool:
        """Always False: only the first step differs, and torch's SGD saves no step count."""
        return False

    @model_validator(mode="after")
    def _nesterov(self) -> "SGD":
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov=True needs momentum, and dampening=0")
        return self

    def defaults(self) -> dict[str, Any]:
        """Return the default options, with those of torch's SGD."""
        return super().defaults() | dict(maximize=False, foreach=None, differentiable=False, fused=None)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> SGDRule:
        """Return the rule of one SGD update; see `Optimizer.rule`."""
        return SGDRule(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            step=step,
        )
