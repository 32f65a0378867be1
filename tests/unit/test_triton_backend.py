"""Triton kernels without a GPU: their results in the interpreter, and the code they are compiled to."""

import importlib.util
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import kernel_cases
import pytest
import torch

import patrickstar._kernels
from patrickstar._kernels import triton_backend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.update_rule import Rule, Span

no_triton = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(no_triton, reason="Triton is not installed: pip install triton")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Return the backend and the list of its compiled kernels; none is launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    backend = triton_backend.TritonBackend.find()
    if "interpreted" in backend.name:
        pytest.skip("Triton runs in the interpreter: unset TRITON_INTERPRET")
    results = []
    for name in ("update_kernel", "grad_stats_kernel", "fold_kernel"):
        kernel = getattr(backend._kernels, name)

        def compile_only(*args, run=kernel.run, **options):
            results.append(run(*args, **{**options, "warmup": True}))

        monkeypatch.setattr(kernel, "run", compile_only)
    absent = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_stream=lambda device: 0)
    absent.get_current_device = lambda: -1  # keeps kernels of real devices out of the cache
    monkeypatch.setattr(driver, "_active", absent)
    return backend, results


def span(rule: Rule, dtype: torch.dtype = torch.bfloat16, numel: int = 64) -> Span:
    return kernel_cases.Lists.drawn(rule, numel, grad=dtype, accumulated=True).span()


def operations(kernel) -> set[str]:
    return set(re.findall(r"^\s+([a-z][a-z0-9_.:]+)\s", kernel.asm["ptx"], re.MULTILINE))


@needs_triton
@pytest.mark.slow
def test_compiled_kernels_round_every_operation(compiled):
    backend, results = compiled
    spans = [span(rule) for rule in kernel_cases.RULES]
    spans += [span(kernel_cases.RULES[0], dtype, numel) for dtype in kernel_cases.DTYPES for numel in (1, 33)]
    backend.update(spans, (0.5, 0.3))
    backend.update(spans[:1], ())
    backend.grad_stats([item.grad for item in spans[-4:]], (0.5, 0.3))
    assert len(results) == len(spans) + 1 + 2 * 2  # statistics of two dtypes
    for kernel in results:
        floating = re.compile(r"(add|sub|mul|div|sqrt|fma|mad)\..*f(32|64)")
        arithmetic = set(filter(floating.match, operations(kernel)))
        # Contracted, approximate and flushing operations have different names.
        rounded = {f"{name}.rn.f{bits}" for name in ("add", "sub", "mul", "div", "sqrt") for bits in (32, 64)}
        assert arithmetic and arithmetic <= rounded
    assert {"div.rn.f32", "sqrt.rn.f32"} <= operations(results[0])


@needs_triton
def test_steps_are_not_compiled_again(compiled):
    backend, results = compiled
    for step in range(1, 4):
        rule = kernel_cases.AdamRule(float(step), 0.9, 0.999, 1e-8, 0.1 / step, True, step)
        backend.update([span(rule)], (1 / step,))
    assert len({kernel.hash for kernel in results}) == 1


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "patrickstar._kernels.triton_kernels", raising=False)
    monkeypatch.delattr(patrickstar._kernels, "triton_kernels", raising=False)
    triton_backend._kernels.cache_clear()
    try:
        assert triton_backend.TritonBackend.find() is None
        assert not triton_backend.TritonBackend.supports(span(kernel_cases.RULES[0]))
    finally:
        triton_backend._kernels.cache_clear()


def test_updates_to_other_memory_are_left_to_the_operators(monkeypatch):
    monkeypatch.setattr(triton_backend, "_kernels", lambda: SimpleNamespace(INTERPRETED=True))
    in_place = span(kernel_cases.RULES[0])
    elsewhere = replace(in_place, out=(in_place.master.clone(), *(state.clone() for state in in_place.states)))
    assert triton_backend.TritonBackend.supports(in_place) and not triton_backend.TritonBackend.supports(elsewhere)
    assert isinstance(Kernels(None, triton_backend.TritonBackend.find()).for_update(elsewhere), EagerBackend)
