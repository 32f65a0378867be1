"""Unsupported models are rejected before the first step by an error that names the parameter."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module

import patrickstar as ps
from patrickstar.errors import ModelError

from .zoo import WIDTH, linear, normal, small_chunks, tokens


def force(m, x):
    """Return the gradient of the output with respect to the input, so that training differentiates twice."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.body(x).sum(), x, create_graph=True)[0]


def complex_filter():
    return nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))


sparse_embedding = module(
    lambda m, ids: m.body(m.words(ids)), words=lambda: nn.Embedding(11, WIDTH, sparse=True), body=linear
)
# Only its forward shows that the gradient is sparse.
sparse_function = module(
    lambda m, ids: m.body(nn.functional.embedding(ids, m.table, sparse=True)),
    table=lambda: nn.Parameter(torch.randn(11, WIDTH)),
    body=linear,
)
complex_weight = module(
    lambda m, x: torch.fft.ifft(torch.fft.fft(m.body(x).float()) * m.filter).real, body=linear, filter=complex_filter
)
sparse_weight = module(
    lambda m, x: torch.sparse.mm(m.connections, x.flatten(0, -2).t()),
    connections=lambda: nn.Parameter(torch.eye(WIDTH).to_sparse()),
)
lazy = module(lambda m, x: m.shapeless(m.body(x)), body=linear, shapeless=lambda: nn.LazyLinear(WIDTH))
energy = module(force, body=lambda: nn.Sequential(linear(), nn.Tanh(), linear()))
REFUSED = {
    "sparse embedding": (sparse_embedding, "words.weight", tokens(11, 2, 5)),
    "sparse gradient of a function": (sparse_function, "table", tokens(11, 2, 5)),
    "complex": (complex_weight, "filter", normal(2, 3, WIDTH)),
    "sparse parameter": (sparse_weight, "connections", normal(2, 3, WIDTH)),
    "differentiated twice": (energy, r"body\.\d\.weight", normal(2, 3, WIDTH)),
    "without a shape": (lazy, "shapeless.weight", normal(2, 3, WIDTH)),
}


@pytest.mark.parametrize("model", REFUSED)
def test_refused_by_name(model, precision):
    model_func, name, example = REFUSED[model]
    with pytest.raises(ModelError, match=name):
        engine, _ = ps.initialize(model_func, small_chunks(precision))
        engine.backward(mean_square(engine(example)))


def test_model_without_parameters(precision):
    with pytest.raises(ModelError, match="no parameters"):
        ps.initialize(lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), small_chunks(precision))


def test_refusal_leaves_the_module_as_it_was(precision):
    module = nn.Sequential(linear(), complex_weight())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ModelError, match="filter"):
        ps.initialize(module, small_chunks(precision))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module(normal(2, 3, WIDTH)).isfinite().all()


def test_module_that_another_engine_holds(precision):
    module = linear()
    engine, _ = ps.initialize(module, small_chunks(precision))
    with pytest.raises(ModelError, match="weight"):
        ps.initialize(module, small_chunks(precision))
    engine.close()
