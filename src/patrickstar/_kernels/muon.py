"""Muon: momentum whose matrix is orthogonalized by Newton-Schulz iterations (Jordan et al. 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from patrickstar._kernels.sgd import MOMENTUM_BUFFER
from patrickstar._kernels.update_rule import Rule, interpolate_, rounded

AdjustLR = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True)
class MuonRule(Rule):
    """One Muon update of a matrix, with the operations of `torch.optim.Muon` without fused multiply-adds.

    The products of matrices run in bf16 on the compute device, wherever momentum and master are stored: so their bits
    do not depend on the tier. Only the 16-bit matrix is copied there and back.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    adjust_lr: AdjustLR | None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    device: torch.device | None = None

    by_pages: ClassVar = False
    needs_shape: ClassVar = True
    workspace_items: ClassVar = 3  # the gradient, and 16-bit matrices: two of the parameter's size, two square ones

    @property
    def kinds(self) -> tuple[str, ...]:
        return (MOMENTUM_BUFFER,)

    def for_param(self, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> "MuonRule":
        """Return the rule for one matrix; see `Rule.for_param`."""
        return replace(self, shape=shape, strides=strides, device=device)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        (buffer,) = states
        interpolate_(buffer, grad, 1 - self.momentum)
        update = interpolate_(grad, buffer, self.momentum) if self.nesterov else buffer
        matrix = update.as_strided(self.shape, self.strides)
        # A copy also where the update is in bf16 on the device already: it is scaled in place.
        matrix = matrix.to(torch.bfloat16, copy=True).to(self.device or master.device)
        matrix = orthogonalize(matrix, self.coefficients, self.steps, self.eps)
        direction = torch.empty_strided(self.shape, self.strides, dtype=master.dtype, device=master.device)
        direction.copy_(matrix)
        dtype = master.dtype
        master.mul_(rounded(1 - self.lr * self.weight_decay, dtype))
        flat = direction.as_strided((master.numel(),), (1,))
        master.add_(flat.mul_(rounded(-self.lr * self._lr_factor, dtype)))

    @property
    def _lr_factor(self) -> float:
        """Factor of the learning rate, so that updates of wide and of tall matrices have equal norms."""
        rows, columns = self.shape
        if self.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return the matrix with its singular values near 1, by Newton-Schulz iterations of fifth order.

    Args:
        matrix: Matrix in bf16, which is overwritten.
        coefficients: Those of the polynomial.
        steps: Number of iterations.
        eps: Lower bound of the norm that the matrix is divided by.

    Returns:
        A matrix of the same shape and dtype.
    """
    first, second, third = coefficients
    tall = matrix.size(0) > matrix.size(1)
    if tall:
        matrix = matrix.T
    matrix.div_(matrix.norm().clamp(min=eps))
    for _ in range(steps):
        gram = matrix @ matrix.T
        gram = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        matrix = torch.addmm(matrix, gram, matrix, beta=first)
    return matrix.T if tall else matrix
