"""Engines whose device and host are so small that a disk is needed, and what to compare them with."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import patrickstar as ps
from patrickstar import testing
from patrickstar.engine.engine import Engine
from patrickstar.errors import BudgetError
from patrickstar.memory.chunk import Chunk

WIDTH = 64
"""Of models here: pages on their way take 60 KiB of the host, and model data has to be more for a disk to be used."""
PAGE_BYTES = 4096
ADAMW = ps.AdamW(lr=1e-2, weight_decay=0.1)

Build = Callable[[], nn.Module]

chunk_sizes = st.sampled_from([1000, 9000, 40000, "auto"])
"""Among them all of: a chunk per parameter, several parameters on a page, several pages per chunk, a few chunks in all."""


@dataclass(frozen=True)
class Room:
    """What device and host have beyond the least, and whether all that may leave the device does at every access."""

    device_bytes: int = 0
    host_bytes: int = 0
    host_share: float = 0.0
    """Of the optimizer's lists."""
    evict_everything: bool = False


rooms = st.builds(
    Room,
    device_bytes=st.sampled_from([0, 0, 700, 12000, 60000]),
    host_bytes=st.integers(0, 40000),
    host_share=st.sampled_from([0.0, 0.0, 0.2, 0.5]),
    evict_everything=st.booleans(),
)


def blocks(count: int = 6) -> nn.Sequential:
    """Layers of one size in a row."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def inputs(count: int, rows: int = 3) -> list[tuple[torch.Tensor]]:
    """What `blocks` takes, the same at each call."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(rows, WIDTH, generator=generator),) for _ in range(count)]


def mean_square(out: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return out.float().pow(2).mean()


def options(precision: str = "bf16", chunk_size: int | str = 9000, **more: Any) -> ps.Config:
    """AdamW, unless another optimizer is given."""
    return ps.Config(device="cpu", precision=precision, chunk_size=chunk_size, **{"optimizer": ADAMW} | more)


def with_budgets(config: ps.Config, device: int | None, host: int | None, disk: ps.Disk | None = None) -> ps.Config:
    """The same under these budgets."""
    return config.model_copy(update={"device_memory": device, "host_memory": host, "disk": disk})


def small_engine(build: Build, config: ps.Config, **hooks: Any) -> Engine:
    """An engine whose pages are as small as a disk takes them."""
    return Engine(build, config, page_bytes=PAGE_BYTES, **{"meter": testing.NoMeter(), "poison": True} | hooks)


def least_bytes(build: Build, config: ps.Config, directory: str | Path) -> tuple[int, int]:
    """The smallest device, and the smallest host beside it, with which the errors say that a disk will do."""
    device = host = 1
    while True:
        try:
            small_engine(build, with_budgets(config, device, host, ps.Disk(directory=directory))).close()
            return device, host
        except BudgetError as error:
            assert error.short_bytes > 0, "an error that names no bytes"
            if "on the host" in str(error).partition("needs")[0]:
                host += error.short_bytes
            elif device < 4096:
                device += error.short_bytes
            else:
                host += error.short_bytes


def on_disk(build: Build, config: ps.Config, directory: str | Path, room: Room, **disk: Any) -> ps.Config:
    """The same under budgets that need a disk."""
    plain = Engine(build, with_budgets(config, None, None), meter=testing.NoMeter())
    layout, together = plain.layout, used_together(plain.module)
    plain.close()
    device = working_set_bytes(layout, together) + room.device_bytes
    lists = 2 + len(config.optimizer.states)
    raise NotImplementedError
