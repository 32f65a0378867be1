"""Tiny models and data, which the pages of the documentation take for granted."""

from typing import Any

import torch
from integrations.tiny import VOCABULARY, gpt2
from torch import nn

import patrickstar as ps


class LossModel(nn.Module):
    """Model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        return self.layers(inputs).float().pow(2).mean()


def vectors(count: int = 2) -> list[torch.Tensor]:
    """Return batches for `LossModel`."""
    return [torch.randn(3, 8) for _ in range(count)]


def sequences(count: int = 4, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Return samples of language models, one sequence each."""
    ids = torch.randint(0, VOCABULARY, (count, length))
    return [{"input_ids": row, "labels": row} for row in ids]


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Return batches of language models, of two sequences each."""
    return [{name: torch.stack([row, row]) for name, row in sample.items()} for sample in sequences(count)]


def engine_of(model: Any = gpt2, **options: Any) -> ps.Engine:
    """Create an engine with budgets that suffice."""
    return ps.initialize(model, {"device_memory": "1GiB", "host_memory": "1GiB", **options}).engine
