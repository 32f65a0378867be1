"""Schedule-free AdamW."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from patrickstar._kernels.schedule_free import ScheduleFreeRule, Z
from patrickstar.optim.optimizer import Optimizer, below_one, not_negative


class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024), as `schedulefree.AdamWScheduleFree`: 14 bytes per parameter.

    It needs no schedule of the learning rate. Evaluate and export in `engine.averaged()`, which exchanges the
    parameters at which gradients are computed for their average, as that class does in `eval()` and `train()`.
    Steps are counted for each parameter: one that got no gradient in a step does not count it.
    """

    lr: float = 2.5e-3
    """Learning rate. Default 2.5e-3."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Interpolation factor between the plain steps and their average, and decay rate of the squared gradient. Default
    (0.9, 0.999)."""
    eps: float = 1e-8
    """Term added to the denominator. Default 1e-8."""
    weight_decay: float = 0.0
    """Weight decay coefficient. Default 0.0."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the learning rate grows linearly. Default 0."""
    r: float = 0.0
    """Power of the step number in the weights of the average. Default 0.0."""
    weight_lr_power: float = 2.0
    """Power of the learning rate in the weights of the average. Default 2.0."""

    _checked = field_validator("lr", "eps", "weight_decay", "weight_lr_power")(not_negative)

    @field_validator("betas")
    @classmethod
    def _interpolates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] == 0:
            raise ValueError(f"the first must be above 0, since the average is computed by dividing by it, got {value}")
        return below_one(value)

    def average_weights(self, group: Mapping[str, Any]) -> tuple[str, float, float] | None:
        """Return the weights of z that turn the parameters into their average, and back."""
        beta1 = group["betas"][0]
        return Z, 1 - 1 / beta1, 1 - beta1

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> ScheduleFreeRule:
        """Return the rule of one update; see `Optimizer.rule`. A second call for the same step returns the same."""
        warmup = group["warmup_steps"]
        lr = float(group["lr"]) * (step / warmup if step - 1 < warmup else 1.0)
        # Largest learning rate and sum of weights before the step and after it.
        largest, total = memory["before"] if memory.get("counted") == step else memory.get("after", (-1.0, 0.0))
        new_largest = max(lr, largest)
        weight = step ** group["r"] * new_largest ** group["weight_lr_power"]
        new_total = total + weight
        memory |= {"counted": step, "before": (largest, total), "after": (new_largest, new_total)}
        return ScheduleFreeRule(
            lr=lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            weight=weight / new_total if new_total else 0.0,
            step=step,
        )
