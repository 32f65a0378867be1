"""Model, engine and assertions shared by the checkpoint tests."""

import tracemalloc

import pytest
import torch
from torch import nn
from toys import mean_square, outcome, train

import patrickstar as ps


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
    return ps.Engine(Model, config(**options), meter=ps.testing.NoMeter())


IDS = torch.arange(8) % 13


def train_steps(engine, steps=2):
    train(engine, [(IDS,)] * steps)


def assert_refused(engine, path, *words):
    """Assert that loading fails with `words` in its message and changes nothing; return the peak of Python's memory."""
    before = outcome(engine)
    tracemalloc.start()
    try:
        with pytest.raises(ps.errors.CheckpointError) as raised:
            engine.load(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    ps.testing.assert_same_bits(before, outcome(engine), "state before the load")
    assert all(word in str(raised.value) for word in words), str(raised.value)
    return peak_bytes
