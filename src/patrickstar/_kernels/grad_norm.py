"""Gradient statistics before the update: sums of squares and the number of non-finite elements."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# [Note: sums in fixed order]
# Any number of threads and any hardware must get the same sum, so the order of additions is fixed. Squares are computed
# in double precision, where the square of a float is exact. A block of 4096 elements is 128 rows of 32 lanes. Each lane
# adds its elements row by row; then the lanes are halved: 16 are added to 16, 8 to 8, ... 1 to 1. The sums of a
# parameter's blocks are added as the rows of one more block, with as many rows as needed, and so are the sums of the
# parameters. An incomplete last row is padded with zeros.

LANES = 32
ROWS = 128
BLOCK_NUMEL = ROWS * LANES


@dataclass(frozen=True)
class GradStats:
    """Sum of squares per parameter, and the number of elements that are NaN or infinite."""

    squares: tuple[float, ...] = ()
    not_finite: int = 0

    @classmethod
    def merge(cls, parts: Iterable["GradStats"]) -> "GradStats":
        """Concatenate the statistics of several groups of parameters."""
        parts = list(parts)
        squares = tuple(square for part in parts for square in part.squares)
        return cls(squares, sum(part.not_finite for part in parts))

    @property
    def norm(self) -> float:
        """Global 2-norm."""
        total = float(fold(torch.tensor(self.squares, dtype=torch.float64, device="cpu")))
        return math.nan if math.isnan(total) else math.sqrt(total)


def block_sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block of a flat tensor, in float64."""
    squares = grad.to(torch.float64, copy=True).square_()
    whole = squares.numel() // BLOCK_NUMEL * BLOCK_NUMEL
    blocks = _add_rows(squares[:whole].view(-1, ROWS, LANES))
    return blocks if whole == squares.numel() else torch.cat([blocks, fold(squares[whole:])[None]])


def grad_stats_of_parts(parts: Iterable[torch.Tensor]) -> GradStats:
    """Return the statistics of one gradient, given as consecutive flat parts of any length."""
    blocks = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    remainder, not_finite = torch.zeros(0, device="cpu"), 0
    for part in parts:
        not_finite += int((~part.isfinite()).sum())
        remainder = torch.cat([remainder.to(part), part])
        whole = remainder.numel() // BLOCK_NUMEL * BLOCK_NUMEL
        blocks.append(block_sums(remainder[:whole]))
        remainder = remainder[whole:].clone()
    if remainder.numel():
        blocks.append(block_sums(remainder))
    return GradStats((float(fold(torch.cat([block.cpu() for block in blocks]))),), not_finite)


def fold(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a flat float64 tensor, added as the rows of one block."""
    rows = -(-values.numel() // LANES)
    padded = torch.nn.functional.pad(values, (0, rows * LANES - values.numel()))
    return _add_rows(padded.view(1, rows, LANES))[0]


def _add_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block. `values` has the shape (blocks, rows, lanes)."""
    lanes = torch.zeros(values.shape[0], LANES, dtype=torch.float64, device=values.device)
    for row in range(values.shape[1]):
        lanes += values[:, row]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes[:, 0]
