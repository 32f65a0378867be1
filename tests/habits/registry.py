"""Register habits, and run each with an engine whose chunks are evicted at every access, and in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from toys import mean_square

import patrickstar as ps

SAME, EXACT, REFUSED = "same bits as plain PyTorch", "full precision", "refused by name"
WIDTH = 16


@dataclass(frozen=True)
class Habit:
    """One line of the table in docs/habits.md."""

    topic: str
    code: str
    result: str
    script: Callable[..., Any]
    pattern: str = ""
    """Regular expression of the error, for a refused habit."""


HABITS: list[Habit] = []


def habit(topic: str, code: str, result: str = SAME, pattern: str = "") -> Callable[[Any], Any]:
    """Register a function as a habit.

    SAME: `script(trainer)` runs in plain PyTorch and with the engine in fp32, and returns tensors to compare.
    EXACT: `script(engine, folder)` runs with the engine in bf16 and asserts. REFUSED: it raises.
    """

    def register(script: Callable[..., Any]) -> Callable[..., Any]:
        HABITS.append(Habit(topic, code, result, script, pattern))
        return script

    return register


class Tied(nn.Module):
    """Small model with an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.words(ids)))


def build() -> Tied:
    torch.manual_seed(0)
    return Tied()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(step))


def config(precision: str) -> ps.Config:
    return ps.Config(device="cpu", precision=precision, chunk_size=2048, optimizer=ps.AdamW(lr=1e-2))


def managed(precision: str) -> ps.Engine:
    """Return an engine that evicts every evictable chunk at each access, and fills freed memory with NaN."""
    return ps.testing.stressed(build, config(precision))


class Plain:
    """Plain PyTorch behind the engine's calls."""

    def __init__(self) -> None:
        self.module = build()
        self.optimizer = ps.testing.PlainOptimizer([{"params": list(self.module.parameters())}], ps.AdamW(lr=1e-2))

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def backward(trainer: Any, step: int = 0) -> torch.Tensor:
    loss = mean_square(trainer(batch(step)))
    trainer.backward(loss)
    return loss.detach()


def finish(trainer: Any) -> None:
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def train(trainer: Any, steps: int = 2, first: int = 0) -> list[torch.Tensor]:
    losses = []
    for step in range(first, first + steps):
        losses.append(backward(trainer, step))
        finish(trainer)
    return losses
