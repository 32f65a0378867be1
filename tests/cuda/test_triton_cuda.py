"""Triton's kernels on a GPU give the bits of the list on the host."""

import kernel_cases
import pytest
import torch
from cuda_cases import gpu_marks

from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Span

pytestmark = gpu_marks


@pytest.fixture(scope="module")
def fused():
    found = TritonBackend.find()
    if found is None or "interpreted" in found.name:
        pytest.skip("Triton is not installed, or told to interpret: pip install triton, unset TRITON_INTERPRET")
    return found


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
@pytest.mark.parametrize("rule", kernel_cases.RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_updates_are_those_of_the_list(fused, rule, dtype):
    kernel_cases.check_update(fused, rule, dtype, "cuda")


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_masters_are_rounded_to_nearest_even(fused, dtype):
    kernel_cases.check_rounding(fused, dtype, "cuda")


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_surveys_add_in_the_same_order(fused, dtype):
    kernel_cases.check_survey(fused, dtype, "cuda")


@pytest.mark.parametrize("numel", [1 << 20, (1 << 22) + 77])
def test_large_spans(fused, numel):
    """As many programs as fill the device, and on whichever stream is current."""
    generator = torch.Generator().manual_seed(1)
    rule = kernel_cases.RULES[0]
    tensors = [kernel_cases.numbers(numel, torch.float32, generator) for _ in range(3)]
    grad = kernel_cases.numbers(numel, torch.bfloat16, generator)
    results = []
    for one, place in ((fused, "cuda"), (kernel_cases.EagerBackend(), "cpu")):
        to, master, *states = (tensor.to(place, copy=True) for tensor in (grad, *tensors))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            one.update([Span(to, Gradient(to), master, tuple(states), rule)], (0.5,))
        torch.cuda.synchronize()
        results.append((to, master, *states))
    for ours, listed in zip(*results, strict=True):
        assert kernel_cases.same_bits(listed, ours)


def test_an_update_takes_no_memory(fused):
    span = Span(
        param := torch.ones(1 << 22, dtype=torch.bfloat16, device="cuda"),
        Gradient(param),
        torch.ones(1 << 22, device="cuda"),
        tuple(torch.ones(1 << 22, device="cuda") for _ in range(2)),
        kernel_cases.RULES[0],
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused.update([span], (0.5,))
    assert torch.cuda.max_memory_allocated() == before
