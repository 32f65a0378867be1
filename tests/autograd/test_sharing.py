"""Weights that are used several times: tied, shared, read by the loss; and models that are refused by name."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module, update

import patrickstar as ps

from .zoo import WIDTH, Stack, linear, next_token_loss, normal, normal_batches, small_chunks, tokens, trains


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, WIDTH), linear(), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def test_tied_embedding_and_head(config):
    batches = [(tokens(11, 2, 5, seed=step),) for step in range(3)]
    ps.testing.assert_exact(TiedLanguageModel, batches, config, loss_fn=next_token_loss)


def test_one_block_object_at_several_depths(config, checkpointing):
    def shared():
        block = nn.Sequential(linear(), nn.Tanh())
        return Stack([block, linear(), block], checkpointing)

    ps.testing.assert_exact(shared, normal_batches(), config)


def test_siamese_towers(config):
    tower = {"tower": lambda: nn.Sequential(linear(), nn.Tanh(), linear())}
    siamese = module(lambda m, left, right: m.tower(left) - m.tower(right), **tower)
    batches = [left + right for left, right in zip(normal_batches(3), normal_batches(6)[3:], strict=True)]
    ps.testing.assert_exact(siamese, batches, config)


@trains(lambda: Stack([linear()]))
def test_a_weight_read_by_the_loss_outside_forward(trainer, optimizer):
    for (x,) in normal_batches():
        yield update(trainer, mean_square(nn.functional.linear(trainer(x), trainer.module.head.weight)))


@trains(lambda: Stack([linear()]))
def test_a_penalty_on_all_weights_outside_forward(trainer, optimizer):
    for (x,) in normal_batches():
        penalty = sum(p.float().pow(2).sum() for p in trainer.module.parameters())
        yield update(trainer, mean_square(trainer(x)) + 0.01 * penalty)


class Sharing(nn.Module):
    """Model with a second parameter, or another tensor, in the memory of its first or of a buffer of its own."""

    def __init__(self, kind):
        super().__init__()
        self.first, memory = linear(), torch.randn(WIDTH, 2 * WIDTH)
        weight = self.first.weight
        if kind in ("tied by data", "transposed"):
            self.second = nn.Parameter(weight.data if kind == "tied by data" else weight.data.t())
        elif kind == "slice":
            self.second = nn.Parameter(weight.data[1:2])
        elif kind == "buffer":
            self.register_buffer("second", weight.detach())
        elif kind == "attribute":
            self.second = weight.detach()
        elif kind == "rows":
            weight.data, self.second = memory.view(-1, WIDTH)[:WIDTH], nn.Parameter(memory.view(-1, WIDTH)[WIDTH:])
        elif kind == "columns":
            weight.data, self.second = memory[:, :WIDTH], nn.Parameter(memory[:, WIDTH:])
        elif kind == "expanded, frozen":
            self.second = nn.Parameter(memory[0, 0].expand(WIDTH, WIDTH), requires_grad=False)
        else:
            self.second, self.third = nn.Buffer(memory[:, :WIDTH]), nn.Buffer(memory[:, :WIDTH])

    def forward(self, x):
        return (self.first(x).unsqueeze(-2) * self.second).sum(-1)


@pytest.mark.parametrize("kind", ["tied by data", "transposed", "slice", "buffer", "attribute"])
def test_shared_elements_are_refused_by_name(kind):
    with pytest.raises(ps.errors.ModelError, match=r"(?=.*'first\.weight')(?=.*'second').*share memory"):
        ps.initialize(partial(Sharing, kind), ps.Config(device="cpu"))


@pytest.mark.parametrize("kind", ["rows", "columns", "expanded, frozen", "two buffers"])
def test_shared_memory_without_shared_elements(kind, config):
    ps.testing.assert_exact(partial(Sharing, kind), normal_batches(), config)


def force(m, x):
    """Return the gradient of the output with respect to the input, so that training differentiates twice."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.body(x).sum(), x, create_graph=True)[0]


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
    lambda m, x: torch.fft.ifft(torch.fft.fft(m.body(x).float()) * m.filter).real,
    body=linear,
    filter=lambda: nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
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
    with pytest.raises(ps.errors.ModelError, match=name):
        engine, _ = ps.initialize(model_func, small_chunks(precision))
        engine.backward(mean_square(engine(example)))


def test_model_without_parameters(precision):
    with pytest.raises(ps.errors.ModelError, match="no parameters"):
        ps.initialize(lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), small_chunks(precision))


def test_refusal_leaves_the_module_as_it_was(precision):
    module = nn.Sequential(linear(), complex_weight())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ps.errors.ModelError, match="filter"):
        ps.initialize(module, small_chunks(precision))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module(normal(2, 3, WIDTH)).isfinite().all()


def test_module_that_another_engine_holds(precision):
    module = linear()
    engine, _ = ps.initialize(module, small_chunks(precision))
    with pytest.raises(ps.errors.ModelError, match="weight"):
        ps.initialize(module, small_chunks(precision))
    engine.close()
