"""Documented uses of the package, which mypy has to accept: `make check` checks this file and nothing runs it."""

import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import patrickstar as ps


def configurations() -> list[ps.Config]:
    return [
        ps.Config(),
        ps.Config(device_memory="6GiB", host_memory=12 << 30, disk=None, precision="bf16"),
        ps.Config(disk="/scratch"),
        ps.Config(disk=Path("/scratch")),
        ps.Config(disk=ps.Disk("/scratch", capacity="200GiB", checksums=False)),
        ps.Config(disk={"directory": "/scratch"}),
        ps.Config(optimizer=ps.AdamW(lr=1e-4, betas=(0.9, 0.95))),
        ps.Config(optimizer=torch.optim.AdamW),
        ps.Config(optimizer=functools.partial(torch.optim.RMSprop, lr=1e-2)),
        ps.Config(optimizer={"name": "AdamW", "lr": 1e-4}),
        ps.Config(optimizer=ps.EMA(ps.AdamW(lr=1e-4), decay=0.999)),
        ps.Config(keep_fp32=("lm_head", "router.*.weight"), chunk_size="64MiB"),
    ]


def train(model: nn.Module, batches: Iterable[torch.Tensor]) -> float:
    ps.join()
    ps.join(timeout=3600)
    total = 0.0
    with ps.initialize(model, {"device_memory": "2GiB"}) as (engine, optimizer):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for batch in batches:
            loss: torch.Tensor = engine(batch).loss
            engine.backward(loss)
            norm: torch.Tensor = engine.clip_grad_norm_(1.0, norm_type=2.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total += loss.item() + norm.item()
        state: dict[str, torch.Tensor] = engine.state_dict()
        engine.save_pretrained("folder", dtype="bf16")
        print(len(state), engine.stats.last.h2d_bytes, [name for name, _ in engine.named_parameters()])
    return total


def initialize(build: ps.Engine | None = None) -> ps.Engine:
    engine, optimizer = ps.initialize(lambda: nn.Linear(2, 2), "config.toml", sample=torch.ones(2, 2))
    groups: list[dict[str, float]] = optimizer.param_groups
    print(groups, ps.Checkpoints(Path("runs"), keep=3).newest())
    return build or engine
