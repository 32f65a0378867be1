"""Ways in which a model accesses its weights."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from .zoo import WIDTH, assert_blocks_exact, linear, module, weight


def detached_after_use(m, x):
    x = m.other(torch.tanh(m.linear(x)))
    return F.linear(x, m.linear.weight.detach())


def detached_before_use(m, x):
    x = m.other(torch.tanh(F.linear(x, m.linear.weight.detach())))
    return m.linear(x)


def detached_view_kept(m, x):
    constant = m.linear.weight.detach().t()
    return m.other(torch.tanh(m.linear(x))) @ constant


def normalised_without_grad(m, x):
    with torch.no_grad():
        length = m.weight.norm()
    return F.linear(x, m.weight / length)


def transposed_view_kept(m, x):
    transposed = m.weight.t()
    return torch.tanh(m.other(x)) @ transposed


def chunked_views_kept(m, x):
    query, key, value = m.packed.weight.chunk(3)
    x = torch.tanh(m.other(x))
    return F.linear(x, query) * F.linear(x, key) + F.linear(m.other(x), value)


def returned_by_its_module(m, x):
    held = m.holder()
    return F.linear(torch.tanh(m.other(x)), held)


def indexed(m, x):
    chosen = m.table[torch.tensor([0, 2, 2])]
    return x * chosen + m.table[1] - m.table[:2].sum(0)


def in_parameter_list(m, x):
    for each in m.weights:
        x = torch.tanh(F.linear(x, each))
    return x


def reads_metadata(m, x):
    x, w = m.other(x), m.weight
    assert w.shape == (WIDTH, WIDTH) and w.size(0) == len(w) == WIDTH
    assert w.stride() == (WIDTH, 1) and w.is_contiguous() and w.is_leaf
    assert w.numel() == WIDTH**2 and w.dim() == w.ndim == 2
    assert w.device == x.device and w.requires_grad
    return F.linear(x.to(w.dtype).view(-1, w.shape[1]), w).view_as(x)


multiply_by_a_view = module(lambda m, x, view: torch.tanh(m.linear(x)) @ view, linear=linear)
USES = {
    "called twice": module(lambda m, x: m.linear(torch.tanh(m.linear(x))), linear=linear),
    "used by the parent": module(lambda m, x: F.linear(x, m.uncalled.weight, m.uncalled.bias), uncalled=linear),
    "used by the parent and called": module(lambda m, x: m.linear(torch.tanh(x @ m.linear.weight)), linear=linear),
    "detached after use": module(detached_after_use, linear=linear, other=linear),
    "detached before use": module(detached_before_use, linear=linear, other=linear),
    "detached view kept": module(detached_view_kept, linear=linear, other=linear),
    "normalised without grad": module(normalised_without_grad, weight=weight),
    "transposed view kept": module(transposed_view_kept, weight=weight, other=linear),
    "chunked views kept": module(chunked_views_kept, packed=lambda: nn.Linear(WIDTH, 3 * WIDTH), other=linear),
    "view passed to another module": module(
        lambda m, x: m.multiply(x, m.weight.view(WIDTH, WIDTH).t()), weight=weight, multiply=multiply_by_a_view
    ),
    "returned by its module": module(
        returned_by_its_module, holder=module(lambda m: m.weight, weight=weight), other=linear
    ),
    "indexed": module(indexed, table=lambda: nn.Parameter(torch.randn(4, WIDTH))),
    "cast to float": module(lambda m, x: F.linear(x.float(), m.weight.float()).to(x.dtype), weight=weight),
    "in einsum": module(lambda m, x: torch.einsum("bsi,oi->bso", x, m.weight), weight=weight),
    "expanded": module(
        lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1)[:, 1:] * m.token,
        token=lambda: nn.Parameter(torch.randn(1, 1, WIDTH)),
    ),
    "functional call": module(
        lambda m, x: torch.func.functional_call(m.inner, {"weight": m.inner.weight * m.scale}, (x,)),
        inner=linear,
        scale=weight,
    ),
    "in a parameter list": module(in_parameter_list, weights=lambda: nn.ParameterList([weight() for _ in range(3)])),
    "in a parameter dict": module(
        lambda m, x: F.linear(torch.tanh(F.linear(x, m.weights["up"])), m.weights["down"]),
        weights=lambda: nn.ParameterDict({"up": weight(), "down": weight()}),
    ),
    "reads metadata": module(reads_metadata, weight=weight, other=linear),
}


@pytest.mark.parametrize("use", USES)
def test_a_weight_in_use(use, config, recomputing):
    assert_blocks_exact(USES[use], config, recomputing)
