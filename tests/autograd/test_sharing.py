"""Weights that are used several times: tied, shared between blocks, or read by the loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import mean_square

from patrickstar import testing

from .zoo import (
    WIDTH,
    Stack,
    compare_steps,
    linear,
    module,
    next_token_loss,
    normal_batches,
    tokens,
    update,
)


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


def test_a_weight_read_by_the_loss_outside_forward(config):
    def step(trainer, optimizer, x):
        hidden = trainer(x)
        return [update(trainer, optimizer, mean_square(F.linear(hidden, trainer.module.head.weight)))]

    compare_steps(lambda: Stack([linear()]), config, step)


def test_a_penalty_on_all_weights_outside_forward(config):
    def step(trainer, optimizer, x):
        penalty = sum(p.float().pow(2).sum() for p in trainer.module.parameters())
        return [update(trainer, optimizer, mean_square(trainer(x)) + 0.01 * penalty)]

    compare_steps(lambda: Stack([linear()]), config, step)
