"""A survey of gradients before the update: the sum of their squares, and how many elements are not finite."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# [Note: sums in fixed order]
# A sum that any number of threads, or other hardware, may compute must say in which order it adds. Squares are taken in
# double precision, where that of a float is exact. A block of 4096 elements is 128 rows of 32 lanes: lanes add up row
# after row, each on its own, then halve: 16 to 16, 8 to 8, ... 1 to 1. The sums of a parameter's blocks are added as
# the rows of one more block, of as many rows as it takes; so are the sums of parameters. What a last row lacks is zero.

LANES = 32
ROWS = 128
BLOCK_NUMEL = ROWS * LANES


@dataclass(frozen=True)
class GradStats:
    """What a pass over gradients found: a sum of squares per parameter, and how many elements are NaN or infinite."""

    squares: tuple[float, ...] = ()
    not_finite: int = 0

    @classmethod
    def joined(cls, surveys: Iterable["GradStats"]) -> "GradStats":
        """One survey of what several found, in their order."""
        surveys = list(surveys)
        sums = tuple(one for grad_stats in surveys for one in grad_stats.squares)
        return cls(sums, sum(grad_stats.not_finite for grad_stats in surveys))

    @property
    def norm(self) -> float:
        """The global 2-norm."""
        total = float(fold(torch.tensor(self.squares, dtype=torch.float64, device="cpu")))
        return math.nan if math.isnan(total) else math.sqrt(total)


def block_sums(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each block of a flat tensor; float64."""
    squares = grad.to(torch.float64, copy=True).square_()
    whole = squares.numel() // BLOCK_NUMEL * BLOCK_NUMEL
    blocks = _add_rows(squares[:whole].view(-1, ROWS, LANES))
    return blocks if whole == squares.numel() else torch.cat([blocks, fold(squares[whole:])[None]])


def grad_stats_of_parts(parts: Iterable[torch.Tensor]) -> GradStats:
    """The survey of one gradient that comes in parts of any length, flat and in order."""
    blocks = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    rest, not_finite = torch.zeros(0, device="cpu"), 0
    for part in parts:
        not_finite += int((~part.isfinite()).sum())
        rest = torch.cat([rest.to(part), part])
        whole = rest.numel() // BLOCK_NUMEL * BLOCK_NUMEL
        blocks.append(block_sums(rest[:whole]))
        rest = rest[whole:].clone()
    if rest.numel():
        blocks.append(block_sums(rest))
    return GradStats((float(fold(torch.cat([block.cpu() for block in blocks]))),), not_finite)


def fold(values: torch.Tensor) -> torch.Tensor:
    """The sum of a flat float64 tensor, as the rows of one block."""
    rows = -(-values.numel() // LANES)
    padded = torch.nn.functional.pad(values, (0, rows * LANES - values.numel()))
    return _add_rows(padded.view(1, rows, LANES))[0]


def _add_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum of each block. `values`: blocks x rows x lanes."""
    lanes = torch.zeros(values.shape[0], LANES, dtype=torch.float64, device=values.device)
    for row in range(values.shape[1]):
        lanes += values[:, row]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes[:, 0]
