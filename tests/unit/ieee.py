"""IEEE 754's operations in numpy, each rounded once: what the kernels' arithmetic is checked against."""

from functools import partial

import numpy as np
import torch

# [Note: rounding twice]
# An operation on float32 is computed in float64 and its result rounded to float32: two roundings, which give what one
# would. For + - * / and the square root that is so wherever the wider format has at least 2p + 2 digits, p being those
# of the narrower one (Figueroa 1995), and 53 >= 2 * 24 + 2: a result is never so near to the middle between two
# narrow numbers that the first rounding takes it there, unless it is there. A denormal result has fewer digits to be
# rounded to, which leaves more room.
assert np.finfo(np.float64).nmant + 1 >= 2 * (np.finfo(np.float32).nmant + 1) + 2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

_INFINITY, _ANY_NAN = 0x7F800000, (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FC12345)
SPECIAL = np.concatenate(
    [
        np.array([0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, _INFINITY], dtype=np.uint32).view(np.float32),
        # Denormals of bfloat16 and of float16, halves of the least ones (ties with zero), and what lies around them.
        np.float32([k * 2.0**-134 for k in (1, 2, 3, 5, 254, 255, 256)]),
        np.float32([k * 2.0**-25 for k in (0.9999999, 1, 1.0000001, 2, 3, 5, 2045, 2047, 2048)]),
        # Ties of 8 and of 11 digits, to the even number below and above, and numbers just beside them.
        np.float32([1 + k * 2.0**-8 + nudge for k in (1, 3) for nudge in (-(2.0**-23), 0, 2.0**-23)]),
        np.float32([1 + k * 2.0**-11 + nudge for k in (1, 3) for nudge in (-(2.0**-23), 0, 2.0**-23)]),
        # The ends of float16, of bfloat16, and what rounds to them or beyond.
        np.float32([65504, 65519.996, 65520, 65536, 1e6]),
        np.array([0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000], dtype=np.uint32).view(np.float32),
    ]
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL, np.array(_ANY_NAN, dtype=np.uint32).view(np.float32)])
"""Numbers of float32 that break arithmetic and conversions."""


def rounded(values: np.ndarray | float) -> np.ndarray:
    """Numbers of float64 as the nearest of float32."""
    with np.errstate(all="ignore"):
        return np.asarray(values, dtype=np.float64).astype(np.float32)


def _once(operation: np.ufunc, *values: np.ndarray) -> np.ndarray:
    """An operation on numbers of one format, its result rounded to that format."""
    (dtype,) = {value.dtype for value in values}
    with np.errstate(all="ignore"):
        result = operation(*(value.astype(np.float64) for value in values))
    return result if dtype == np.float64 else rounded(result)


add, subtract, multiply = (partial(_once, operation) for operation in (np.add, np.subtract, np.multiply))
divide, square_root = partial(_once, np.divide), partial(_once, np.sqrt)


def stored(values: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The bits of float32 numbers rounded to `dtype`, to nearest, ties to even; every NaN is the canonical one."""
    if values.dtype == np.uint8:
        return values
    if dtype == torch.float32:
        bits = values.view(np.uint32)
    elif dtype == torch.bfloat16:
        bits = (_short(values, digits=8, least=-133, largest=0x7F7F0000).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = _short(values, digits=11, least=-24, largest=0x477FE000).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), bits.dtype.type(CANONICAL_NAN[dtype]), bits)


def _short(values: np.ndarray, digits: int, least: int, largest: int) -> np.ndarray:
    """Numbers of so many digits, in float32: multiples of a power of two, whose exponent is at least `least`."""
    with np.errstate(all="ignore"):
        exact = values.astype(np.float64)
        finite = np.where(np.isfinite(exact), exact, 0)
        _, exponents = np.frexp(finite)
        unit = np.ldexp(1.0, np.maximum(exponents - digits, least))
        short = np.rint(finite / unit) * unit  # `rint` rounds ties to even, and all else here is exact
        too_large = np.abs(short) > np.uint32(largest).view(np.float32)
        short = np.where(too_large, np.inf, np.abs(short))
        return np.copysign(np.where(np.isfinite(exact), short, exact), exact).astype(np.float32)


def widened(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor of one of `DTYPES` in float32, by their bits."""
    if tensor.dtype == torch.float32:
        return tensor.numpy().copy()
    halves = bits_of(tensor)
    if tensor.dtype == torch.bfloat16:
        return (halves.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return halves.view(np.float16).astype(np.float32)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a flat tensor."""
    if tensor.dtype == torch.uint8:
        return tensor.numpy().copy()
    if tensor.dtype == torch.float32:
        return tensor.view(torch.int32).numpy().view(np.uint32).copy()
    return tensor.view(torch.int16).numpy().view(np.uint16).copy()


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these bits."""
    signed = np.int32 if dtype == torch.float32 else np.int16
    return torch.from_numpy(bits.view(signed).copy()).view(dtype)


def numbers(numel: int, random: np.random.Generator) -> np.ndarray:
    """Float32 of three kinds, in any order: any bits at all, what training meets, and special ones."""
    bits = random.integers(0, 1 << 32, numel, dtype=np.uint32).view(np.float32)
    usual = rounded(random.standard_normal(numel) * np.exp(4 * random.standard_normal(numel)))
    return np.choose(random.integers(0, 3, numel), [bits, usual, random.choice(SPECIAL, numel)])


def tensor(numel: int, dtype: torch.dtype, random: np.random.Generator) -> torch.Tensor:
    """Such numbers in `dtype`; of 16 bits, any bits at all as often as numbers that were rounded."""
    values = from_bits(stored(numbers(numel, random), dtype), dtype)
    if dtype == torch.float32:
        return values
    halves = from_bits(random.integers(0, 1 << 16, numel, dtype=np.uint16), dtype)
    return torch.where(torch.from_numpy(random.random(numel) < 0.5), values, halves)
