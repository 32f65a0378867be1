"""Tiny model with one parameter per chunk and transfers in every step, for the sanitizers."""

import sys
from functools import partial
from pathlib import Path

from torch import nn

import patrickstar as ps
from patrickstar._tiers.hardware import Hardware

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from seeded import compared
from toys import inputs, layers, train

WIDTH = 64


def compare(device: str, hardware: Hardware) -> None:
    """Train four layers with a norm each, with a device budget of three chunks; assert the bits of plain PyTorch."""
    config = ps.Config(device=device, chunk_size=256, device_memory=3 * 2 * WIDTH * (WIDTH + 8))
    build = partial(layers, WIDTH, 4, nn.GELU, partial(nn.LayerNorm, WIDTH))
    with compared(build, config, partial(train, data=inputs(5, WIDTH, rows=4)), hardware=hardware) as engine:
        assert engine.stats.total.evictions > 0, "no chunk was evicted"
