"""Lion."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from patrickstar._kernels.lion import LionRule
from patrickstar.optim.optimizer import Optimizer, below_one, not_negative


class Lion(Optimizer):
    """Lion, the evolved sign momentum (Chen et al. 2023): 10 bytes of model data per parameter."""

    lr: float = 1e-4
    """Learning rate. Default 1e-4."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Interpolation factor of the update, and decay rate of the momentum. Default (0.9, 0.99)."""
    weight_decay: float = 0.0
    """Decoupled weight decay coefficient. Default 0.0."""

    _checked = field_validator("lr", "weight_decay")(not_negative)
    _checked_betas = field_validator("betas")(below_one)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> LionRule:
        """Return the rule of one Lion update; see `Optimizer.rule`."""
        return LionRule(float(group["lr"]), group["betas"][0], group["betas"][1], group["weight_decay"])
