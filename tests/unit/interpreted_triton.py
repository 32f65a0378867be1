"""Triton kernels in Triton's interpreter, compared with the eager backend: a process of `test_triton_backend.py`."""

import kernel_cases
import pytest
import torch
from sampling import nightly

from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Span

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
    first = kernel_cases.RULES.index(rule) % 3
    kernel_cases.check_update(
        fused, rule, dtype, cases=kernel_cases.CASES if nightly() else kernel_cases.CASES[first::3]
    )


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_masters_are_rounded_to_nearest_even(fused, dtype):
    kernel_cases.check_rounding(fused, dtype, stride=1 if nightly() else 37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS], ids=str)
def test_gradient_statistics_add_in_the_same_order(fused, dtype):
    kernel_cases.check_survey(fused, dtype)


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
