"""Triton kernels on a GPU give the bits of the eager backend on the host."""

import kernel_cases
import pytest
import torch
from cuda_cases import gpu_marks

from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar.testing import assert_same_bits

pytestmark = gpu_marks


@pytest.fixture(scope="module")
def fused():
    backend = TritonBackend.find()
    if backend is None or "interpreted" in backend.name:
        pytest.skip("Triton is not installed, or in interpreter mode: pip install triton, unset TRITON_INTERPRET")
    return backend


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
@pytest.mark.parametrize("rule", kernel_cases.RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_updates_equal_those_of_the_eager_backend(fused, rule, dtype):
    kernel_cases.check_update(fused, rule, dtype, "cuda")


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_masters_are_rounded_to_nearest_even(fused, dtype):
    kernel_cases.check_rounding(fused, dtype, "cuda")


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES, ids=str)
def test_gradient_statistics_add_in_the_same_order(fused, dtype):
    kernel_cases.check_survey(fused, dtype, "cuda")


@pytest.mark.parametrize("numel", [1 << 20, (1 << 22) + 77])
def test_large_spans(fused, numel):
    """Launch enough programs to fill the device, on the current stream."""
    generator = torch.Generator().manual_seed(1)
    rule = kernel_cases.RULES[0]
    tensors = [kernel_cases.numbers(numel, torch.float32, generator) for _ in range(3)]
    grad = kernel_cases.numbers(numel, torch.bfloat16, generator)
    results = []
    for backend, device in ((fused, "cuda"), (kernel_cases.EagerBackend(), "cpu")):
        param, master, *states = (tensor.to(device, copy=True) for tensor in (grad, *tensors))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            backend.update([Span(param, Gradient(param), master, tuple(states), rule)], (0.5,))
        torch.cuda.synchronize()
        results.append((param, master, *states))
    assert_same_bits(results[1], results[0], "chunks")


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
