"""Rounding of stored values: 16 bits to nearest, ties to even, one NaN; and a square root without an error."""

import ieee
import numpy as np
import pytest
import torch

from patrickstar._kernels.rounding import canonical_nan_, round_into, square_root

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = (torch.bfloat16, torch.float16)


def rounded_into(dtype, values):
    """The bits that are stored."""
    target = torch.full(values.shape, 7.0, dtype=dtype)
    round_into(target, torch.from_numpy(values))
    return ieee.bits_of(target)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_16_bits_stays_as_it_is(dtype):
    every = ieee.from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    found = rounded_into(dtype, ieee.widened(every))
    is_nan = every.isnan().numpy()
    assert np.array_equal(found[~is_nan], ieee.bits_of(every)[~is_nan])
    assert (found[is_nan] == ieee.CANONICAL_NAN[dtype]).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_between_two_neighbours_the_nearer_is_taken_and_of_two_as_near_the_even_one(dtype):
    infinity = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
    below = np.arange(infinity, dtype=np.uint16)
    above = below + 1
    low, high = (ieee.widened(ieee.from_bits(bits, dtype)).astype(np.float64) for bits in (below, above))
    high[-1] = 2 * low[-1] - low[-2]  # infinity is rounded to as if it were the next number
    middle = ieee.rounded((low + high) / 2)
    even = np.where(below % 2 == 0, below, above)
    for sign, bit in ((1, 0), (-1, 0x8000)):
        assert np.array_equal(rounded_into(dtype, sign * middle), even | bit)
        assert np.array_equal(rounded_into(dtype, sign * np.nextafter(middle, np.float32(0))), below | bit)
        assert np.array_equal(rounded_into(dtype, sign * np.nextafter(middle, np.float32(np.inf))), above | bit)


@pytest.mark.parametrize("dtype", ieee.DTYPES, ids=str)
def test_numbers_of_all_kinds_are_rounded_in_any_length(dtype):
    for numel in (0, 1, 7, 8, 15, 33, 5000):
        values = ieee.numbers(numel, np.random.default_rng(numel))
        assert np.array_equal(rounded_into(dtype, values), ieee.stored(values, dtype))


@pytest.mark.parametrize("dtype", ieee.DTYPES, ids=str)
def test_rounding_follows_strides(dtype):
    values = ieee.numbers(60, np.random.default_rng(1))
    target = torch.zeros(2, 6, 10, dtype=dtype)
    view = target[1].t()
    round_into(view, torch.from_numpy(values).view(10, 6))
    assert np.array_equal(ieee.bits_of(view.reshape(-1)), ieee.stored(values, dtype))
    assert not target[0].any()


@pytest.mark.parametrize("dtype", ieee.DTYPES, ids=str)
def test_every_nan_becomes_the_quiet_one_without_payload_and_numbers_are_left_alone(dtype):
    if dtype == torch.float32:
        nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], dtype=np.uint32)
        bits = np.concatenate([nans, ieee.numbers(10_000, np.random.default_rng(2)).view(np.uint32)])
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
    values = ieee.from_bits(bits, dtype)
    is_nan = values.isnan().numpy()
    assert is_nan.sum() >= {torch.float32: 6, torch.bfloat16: 2 * 0x7F, torch.float16: 2 * 0x3FF}[dtype]
    assert canonical_nan_(values) is values
    assert np.array_equal(ieee.bits_of(values), np.where(is_nan, bits.dtype.type(ieee.CANONICAL_NAN[dtype]), bits))


def check_square_root(values):
    with np.errstate(invalid="ignore"):
        expected = np.sqrt(values)
    argument = torch.from_numpy(values.copy())
    found = square_root(argument).numpy()
    whole = np.uint32 if values.dtype == np.float32 else np.uint64
    assert np.array_equal(argument.numpy().view(whole), values.view(whole)), "the argument is left alone"
    wrong = np.flatnonzero((expected.view(whole) != found.view(whole)) & ~(np.isnan(expected) & np.isnan(found)))
    assert not wrong.size, (
        f"{wrong.size} of {values.size}, first that of {values[wrong[0]]!r}: {found[wrong[0]]!r} "
        f"instead of {expected[wrong[0]]!r}"
    )


def test_the_square_root_is_correctly_rounded():
    random = np.random.default_rng(3)
    check_square_root(random.integers(0, 1 << 31, 1 << 20, dtype=np.uint32).view(np.float32))  # any but negative ones
    check_square_root(random.integers(0, 1 << 23, 1 << 18, dtype=np.uint32).view(np.float32))  # denormal ones
    check_square_root(ieee.numbers(10_000, random))
    check_square_root(np.float32([0.0, -0.0, 2.0**-149, 1, 4, np.inf, -np.inf, np.nan, -1e-45, 3.4028235e38]))
    # Roots of numbers about a square are nearest to the middle between two numbers.
    roots = random.integers(1 << 12, 1 << 13, 1 << 16).astype(np.float64)
    for nudge in (0.0, 0.5, 1.0):
        squares = ieee.rounded((roots + nudge) ** 2)
        for near in (squares, np.nextafter(squares, np.float32(0)), np.nextafter(squares, np.float32(np.inf))):
            check_square_root(near)
    # Rules for masters of double precision have it too.
    check_square_root(random.random(1 << 16) * 2.0 ** random.integers(-60, 60, 1 << 16))


@pytest.mark.slow
def test_the_square_root_of_every_number_that_has_one():
    part = 1 << 24
    for first in range(0, 1 << 31, part):
        check_square_root(np.arange(first, first + part, dtype=np.uint32).view(np.float32))
