"""Compare the engine with a plain PyTorch loop in the same mixed precision if everything fits: GPT-2 124M, bf16.

python benchmarks/throughput.py [--model gpt2-124m] [--precision bf16] [--batch 1] [--sequence 512] [--rounds 9]
Steps of both alternate in one process, PyTorch with its fused AdamW; the ratio is the median over pairs. Before that,
the losses of a few steps must be bit-identical to those of the reference trainer, whose AdamW is PyTorch's without
fused multiply-adds. bf16 needs AVX-512. On a GPU: make gpu CALLS=steps.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu_stages.peers import FUSED
from report import filled, options, publish
from steps import alternating, gpt, ratio_cells, tokens, train_step

import patrickstar as ps
from patrickstar.testing import ReferenceTrainer


def seeded(make: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return make(*args)


def run(checkpointing: bool, given: argparse.Namespace) -> dict[str, str]:
    build = partial(gpt, given.model, checkpointing)
    config = ps.Config(device="cpu", precision=given.precision)
    fused = ps.Config(device="cpu", precision=given.precision, optimizer=FUSED)
    makers = (ReferenceTrainer, config), (ReferenceTrainer, fused), (ps.Engine, config)
    reference, plain, engine = (seeded(make, build, config) for make, config in makers)
    ids = tokens(given.model, given.batch, given.sequence)
    for _ in range(3):  # warm-up, trace, and the first planned step
        expected, loss, _ = (train_step(each, ids).item() for each in (reference, engine, plain))
        assert loss == expected, f"losses differ: {expected} and {loss}"
    del reference
    losses: dict[str, list[float]] = {"plain": [], "engine": []}
    seconds = alternating(
        {
            "plain": lambda: losses["plain"].append(train_step(plain, ids).item()),
            "engine": lambda: losses["engine"].append(train_step(engine, ids).item()),
        },
        given.rounds,
        warm_up=0,
    )
    for one, other in zip(*losses.values(), strict=True):
        assert abs(one - other) < 0.01 * one, f"losses differ: {one} and {other}"
    transferred = engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes
    engine.close()
    rate = {f"{side} tokens/s": f"{ids.numel() / median(values):,.0f}" for side, values in seconds.items()}
    row = {"checkpointing": "on" if checkpointing else "off"} | rate | ratio_cells(seconds["plain"], seconds["engine"])
    return row | {"bytes transferred per step": f"{transferred}"}


def main() -> None:
    given = options(__doc__, model="gpt2-124m", precision="bf16", batch=1, sequence=512, rounds=9)
    rows = [run(checkpointing, given) for checkpointing in (False, True)]
    publish("throughput", filled("throughput", given=given), rows)


if __name__ == "__main__":
    main()
