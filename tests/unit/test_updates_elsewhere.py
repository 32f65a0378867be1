"""Updates that write the new master and states to other memory give the bits of updates in place."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import implementations
import kernel_cases
import pytest
import torch
from cpp_backend_cases import AVERAGED
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import numbers, same_bits, state_dtype
from sampling import draws

from patrickstar._kernels import triton_backend
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Span

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [*kernel_cases.RULES, *AVERAGED, AveragedRule(SGDRule(0.1, 0.0, 0.0, 0.1, False, 1), 0.3)]
DTYPES = kernel_cases.DTYPES
SCALES = [(), (0.3, 1.7), (1e-41, 3e38)]
PAGE = 1 << 20
AROUND = 7.0
"""Memory content before and after the updated elements."""
LINE_NUMEL = 32
"""Multiple of a cache line's elements in every dtype."""


def placed(values, first):
    """Return a copy of the values that begins `first` elements after a cache line, and the tensor around it."""
    whole = torch.full((values.numel() + first + 3 * LINE_NUMEL,), AROUND, dtype=values.dtype)
    start = first + -whole.data_ptr() % 64 // whole.element_size()
    part = whole[start : start + values.numel()]
    part.copy_(values)
    return part, whole


def around(part, whole):
    """Return what surrounds the elements."""
    start = part.storage_offset()
    return torch.cat([whole[:start], whole[start + part.numel() :]])


def check(
    backend, rule, numel, *, grad, param, accumulated=False, scales=(), firsts=(0,), alias=False, cuts=(), seed=0
):
    """Compare an update into other memory with the one of a copy in place.

    Args:
        grad: Dtype of the gradient.
        param: Dtype of the parameter, which has memory of its own unless `alias`.
        firsts: Distances of the tensors from a cache line in elements, cycled.
        cuts: Where the span is cut into pages.
    """
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32] + [state_dtype(rule)] * len(rule.kinds)
    lists = [numbers(numel, dtype, generator) for dtype in dtypes]
    latest = numbers(numel, grad, generator)
    summed = numbers(numel, torch.float32, generator) if accumulated else None
    expected = [values.clone() for values in lists]
    target = torch.empty(numel, dtype=param)
    backend.update([Span(target, Gradient(latest, summed), expected[0], tuple(expected[1:]), rule)], scales)

    def at(number, values):
        return placed(values, firsts[number % len(firsts)])

    old = [at(number, values) for number, values in enumerate(lists)]
    new = [at(number + 1, torch.full((numel,), AROUND, dtype=dtype)) for number, dtype in enumerate(dtypes)]
    gradient = at(2, latest)
    stored = gradient if alias else at(3, torch.full((numel,), AROUND, dtype=param))
    master, *states = (part for part, _ in old)
    out = tuple(part for part, _ in new)
    span = Span(stored[0], Gradient(gradient[0], summed), master, tuple(states), rule, out)
    bounds = [0, *sorted(cuts), numel]
    backend.update([span.page(slice(*ends)) for ends in pairwise(bounds)], scales)

    case = (rule, numel, grad, param, accumulated, scales, firsts, alias, cuts)
    for name, values, (part, whole) in zip(("master", *rule.kinds), expected, new, strict=True):
        assert same_bits(values, part), (name, case)
        assert (around(part, whole) == AROUND).all(), (name, case)
    assert same_bits(target, stored[0]), ("param", case)
    assert (around(*stored) == AROUND).all(), ("param", case)
    for values, (part, _) in zip(lists, old, strict=True):
        assert same_bits(values, part), ("old values", case)
    assert alias or same_bits(latest, gradient[0]), ("gradient", case)


@pytest.mark.parametrize("backend", implementations.ALL)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_every_rule(rule, backend):
    for number, numel in enumerate((0, 1, 255, 256, 257, 511, 513, 1500)):
        grad, param = DTYPES[number % 3], DTYPES[(number + number // 3) % 3]
        accumulated, scales = number % 2 == 0, SCALES[number % 3]
        check(backend, rule, numel, grad=grad, param=param, accumulated=accumulated, scales=scales, seed=number)
        check(backend, rule, numel, grad=grad, param=grad, alias=True, firsts=(number % 2,), seed=number)


@pytest.mark.parametrize("backend", implementations.ALL)
@settings(derandomize=True, deadline=None, max_examples=draws(60))
@given(
    st.sampled_from(RULES),
    st.integers(0, 1200).flatmap(lambda numel: st.tuples(st.just(numel), st.lists(st.integers(0, numel), max_size=3))),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.booleans(),
    st.sampled_from(SCALES),
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_any_place_and_cut(backend, rule, numel_and_cuts, grad, param, accumulated, scales, firsts):
    numel, cuts = numel_and_cuts
    check(
        backend,
        rule,
        numel,
        grad=grad,
        param=param or grad,
        accumulated=accumulated,
        scales=scales,
        firsts=firsts,
        alias=param is None,
        cuts=cuts,
    )


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("backend", implementations.ALL)
def test_several_pages(backend, first):
    check(backend, AVERAGED[1], PAGE + 3, grad=DTYPES[0], param=DTYPES[0], scales=(0.5,), firsts=(first,))


def test_triton_leaves_it_to_the_operators(monkeypatch):
    monkeypatch.setattr(triton_backend, "_kernels", lambda: SimpleNamespace(INTERPRETED=True))
    grad, lists = torch.zeros(5), tuple(torch.zeros(5) for _ in range(1 + len(RULES[0].kinds)))
    span = Span(grad, Gradient(grad), lists[0], lists[1:], RULES[0])
    assert TritonBackend.supports(span)
    elsewhere = replace(span, out=tuple(torch.zeros(5) for _ in lists))
    assert not TritonBackend.supports(elsewhere)
    assert isinstance(Kernels(None, TritonBackend.find()).for_update(elsewhere), EagerBackend)
