"""Ways in which a model accesses its weights, and in-place operators on inputs and outputs of modules."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import module

from patrickstar import testing

from .zoo import WIDTH, assert_blocks_exact, linear, normal_batches, weight


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


# In-place operators


def activation_on_output(m, x):
    return m.after(F.relu_(m.linear(x).add_(1)))


def residual_added(m, x):
    hidden = m.first(x)
    hidden += m.second(torch.tanh(x))
    return hidden


def output_is_a_view(m, x):
    flat = m.inner(x)
    flat.mul_(2).relu_()
    return m.after(flat).view_as(x)


def output_is_its_input(m, x):
    hidden = m.linear(x)
    same = m.identity(hidden)
    same.add_(1)
    return m.after(hidden) + same


def output_is_a_view_of_its_input(m, x):
    hidden = m.linear(x)
    m.flatten(hidden).mul_(2)
    return m.after(hidden)


def writes_into_its_input(m, x):
    hidden = m.before(x)
    return m.inner(hidden) + hidden


def writes_into_its_buffer(m, x):
    x = m.linear(x)
    with torch.no_grad():
        m.running.lerp_(x.mean((0, 1)).to(m.running.dtype), 0.1)
    return x + m.running.to(x.dtype).clone()


def running():
    return nn.Buffer(torch.zeros(WIDTH))


view_of_a_linear = module(lambda m, x: m.linear(x).view(-1, WIDTH), linear=linear)
doubles_its_input = module(lambda m, x: m.linear(x.mul_(2)), linear=linear)
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
    # Linear returns a view of a 3-D input, and none of a 2-D one.
    "activation on an output that is a view": module(activation_on_output, linear=linear, after=linear),
    "activation on an output that is none": module(
        lambda m, x: activation_on_output(m, x.flatten(0, 1)).view_as(x), linear=linear, after=linear
    ),
    "activation modules": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.SiLU(inplace=True)),
    "residual added in place": module(residual_added, first=linear, second=linear),
    "output is a view": module(output_is_a_view, inner=view_of_a_linear, after=linear),
    "output is its input": module(output_is_its_input, linear=linear, identity=nn.Identity, after=linear),
    "output is a view of its input": module(
        output_is_a_view_of_its_input, linear=linear, flatten=lambda: nn.Flatten(0, 1), after=linear
    ),
    "writes into its input": module(writes_into_its_input, before=linear, inner=doubles_its_input),
    "writes into its buffer": module(writes_into_its_buffer, linear=linear, running=running),
}


@pytest.mark.parametrize("use", USES)
def test_a_weight_in_use(use, config, recomputing):
    assert_blocks_exact(USES[use], config, recomputing)


def test_in_place_activation_on_the_models_output(config):
    def loss_of(output, batch):
        return F.relu_(output).float().pow(2).mean()

    testing.assert_exact(lambda: nn.Sequential(linear(), linear()), normal_batches(), config, loss_fn=loss_of)
