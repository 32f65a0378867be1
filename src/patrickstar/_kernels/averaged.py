"""Exponential moving average of the masters, in the pass of another rule's update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from patrickstar._kernels.update_rule import Rule, interpolate_
from patrickstar._layout.schema import EMA


@dataclass(frozen=True)
class AveragedRule(Rule):
    """An update by `inner`, after which the state `ema` moves towards the master by the fraction `weight`.

    The operations are those of `torch.lerp` without fused multiply-adds. With weight 1 the average is the master.
    """

    inner: Rule
    weight: float

    @property
    def code(self) -> int | None:  # type: ignore[override]
        """Identifier of the inner rule. The C++ backend averages in the same pass, the Triton backend does not."""
        return self.inner.code

    @property
    def by_pages(self) -> bool:  # type: ignore[override]
        """True if the inner rule works on pieces of a parameter."""
        return self.inner.by_pages

    @property
    def needs_shape(self) -> bool:  # type: ignore[override]
        """True if the inner rule needs whole parameters."""
        return self.inner.needs_shape

    def for_param(self, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> "AveragedRule":
        """Return the rule for one parameter; see `Rule.for_param`."""
        return replace(self, inner=self.inner.for_param(shape, strides, device))

    @property
    def kinds(self) -> tuple[str, ...]:
        """States of the inner rule, and `ema`."""
        return (*self.inner.kinds, EMA)

    @property
    def mode(self) -> int:
        """Variant of the inner rule."""
        return self.inner.mode

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return the scalars of the inner rule."""
        return self.inner.scalars(dtype)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        self.inner.apply(master, grad, states[:-1])
        interpolate_(states[-1], master, self.weight)
