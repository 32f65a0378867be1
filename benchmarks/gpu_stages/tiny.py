"""Tiny model with one parameter per chunk and transfers in every step, for the sanitizers."""

import torch
from torch import nn

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._tiers.hardware import Hardware

WIDTH = 64


def build() -> nn.Module:
    """Build four layers with a norm each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4)))


def config(device: str) -> ps.Config:
    """Return a configuration with a device budget of three chunks."""
    return ps.Config(device=device, chunk_size=256, device_memory=3 * 2 * WIDTH * (WIDTH + 8))


def train(trainer, optimizer, steps: int = 3) -> list[torch.Tensor]:
    """Train on random numbers; return the losses."""
    losses = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = trainer(x).float().pow(2).mean()
        trainer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def compare(device: str, hardware: Hardware) -> None:
    """Assert bit-exactness with plain PyTorch."""
    torch.manual_seed(0)
    reference = testing.ReferenceTrainer(build, config(device))
    expected = train(reference, reference.optimizer, 5)
    torch.manual_seed(0)
    engine = Engine(build, config(device), meter=testing.NoMeter(), hardware=hardware, poison=True)
    actual = train(engine, engine.optimizer, 5)
    assert engine.stats.total.evictions > 0, "no chunk was evicted"
    testing.assert_same_bits(expected, actual, "losses")
    testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
    engine.close()
