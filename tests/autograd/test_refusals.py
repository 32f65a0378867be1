"""Unsupported models are rejected before the first step by an error that names the parameter."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square

import patrickstar as ps
from patrickstar.errors import ModelError

from .zoo import WIDTH, linear, normal, small_chunks, tokens


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(11, WIDTH, sparse=True), linear()

    def forward(self, ids):
        return self.body(self.words(ids))


class SparseFunctionalEmbedding(nn.Module):
    """Only its forward shows that the gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Parameter(torch.randn(11, WIDTH)), linear()

    def forward(self, ids):
        return self.body(nn.functional.embedding(ids, self.table, sparse=True))


class ComplexWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.filter = linear(), nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(self.body(x).float()) * self.filter).real


class SparseWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.connections = nn.Parameter(torch.eye(WIDTH).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.connections, x.flatten(0, -2).t())


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.shapeless = linear(), nn.LazyLinear(WIDTH)

    def forward(self, x):
        return self.shapeless(self.body(x))


class Energy(nn.Module):
    """Returns the gradient of its output with respect to its input, so that training differentiates twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        return force


REFUSED = {
    "sparse embedding": (SparseEmbedding, "words.weight", tokens(11, 2, 5)),
    "sparse gradient of a function": (SparseFunctionalEmbedding, "table", tokens(11, 2, 5)),
    "complex": (ComplexWeight, "filter", normal(2, 3, WIDTH)),
    "sparse parameter": (SparseWeight, "connections", normal(2, 3, WIDTH)),
    "differentiated twice": (Energy, r"body\.\d\.weight", normal(2, 3, WIDTH)),
    "without a shape": (Lazy, "shapeless.weight", normal(2, 3, WIDTH)),
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
    module = nn.Sequential(linear(), ComplexWeight())
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
