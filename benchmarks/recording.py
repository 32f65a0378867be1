"""Measure what recording costs a step, and how large and how fast the page of a long run is.

python benchmarks/recording.py [--device cpu] [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 15]
Steps of one engine alternate: one with a timeline that is written to a log, one without. The page is made from the log
of a few steps of `--large`, whose lines are repeated until there are a thousand steps, with a timeline at each power of
two; a headless Chromium, if there is one, opens it.
"""

import argparse
import json
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from report import options, publish
from steps import NO_DROPOUT, gpt, ratio_cells, seconds_of, tokens, train_step

import patrickstar as ps
from patrickstar._report.page import write_report
from patrickstar._report.run_file import read_run

WARM_UP = 4
STEPS = 1000
CHROMIUM = shutil.which("chromium")
BUDGETS = {"everything fits": {}, "a quarter of the parameters fits": {"device_memory": 1.0}}


def seconds_of_sides(engine: ps.Engine, given: argparse.Namespace, log: Path) -> dict[bool, list[float]]:
    """Return the seconds of recorded steps and of others, which alternate."""
    sides: dict[bool, list[float]] = {True: [], False: []}

    def step() -> None:
        train_step(engine, tokens(given.model, given.batch, given.sequence), max_norm=1.0)

    for _ in range(WARM_UP):
        step()
    for number in range(given.rounds):
        for recorded in (True, False) if number % 2 else (False, True):
            with engine.record(log) if recorded else nullcontext():  # a run is described once
                sides[recorded].append(seconds_of(step))
    return sides


def overhead(given: argparse.Namespace, name: str, budgets: dict[str, Any], log: Path) -> dict[str, str]:
    """Return the row of a budget."""
    model = gpt(given.model, **NO_DROPOUT)
    nbytes = 2 * sum(param.numel() for param in model.parameters())
    # Non-model data of the step beside a quarter of the parameters.
    limits = {key: nbytes // 4 + (1 << 29) for key in budgets}
    engine, _ = ps.initialize(model, ps.Config(device=given.device, **limits))
    sides = seconds_of_sides(engine, given, log)
    moved = engine.stats.last.h2d_bytes
    engine.close(keep=False)
    return {
        "case": f"{given.model}, {name}",
        "to the device": f"{moved / 1e6:.0f} MB",
        "step, s": f"{median(sides[False]):.4f}",
        "recorded step, s": f"{median(sides[True]):.4f}",
        **ratio_cells(sides[True], sides[False]),
    }


def long_log(given: argparse.Namespace, folder: Path) -> Path:
    """Return the log of a thousand steps, repeated from a few."""
    log, path = folder / "few.jsonl", folder / "long.jsonl"
    config = ps.Config(device=given.device, device_memory="4GiB", host_memory="12GiB")
    engine, _ = ps.initialize(gpt(given.large, **NO_DROPOUT), config)
    with engine.record(log) as recording:
        for _ in range(4):
            train_step(engine, tokens(given.large, given.batch, given.sequence), max_norm=1.0)
            recording.log(loss=1.0, tokens=given.batch * given.sequence)
    engine.close(keep=False)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    last = {line["kind"]: line for line in lines}
    long = [line for line in lines if line["kind"] == "run"]
    for number in range(1, STEPS + 1):
        kinds = ("step", "timeline") if number & (number - 1) == 0 else ("step",)
        long += [last[kind] | {"step": number} for kind in kinds]
    path.write_text("".join(json.dumps(line) + "\n" for line in long))
    return path


def first_paint_s(page: Path) -> float | None:
    """Return the seconds from the navigation to the first contentful paint, and that all pictures are drawn."""
    if CHROMIUM is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.goto(page.as_uri())
        opened.wait_for_selector(".picture .main-svg")
        paint: float = opened.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.close()
    return paint / 1e3


def main() -> None:
    shape = {"batch": 1, "sequence": 512, "rounds": 15}
    given = options(__doc__, device="cpu", model="gpt-40m", large="gpt-0.7b", **shape)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [overhead(given, *case, folder / "log.jsonl") for case in BUDGETS.items()]
        log, page = long_log(given, folder), folder / "page.html"
        made_s = seconds_of(lambda: write_report([read_run(log)], page))
        paint_s = first_paint_s(page)
        size = page.stat().st_size
    shown = "not measured, no Chromium" if paint_s is None else f"{paint_s:.2f} s"
    publish(
        "recording",
        given.device,
        f"A step with a timeline, written to a log, against one without: limit 1.01. bf16, {given.batch} x "
        f"{given.sequence} tokens.\n\nPage of {STEPS} steps of {given.large}: made in {made_s:.1f} s (limit 10 s), "
        f"{size / 1e6:.2f} MB (limit 5 MB), first paint in a headless Chromium after {shown} (limit 2 s).",
        rows,
    )


if __name__ == "__main__":
    main()
