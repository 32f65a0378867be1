"""Gradient statistics: all backends add in the order of [Note: sums in fixed order] and count non-finite elements."""

import math
from functools import cache
from itertools import product

import ieee
import implementations
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient

pytestmark = pytest.mark.usefixtures("one_thread")

given = fixed_draws(60)

LANES, BLOCK, PAGE = 32, 4096, 1 << 20
SCALES = [(), (1 / 65536,), (0.3, 1e-3)]


def sum_of_rows(values: list[float]) -> float:
    """Add rows of 32 lanes: each lane row by row, then 16 to 16, 8 to 8, 4 to 4, 2 to 2, 1 to 1."""
    lanes = [0.0] * LANES
    for first in range(0, len(values), LANES):
        row = values[first : first + LANES]
        lanes = [one + other for one, other in zip(lanes, row + [0.0] * (LANES - len(row)), strict=True)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [one + other for one, other in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def sum_of_squares(values: np.ndarray) -> float:
    """Add blocks of 4096 squares, then the sums of the blocks."""
    with np.errstate(all="ignore"):
        squares = [value * value for value in values.astype(np.float64).tolist()]
    return sum_of_rows([sum_of_rows(squares[first : first + BLOCK]) for first in range(0, len(squares), BLOCK)])


def gradient_of_the_update(grad: Gradient, scales) -> np.ndarray:
    """Return the gradient that the update uses: accumulated and scaled, in float32."""
    values = ieee.widened(grad.latest)
    values = values if grad.accumulated is None else ieee.add(grad.accumulated.numpy(), values)
    for scale in scales:
        values = ieee.multiply(values, ieee.rounded(scale))
    return values


def expected(gradients, scales):
    """Return the expected sums as hexadecimal strings, and the expected count."""
    values = [gradient_of_the_update(grad, scales) for grad in gradients]
    return [to_hex(sum_of_squares(each)) for each in values], sum(int((~np.isfinite(each)).sum()) for each in values)


def to_hex(value):
    return float(value).hex()


def check(implementation, gradients, scales, of=None):
    """Compare the statistics with the reference implementation, or with what is expected `of` these gradients."""
    before = expected(gradients, scales) if of is None else of
    grad_stats = implementation.grad_stats(gradients, scales)
    assert ([to_hex(each) for each in grad_stats.squares], grad_stats.not_finite) == before


def finite(numel, dtype, random, accumulated=False):
    """Return a gradient whose sum of squares depends on the order of additions.

    The square of a small number is about one unit in the last place of the square of a large one, so the rounding
    depends on the order.
    """

    def values(kind):
        small = 2.0 ** random.integers(-13, -6, numel)
        magnitudes = np.where(random.random(numel) < 0.01, 2.0**14, small) * (0.5 + random.random(numel))
        return torch.from_numpy(ieee.rounded(magnitudes * random.choice([-1, 1], numel))).to(kind)

    return Gradient(values(dtype), values(torch.float32) if accumulated else None)


# The same bits


SIZES = [0, 1, 2, 31, 32, 33, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 33, 33 * BLOCK + 40]


def any_size(dtype):
    """Return gradients of all sizes with scales."""
    random = np.random.default_rng(0)
    cases = [
        ([finite(numel, dtype, random, accumulated) for numel in SIZES[:-1]], scales)
        for scales, accumulated in product(SCALES, (False, True))
    ]
    return [*cases, ([finite(numel, dtype, random) for numel in SIZES], ())]


def about_a_page(numel):
    return [([finite(numel, torch.bfloat16, np.random.default_rng(numel))], ())]


def every_number_of_16_bits(dtype):
    """Return all and the finite ones, and each in a sum of its own, which shows whether denormals are flushed."""
    every = ieee.from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    numbers = every[every.isfinite()]
    return [([Gradient(every), Gradient(numbers)], ()), ([Gradient(value) for value in numbers.view(-1, 1)[::251]], ())]


@cache
def with_expected(make, argument):
    """Return cases with what is expected of them: slow in Python."""
    return [(*case, expected(*case)) for case in make(argument)]


@pytest.mark.parametrize("implementation", implementations.ALL)
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        *((any_size, dtype) for dtype in ieee.DTYPES),
        *((about_a_page, numel) for numel in (PAGE - 1, PAGE, PAGE + 33)),
        *((every_number_of_16_bits, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_bits_of_the_reference(make, argument, implementation):
    for case in with_expected(make, argument):
        check(implementation, *case)


@cache
def of_several_pages():
    random = np.random.default_rng(1)
    gradients = [finite(numel, torch.bfloat16, random) for numel in (3 * PAGE + 5, 1000, 2 * PAGE, 0, PAGE + BLOCK)]
    return gradients, EagerBackend().grad_stats(gradients, (0.3,))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_any_number_of_threads(variant, threads):
    gradients, listed = of_several_pages()
    assert CppBackend.find(variant, threads).grad_stats(gradients, (0.3,)) == listed


@pytest.mark.parametrize("implementation", implementations.ALL)
@given(
    st.lists(st.tuples(st.integers(0, 2 * BLOCK + 70), st.sampled_from(ieee.DTYPES), st.booleans()), max_size=4),
    st.lists(st.floats(1e-6, 1e6), max_size=3).map(tuple),
    st.integers(0, 70),
    st.integers(0, 1 << 30),
)
def test_any_gradients_from_any_start(implementation, shapes, scales, first, seed):
    random = np.random.default_rng(seed)
    gradients = [finite(first + numel, dtype, random, accumulated) for numel, dtype, accumulated in shapes]
    gradients = [grad.page(slice(first, None)) for grad in gradients]
    check(implementation, gradients, scales)


@pytest.mark.parametrize("implementation", implementations.ALL)
@given(
    st.lists(st.tuples(st.integers(0, BLOCK + 70), st.sampled_from(ieee.DTYPES), st.booleans()), max_size=4),
    st.sampled_from([(), (0.3,), (1e-41, 3e38), (3e38, 3e38), (math.inf,), (math.nan,), (0.0,)]),
    st.integers(0, 1 << 30),
)
def test_numbers_of_all_kinds(implementation, shapes, scales, seed):
    random = np.random.default_rng(seed)
    gradients = [
        Gradient(ieee.tensor(numel, dtype, random), ieee.tensor(numel, torch.float32, random) if accumulated else None)
        for numel, dtype, accumulated in shapes
    ]
    check(implementation, gradients, scales)


@pytest.mark.parametrize("numels", [[], [1], [1000], [3, 70, 5000, 0, 33], [7] * 100], ids=str)
def test_the_norm_is_as_good_as_an_exact_sum(numels):
    random = np.random.default_rng(3)
    gradients = [finite(numel, torch.float16, random) for numel in numels]
    values = (float(value) for grad in gradients for value in gradient_of_the_update(grad, (0.3,)))
    exact = math.sqrt(math.fsum(value**2 for value in values))
    assert EagerBackend().grad_stats(gradients, (0.3,)).norm == pytest.approx(exact, rel=1e-12)


def test_a_norm_is_the_root_of_sums_added_as_a_block():
    sums = tuple(np.random.default_rng(4).random(5 * LANES + 3).tolist())
    assert to_hex(GradStats(sums).norm) == to_hex(math.sqrt(sum_of_rows(list(sums))))
    assert GradStats().norm == 0.0
    assert GradStats((1.0, math.inf)).norm == math.inf
    for sums in ((math.nan,), (1.0, math.nan), (math.inf, math.nan), (-math.nan,)):
        assert math.isnan(GradStats(sums).norm)
    # The squares of float32 denormals are representable in float64.
    assert EagerBackend().grad_stats([Gradient(torch.full((4,), 1e-45))], ()).norm == 2 * 2.0**-149


def test_statistics_are_merged_in_their_order():
    one, two, three = GradStats((1.0, 2.0), 3), GradStats(), GradStats((0.5, math.inf, 4.0), 1)
    assert GradStats.merge([one, two, three]) == GradStats((1.0, 2.0, 0.5, math.inf, 4.0), 4)
    assert GradStats.merge([three, one]) == GradStats((0.5, math.inf, 4.0, 1.0, 2.0), 4)
    assert GradStats.merge([]) == GradStats()
    assert GradStats.merge(iter([one])) == one
