"""Model, engine and assertions shared by the checkpoint tests."""

import pytest
import torch
from torch import nn
from toys import mean_square, outcome, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar.errors import CheckpointError


class Model(nn.Module):
    """Model with tied, frozen and non-contiguous parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 24)
        self.conv = nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 13)
        self.head.bias.requires_grad_(False)
        self.tied = self.words

    def forward(self, ids):
        hidden = self.norm(self.words(ids))
        image = self.conv(hidden[:6].reshape(1, 4, 6, 6)).mean()
        return mean_square(self.head(hidden)) + image


def config(**options):
    return ps.Config(**{"device": "cpu", "precision": "bf16", "chunk_size": 512} | options)


def engine_of(**options):
    torch.manual_seed(0)
    return Engine(Model, config(**options), meter=testing.NoMeter())


IDS = torch.arange(8) % 13


def train_steps(engine, steps=2):
    train(engine, [(IDS,)] * steps)


def assert_refused(path, *words):
    """Assert that loading fails with all of `words` in its message and changes nothing."""
    engine = engine_of()
    before = outcome(engine)
    with pytest.raises(CheckpointError) as raised:
        engine.load(path)
    testing.assert_same_bits(before, outcome(engine), "state before the load")
    for word in words:
        assert word in str(raised.value), str(raised.value)
    engine.close()
