"""Triton kernels in Triton's interpreter, compared with the eager backend: a process of `test_own_process.py`."""

from unittest.mock import MagicMock

import kernel_cases
import pytest
import torch
from sampling import nightly

from patrickstar._kernels import triton_backend
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar.testing import assert_same_bits

# The interpreter computes with numpy, which warns of every infinity and NaN.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

OTHERS = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in kernel_cases.DTYPES if dtype != torch.bfloat16]
"""Dtypes of slow tests: the interpreter takes seconds per kernel."""
_FIRST = {(type(rule), rule.mode): rule for rule in reversed(kernel_cases.RULES)}
RULES = [
    rule if _FIRST[type(rule), rule.mode] is rule else pytest.param(rule, marks=pytest.mark.slow)
    for rule in kernel_cases.RULES
]
"""All rules; those with the code path of an earlier one are slow tests."""


@pytest.fixture(scope="module")
def fused():
    found = TritonBackend.find()
    assert found is not None and "interpreted" in found.name
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_updates_are_those_of_the_list(fused, rule, dtype):
    """With a third of the cases for each rule unless all draws run, other ones for the next rule."""
    some = kernel_cases.CASES[kernel_cases.RULES.index(rule) % 3 :: 3]
    kernel_cases.check_update(fused, rule, dtype, cases=kernel_cases.CASES if nightly() else some)


def test_updates_of_split_masters_are_those_of_whole_ones(fused):
    adam = [rule for rule in kernel_cases.RULES if type(rule) is AdamRule]
    for number, rule in enumerate(adam if nightly() else adam[:3]):
        kernel_cases.check_split(fused, rule, cases=kernel_cases.CASES if nightly() else [kernel_cases.CASES[number]])


@pytest.mark.parametrize("earlier", [False, True], ids=["latest", "accumulated"])
def test_neighbours_in_a_chunk_are_updated_by_one_launch(fused, monkeypatch, earlier):
    """And what lies between two parameters is left alone, if it belongs to a third."""
    launches = MagicMock()
    launches.__getitem__.side_effect = fused._kernels.update_kernel.__getitem__
    monkeypatch.setattr(fused._kernels, "update_kernel", launches)
    generator, rule = torch.Generator().manual_seed(0), kernel_cases.RULES[0]
    kinds = [torch.bfloat16] + [torch.float32] * (3 + earlier)
    lists = [kernel_cases.numbers(5 * ALIGN_NUMEL, kind, generator, special=False) for kind in kinds]
    lists[3].abs_()
    parts = [slice(0, 100), slice(128, 384), slice(512, 520)]  # between the last two is one without a gradient
    results = []
    for one in (fused, kernel_cases.EagerBackend()):
        param, master, first, second, *sums = (values.clone() for values in lists)
        spans = [
            Span(
                param[part], Gradient(param[part], *(each[part] for each in sums)), master[part],
                (first[part], second[part]), rule,
            )
            for part in parts
        ]  # fmt: skip
        one.update(spans, (0.5,))
        results.append([torch.cat([values[part] for part in parts]) for values in (param, master, first, second)])
        results[-1] += [values[384:512] for values in (param, master, first, second)]
    assert launches.__getitem__.call_count == 2
    assert_same_bits(results[1], results[0], "chunks")


def test_gradient_statistics_of_several_launches(fused, monkeypatch):
    monkeypatch.setattr(triton_backend, "LAUNCH_COUNT", 2)
    monkeypatch.setattr(triton_backend, "LAUNCH_NUMEL", 10_000)
    launches = MagicMock()
    launches.__getitem__.side_effect = fused._kernels.grad_stats_kernel.__getitem__
    monkeypatch.setattr(fused._kernels, "grad_stats_kernel", launches)
    generator = torch.Generator().manual_seed(0)
    numels = (1, 2, 3, 20_000, 1)
    gradients = [Gradient(kernel_cases.numbers(numel, torch.bfloat16, generator, special=False)) for numel in numels]
    assert fused.grad_stats(gradients, ()) == kernel_cases.EagerBackend().grad_stats(gradients, ())
    assert launches.__getitem__.call_count == 4


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_masters_are_rounded_to_nearest_even(fused, dtype):
    kernel_cases.check_rounding(fused, dtype, stride=1 if nightly() else 37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
def test_gradient_statistics_add_in_the_same_order(fused, dtype, monkeypatch):
    """With more blocks per program than on a GPU unless all draws run: a program takes a fifth of a second."""
    if not nightly():
        monkeypatch.setattr(triton_backend, "PROGRAM_BLOCKS", 16)
    kernel_cases.check_survey(fused, dtype, all_sizes=nightly())


def test_gradient_statistics_of_nothing_are_empty(fused):
    assert fused.grad_stats([], ()).squares == ()


def test_what_the_kernels_lack_is_refused(fused):
    def span(dtype=torch.float32, param=torch.bfloat16, rule=kernel_cases.RULES[0]):
        master = torch.zeros(4, dtype=dtype)
        low = torch.zeros(4, dtype=param)
        return Span(low, Gradient(low, dtype=dtype), master, (master, master), rule)

    class Foreign:
        code = None

    assert fused.supports(span())
    assert not fused.supports(span(dtype=torch.float64))
    assert not fused.supports(span(param=torch.float64))
    assert not fused.supports(span(rule=Foreign()))
