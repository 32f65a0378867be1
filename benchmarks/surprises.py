"""Check fit predictions of dry runs against real runs, over random models, budgets and batches.

python benchmarks/surprises.py [--draws 200] [--seed 0] [--directory DIR] [--precision bf16]
Each draw is dry-run in one process and trained for three steps in another, regardless of the prediction. With a
directory, half of the draws have a disk. Draws run side by side, one per core: only memory matters.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from foresight import build, needs, step_of
from fresh_processes import in_fresh_processes
from report import options, publish

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.fit_check import FitCheck, Trial
from patrickstar._tiers.hardware import Hardware
from patrickstar.errors import BudgetError

STEPS = 3


def draws(count: int, seed: int) -> list[dict]:
    chosen = random.Random(seed)
    return [
        {
            "layers": chosen.randint(1, 6),
            "hidden": chosen.choice([128, 256, 384, 512]),
            "vocab": chosen.choice([2048, 8192, 16384]),
            "batch": chosen.choice([1, 2, 4, 8]),
            "sequence": chosen.choice([64, 128, 256]),
            "checkpointing": chosen.random() < 0.5,
            "non_model": chosen.uniform(0.5, 1.6),
            "params": chosen.uniform(0.1, 1.2),
            "host": chosen.uniform(0.5, 1.6),
            "disk": chosen.random() < 0.5,
        }
        for _ in range(count)
    ]


def outcome(action: Callable[[], object]) -> str:
    """Return the message of the BudgetError of a run or dry run; empty if it succeeds."""
    try:
        action()
    except BudgetError as error:
        return str(error)
    return ""


def options_of(draw: dict, directory: str | None, precision: str) -> ps.Config:
    non_model_bytes, param16_bytes, numel = needs(draw, precision)
    return ps.Config(
        device="cpu",
        precision=precision,
        device_memory=int(non_model_bytes * draw["non_model"] + param16_bytes * draw["params"]),
        host_memory=int(12 * numel * draw["host"]) + (1 << 26),
        disk=ps.Disk(directory) if draw["disk"] and directory is not None else None,
    )


def predict(draw: dict, config: ps.Config) -> str:
    """Predict with the dry run that `ps.initialize` does of a sample."""
    ids = torch.zeros(draw["batch"], draw["sequence"], dtype=torch.int64)
    check = FitCheck(Engine, lambda: build(draw), Hardware(torch.device("cpu")))
    return outcome(lambda: check.run(Trial(config, (), {"input_ids": ids, "labels": ids})))


def train_draw(draw: dict, config: ps.Config) -> str:
    step = step_of(draw)

    def train() -> None:
        engine = Engine(lambda: build(draw), config)
        try:
            for _ in range(STEPS):
                step(engine)
        finally:
            engine.close(keep=False)

    return outcome(train)


def compare(draw: dict, apply: Callable[..., Any], directory: str | None, precision: str) -> tuple[str, str]:
    """Return what was predicted and what happened."""
    config = apply(options_of, draw, directory, precision)
    return apply(predict, draw, config), apply(train_draw, draw, config)


def main() -> None:
    given = options(__doc__, draws=200, seed=0, directory=None, precision="bf16")
    counts: Counter[tuple[bool, bool]] = Counter()
    for draw, (predicted, actual) in in_fresh_processes(
        partial(compare, directory=given.directory, precision=given.precision), draws(given.draws, given.seed)
    ):
        counts[not predicted, not actual] += 1
        if bool(predicted) != bool(actual):
            print(json.dumps({"draw": draw, "predicted": predicted, "actual": actual}), flush=True)
    disks = "half of them with a disk tier" if given.directory else "none with a disk"
    publish(
        "surprises",
        f"{given.draws} random GPTs in {given.precision}, budgets and batches (seed {given.seed}), {disks}: prediction "
        f"of a dry run, and outcome of {STEPS} training steps. Limits: a predicted fit always runs; a predicted misfit "
        f"fails in at least 98 % of the cases.",
        [
            [name, str(counts[fits, True]), str(counts[fits, False])]
            for name, fits in (("fits", True), ("does not fit", False))
        ],
        ["prediction", "ran", "failed with BudgetError"],
    )


if __name__ == "__main__":
    main()
