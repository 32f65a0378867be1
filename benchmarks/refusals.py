"""Follow every setting that a refusal names, over random models, batches and budgets: each has to run.

python benchmarks/refusals.py [--refused 200] [--seed 0] --directory DIR
Draws are made until so many are refused. Each refusal, and each run of a named setting, is a process of its own.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from foresight import build, needs
from fresh_processes import in_fresh_processes
from report import options, publish
from surprises import STEPS, run_steps

import patrickstar as ps

NAMED = re.compile(r"Each of these alone is enough, verified by dry runs: (.*?)\. The dry run was refused")


MOST_DRAWS = 20
"""Draws per refusal, at most."""


def draws(count: int, seed: int) -> Iterator[dict]:
    chosen = random.Random(seed)
    for number in range(count):
        yield {
            "number": number,
            "layers": chosen.randint(1, 4),
            "hidden": chosen.choice([64, 128, 192, 256]),
            "vocab": chosen.choice([512, 2048, 8192]),
            "batch": chosen.choice([1, 2, 3, 4, 8]),
            "sequence": chosen.choice([64, 128, 256]),
            "checkpointing": chosen.random() < 0.3,
            "device": chosen.uniform(0.02, 0.9),
            "host": chosen.uniform(0.3, 1.5),
            "disk": chosen.random() < 0.3,
        }


def sampled(draw: dict) -> bool:
    """Return whether a sample is given; without one the first step is refused."""
    return bool(draw["number"] % 2 == 0)


def configured(draw: dict, directory: str) -> ps.Config:
    """Return budgets that are parts of what the model needs without any limit."""
    non_model_bytes, param_bytes, numel = needs(draw, "fp32")
    # Without a sample, the model data alone should not be refused.
    host = draw["host"] if sampled(draw) else max(1.1, draw["host"])
    return ps.Config(
        device="cpu",
        precision="fp32",
        device_memory=int((non_model_bytes + param_bytes) * draw["device"]),
        host_memory=int(12 * numel * host) + (1 << 20),
        disk=ps.Disk(directory=directory) if draw["disk"] else None,
    )


def train(draw: dict, config: ps.Config, checkpointing: bool = False, sampled: bool = True) -> str:
    """Return the message of the refusal, empty if the model trains."""
    ids = torch.zeros(draw["batch"], draw["sequence"], dtype=torch.int64)

    def make() -> torch.nn.Module:
        model = build(draw)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    sample = {"input_ids": ids, "labels": ids} if sampled else None
    return run_steps(lambda: ps.initialize(make, config, sample=sample)[0], draw)


def follow(setting: str, draw: dict, config: ps.Config, directory: str, apply: Callable[..., str]) -> str:
    """Train in a fresh process as one named setting says; return the message of a refusal."""
    changed: dict[str, Any] = {}
    if found := re.fullmatch(r"(device_memory|host_memory)='(\d+MiB)'", setting):
        changed = {found[1]: int(found[2].removesuffix("MiB")) << 20}
    elif setting == "disk=ps.Disk(directory)":
        changed = {"disk": ps.Disk(directory=directory)}
    elif setting == "activation_offload=True":
        changed = {"activation_offload": True}
    elif found := re.fullmatch(r"a batch of (\d+) in place of \d+", setting):
        draw = draw | {"batch": int(found[1])}
    else:
        assert setting.startswith("activation checkpointing"), setting
    return apply(train, draw, config.model_copy(update=changed), setting.startswith("activation checkpointing"), False)


def try_draw(draw: dict, apply: Callable[..., Any], directory: str) -> tuple[str, dict[str, str]]:
    """Return the refusal, empty if there is none, and the outcome of each named setting."""
    config = apply(configured, draw, directory)
    refusal = apply(train, draw, config, False, sampled(draw))
    found = NAMED.search(refusal)
    named = found[1].split("; ") if found else []
    return refusal, {setting: follow(setting, draw, config, directory, apply) for setting in named}


def main() -> None:
    given = options(__doc__, refused=200, seed=0, directory=str)
    refused, beforehand, advised, without_batch = 0, 0, 0, 0
    tried, ran = Counter[str](), Counter[str]()
    candidates = draws(MOST_DRAWS * given.refused, given.seed)
    results = in_fresh_processes(partial(try_draw, directory=given.directory), candidates)
    for draw, (refusal, outcomes) in results:
        if "activations and accumulated gradients not counted" in refusal:
            without_batch += 1
            continue
        refused += bool(refusal)
        beforehand += bool(refusal) and sampled(draw)
        advised += bool(outcomes)
        for setting, failure in outcomes.items():
            lever = "smaller batch" if setting.startswith("a batch") else re.split(r"[=(]", setting)[0].strip()
            tried[lever] += 1
            ran[lever] += not failure
            if failure:
                print(json.dumps({"draw": draw, "setting": setting, "failure": failure}), flush=True)
        if refusal and not outcomes:
            print(json.dumps({"draw": draw, "without a setting": refusal}), flush=True)
        if refused == given.refused:
            break
    publish(
        "refusals",
        "cpu",
        f"{refused} random GPTs, batches and budgets that were refused (seed {given.seed}, fp32): {beforehand} "
        f"before training, by a sample batch, the others in the first step. {advised} refusals named settings that "
        f"suffice alone; each was followed once, in a fresh process, for {STEPS} steps. {without_batch} more were "
        f"refused before a batch was known; these refusals say that activations are not counted.",
        [[lever, str(tried[lever]), str(ran[lever])] for lever in sorted(tried)],
        ["setting", "named", "ran"],
    )


if __name__ == "__main__":
    main()
