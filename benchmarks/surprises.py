"""Whether what a rehearsal says fits does run, and what it refuses does not, over random models, budgets and batches.

python benchmarks/surprises.py [--draws 200] [--seed 0] [--directory DIR]
Each draw is rehearsed, then trained for three steps whatever was said. With a directory, half of the draws have a disk.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter

import torch
from foresight import RAM, build, step_of
from report import publish

import patrickstar as ps
from patrickstar.engine.rehearsal import rehearse, rehearse_here
from patrickstar.errors import BudgetError

PER_PROCESS = 1
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


def run(draw: dict, directory: str | None) -> dict:
    step = step_of(draw)

    def fits(train, config: ps.Config) -> str:
        try:
            train(config)
        except BudgetError as error:
            return str(error)
        return ""

    def rehearsed(config: ps.Config):
        return rehearse_here(lambda: build(draw), config, step, torch.device("cpu"))

    def trained(config: ps.Config) -> None:
        engine, _ = ps.initialize(lambda: build(draw), config)
        try:
            for _ in range(STEPS):
                step(engine)
        finally:
            engine.close(keep=False)

    plenty = ps.Config(device="cpu", device_memory="16GiB", host_memory="16GiB")
    wide = rehearse(lambda: build(draw), plenty, step, RAM)
    numel = sum(param.numel() for param in build(draw).parameters())
    config = ps.Config(
        device="cpu",
        device_memory=int(wide.stats.device_peak_non_model_bytes * draw["non_model"] + 2 * numel * draw["params"]),
        host_memory=int(12 * numel * draw["host"]) + (1 << 26),
        disk=ps.Disk(directory) if draw["disk"] and directory is not None else None,
    )
    return {"said": fits(rehearsed, config), "happened": fits(trained, config), "draw": draw}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory")
    parser.add_argument("--some", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.some:
        for draw in json.loads(options.some):
            print("found " + json.dumps(run(draw, options.directory)), flush=True)
        return
    counts: Counter[tuple[bool, bool]] = Counter()
    chosen = draws(options.draws, options.seed)
    for first in range(0, len(chosen), PER_PROCESS):
        some = chosen[first : first + PER_PROCESS]
        command = [sys.executable, __file__, "--some", json.dumps(some)]
        command += ["--directory", options.directory] if options.directory else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if line.startswith("found "):
                found = json.loads(line.removeprefix("found "))
                said, happened = not found["said"], not found["happened"]
                counts[said, happened] += 1
                if said != happened:
                    print(found, flush=True)
    publish(
        "surprises",
        "cpu",
        f"{options.draws} random GPTs, budgets and batches (seed {options.seed}): what a rehearsal said, and what "
        f"happened in three steps. Limits: what was said to fit runs always; what was refused is refused in 95 %.",
        ["said", "it ran", "it was refused"],
        [
            [name, str(counts[said, True]), str(counts[said, False])]
            for name, said in (("it fits", True), ("it does not fit", False))
        ],
    )


if __name__ == "__main__":
    main()
