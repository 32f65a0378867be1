"""Weights that are used several times: tied, shared between blocks, or read by the loss."""

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import mean_square, module

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ModelError

from .zoo import WIDTH, Stack, linear, next_token_loss, normal_batches, tokens, trains, update


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, WIDTH), linear(), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def test_tied_embedding_and_head(config):
    batches = [(tokens(11, 2, 5, seed=step),) for step in range(3)]
    testing.assert_exact(TiedLanguageModel, batches, config, loss_fn=next_token_loss)


def test_one_block_object_at_several_depths(config, checkpointing):
    def shared():
        block = nn.Sequential(linear(), nn.Tanh())
        return Stack([block, linear(), block], checkpointing)

    testing.assert_exact(shared, normal_batches(), config)


def test_siamese_towers(config):
    tower = {"tower": lambda: nn.Sequential(linear(), nn.Tanh(), linear())}
    siamese = module(lambda m, left, right: m.tower(left) - m.tower(right), **tower)
    batches = [left + right for left, right in zip(normal_batches(3), normal_batches(6)[3:], strict=True)]
    testing.assert_exact(siamese, batches, config)


@trains(lambda: Stack([linear()]))
def test_a_weight_read_by_the_loss_outside_forward(trainer, optimizer):
    for (x,) in normal_batches():
        yield update(trainer, optimizer, mean_square(F.linear(trainer(x), trainer.module.head.weight)))


@trains(lambda: Stack([linear()]))
def test_a_penalty_on_all_weights_outside_forward(trainer, optimizer):
    for (x,) in normal_batches():
        penalty = sum(p.float().pow(2).sum() for p in trainer.module.parameters())
        yield update(trainer, optimizer, mean_square(trainer(x)) + 0.01 * penalty)


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
    with pytest.raises(ModelError, match=r"(?=.*'first\.weight')(?=.*'second').*share memory"):
        ps.initialize(partial(Sharing, kind), ps.Config(device="cpu"))


@pytest.mark.parametrize("kind", ["rows", "columns", "expanded, frozen", "two buffers"])
def test_shared_memory_without_shared_elements(kind, config):
    testing.assert_exact(partial(Sharing, kind), normal_batches(), config)
