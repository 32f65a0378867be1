"""Adam, AdamW, and AdamW with states of 8 bits."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._layout.schema import EXP_AVG_8BIT, EXP_AVG_SQ_8BIT
from patrickstar.optim.optimizer import Optimizer, below_one, not_negative


class Adam(Optimizer):
    """Adam with L2 weight decay, as `torch.optim.Adam`: 14 bytes of model data per parameter."""

    lr: float = 1e-3
    """Learning rate. Default 1e-3."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the running averages of gradient and squared gradient. Default (0.9, 0.999)."""
    eps: float = 1e-8
    """Term added to the denominator. Default 1e-8."""
    weight_decay: float = 0.0
    """Weight decay coefficient. Default 0.0."""

    _checked = field_validator("lr", "eps", "weight_decay")(not_negative)
    _checked_betas = field_validator("betas")(below_one)

    @property
    def decoupled(self) -> bool:
        """True if weight decay is decoupled from the gradient, as in AdamW."""
        return False

    @property
    def splits_masters(self) -> bool:
        """True unless a state is a code, or the class is derived and has another rule."""
        return type(self) in (Adam, AdamW)

    def defaults(self) -> dict[str, Any]:
        """Return the default options, with those of torch's Adam, so that either can load the other's state."""
        off = dict(amsgrad=False, maximize=False, capturable=False, differentiable=False, foreach=None, fused=None)
        return super().defaults() | {"decoupled_weight_decay": self.decoupled} | off

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> AdamRule:
        """Return the rule of one Adam update; see `Optimizer.rule`."""
        return AdamRule(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            step=step,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: 14 bytes of model data per parameter."""

    weight_decay: float = 1e-2
    """Weight decay coefficient. Default 1e-2."""

    @property
    def decoupled(self) -> bool:
        """True if weight decay is decoupled from the gradient, as in AdamW."""
        return True


class AdamW8bit(AdamW):
    """AdamW whose two states have 8 bits each: 8 bytes of model data per parameter in place of 14.

    This is another algorithm than AdamW: it rounds its states to 256 values after each update, up or down at random,
    and the parameters differ from those of AdamW. Its own results are the same bits under any budget and for any number
    of processes. The states are codes of each element alone, unlike those of bitsandbytes, which have a scale for each
    block (see docs/update.md).
    """

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Dtypes of the states: one byte per element."""
        return dict.fromkeys((EXP_AVG_8BIT, EXP_AVG_SQ_8BIT), "uint8")

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> Adam8bitRule:
        """Return the rule of one update; see `Optimizer.rule`."""
        return Adam8bitRule(**vars(super().rule(group, step, memory)))
