"""AdamW with states of 8 bits per element."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.rounding import canonical_nan_
from patrickstar._layout.schema import EXP_AVG_8BIT, EXP_AVG_SQ_8BIT

# [Note: 8-bit states]
# bitsandbytes (Dettmers et al. 2022) divides a state by the largest magnitude of its block of 256 elements and rounds
# to the nearest of 256 numbers. A block would have to be whole wherever a parameter is cut (pages, shards, meshes), and
# its scale would need a list of its own. Here each element has a code that depends on nothing else:
#
# - v has 6 bits of exponent and 2 of mantissa, from 2**-52 to 14336: its root begins near Adam's epsilon.
# - m is stored as its ratio to the largest power of two that is not above the root of the stored v, its natural scale:
#   |m| <= 7.3 sqrt(v) with the default decay rates. The ratio has a sign, 4 bits of exponent and 3 of mantissa, from
#   2**-15 to 15.
#
# Rounding to nearest would lose changes of v, a thousandth of it per step, while codes differ by up to a quarter. So it
# is stochastic: up or down, such that the mean is exact. The random bits are a hash of the step and of the new
# master, so they are the same on each tier, in each page and process.
#
# A code is the upper part of a float32's bits. An offset is added first: its own code is 0, and differences between
# codes near 0 are equal, as those of denormal numbers.

SQUARE_OFFSET, RATIO_OFFSET = 2.0**-50, 2.0**-12
SQUARE_WORD, RATIO_WORD = (127 - 50) << 23, (127 - 12) << 23
"""Bits of the offsets as float32."""
SQUARE_SHIFT, RATIO_SHIFT = 21, 20
ROOT_SHIFT, LEAST_ROOT, ONE = 3, 25, 127
"""The scale of m is 2**((code of v >> ROOT_SHIFT) - LEAST_ROOT); ONE is the exponent of 1 in a float32."""
INFINITE = 0x7F800000
GOLDEN = 0x9E3779B1
"""2**32 divided by the golden ratio: its multiples are spread evenly."""


@dataclass(frozen=True)
class Adam8bitRule(AdamRule):
    """One update of AdamW between decoding its states and encoding them. See [Note: 8-bit states]."""

    code: ClassVar = 4
    workspace_items: ClassVar = 9

    @property
    def kinds(self) -> tuple[str, ...]:
        return (EXP_AVG_8BIT, EXP_AVG_SQ_8BIT)

    @property
    def seed(self) -> int:
        """24 bits of the step for the hash: as many as a float32 stores exactly."""
        return (self.step * GOLDEN >> 8) & 0xFFFFFF

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return the scalars of `AdamRule`, and the seed."""
        return (*super().scalars(dtype), float(self.seed))

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        ratios, squares = states
        exp_avg_sq = square_of(squares)
        exp_avg = ratio_of(ratios & 127).mul_(scale_of(squares))
        exp_avg = torch.where(ratios > 127, -exp_avg, exp_avg)
        values = exp_avg.to(master.dtype), exp_avg_sq.to(master.dtype)
        super().apply(master, grad, values)
        exp_avg, exp_avg_sq = (value.float() for value in values)
        hashes = hash_of(canonical_nan_(master).float(), self.seed)
        random = hashes & ((1 << SQUARE_SHIFT) - 1)
        squares.copy_(to_codes(exp_avg_sq + SQUARE_OFFSET, SQUARE_WORD, random, SQUARE_SHIFT).clamp_(max=255))
        ratio = exp_avg.abs().mul_(scale_of(squares, -1)).add_(RATIO_OFFSET)
        random = shifted(hashes * signed(GOLDEN), 32 - RATIO_SHIFT)
        codes = to_codes(ratio, RATIO_WORD, random, RATIO_SHIFT).clamp_(max=127)
        ratios.copy_(codes.add_(exp_avg < 0, alpha=128))


def square_of(codes: torch.Tensor) -> torch.Tensor:
    """Decode v."""
    return (codes.int() << SQUARE_SHIFT).add_(SQUARE_WORD).view(torch.float32).sub_(SQUARE_OFFSET)


def ratio_of(codes: torch.Tensor) -> torch.Tensor:
    """Decode the ratio of |m| to its scale."""
    return (codes.int() << RATIO_SHIFT).add_(RATIO_WORD).view(torch.float32).sub_(RATIO_OFFSET)


def scale_of(squares: torch.Tensor, power: int = 1) -> torch.Tensor:
    """Return the scale of m for codes of v, or its inverse (`power` -1)."""
    exponents = (squares.int() >> ROOT_SHIFT).sub_(LEAST_ROOT).mul_(power).add_(ONE)
    return exponents.bitwise_left_shift_(23).view(torch.float32)


def to_codes(values: torch.Tensor, offset_word: int, random: torch.Tensor, shift: int) -> torch.Tensor:
    """Round values, to which the offset was added, to codes that may be too large. NaN becomes infinite."""
    words = (values.view(torch.int32) & 0x7FFFFFFF).clamp_(max=INFINITE)
    return words.sub_(offset_word).add_(random).bitwise_right_shift_(shift)


def signed(word: int) -> int:
    """Return the number that has these 32 bits as a signed integer."""
    return word - (1 << 32) if word >= 1 << 31 else word


def shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift 32-bit words to the right, with zeros from the left."""
    return (words >> shift) & ((1 << (32 - shift)) - 1)


def hash_of(masters: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 32 random bits for each element of a flat float32 tensor."""
    words = masters.view(torch.int32) ^ signed(seed << 8)
    words = (words ^ shifted(words, 16)) * 0x7FEB352D
    words = (words ^ shifted(words, 15)) * signed(0x846CA68B)
    return words ^ shifted(words, 16)
