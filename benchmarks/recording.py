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
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import publish
from trainer import build

import patrickstar as ps
from patrickstar._models.presets import PRESETS
from patrickstar._report.page import write_report
from patrickstar._report.run_file import read_run

WARM_UP = 4
STEPS = 1000
CHROMIUM = shutil.which("chromium")
BUDGETS = {"everything fits": {}, "a quarter of the parameters fits": {"device_memory": 1.0}}


def step(engine: ps.Engine, batch: dict[str, torch.Tensor]) -> None:
    engine.backward(engine(**batch).loss)
    engine.clip_grad_norm_(1.0)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def batches(options: argparse.Namespace, model: str) -> Iterator[dict[str, torch.Tensor]]:
    vocabulary = PRESETS[model].config().vocab_size
    while True:
        ids = torch.randint(0, vocabulary, (options.batch, options.sequence))
        yield {"input_ids": ids, "labels": ids}


def seconds_of_pairs(engine: ps.Engine, options: argparse.Namespace, log: Path) -> list[tuple[float, float]]:
    """Return the seconds of a recorded step and of one that is not, in pairs."""
    data, pairs = batches(options, options.model), []
    for _ in range(WARM_UP):
        step(engine, next(data))
    for number in range(options.rounds):
        taken = {}
        for recorded in (True, False) if number % 2 else (False, True):
            with engine.record(log) if recorded else nullcontext():  # a run is described once
                started = time.perf_counter()
                step(engine, next(data))
                taken[recorded] = time.perf_counter() - started
        pairs.append((taken[True], taken[False]))
    return pairs


def overhead(options: argparse.Namespace, name: str, budgets: dict[str, Any], log: Path) -> list[str]:
    """Return the row of a budget."""
    model = build(options.model)
    nbytes = 2 * sum(param.numel() for param in model.parameters())
    # Non-model data of the step beside a quarter of the parameters.
    limits = {key: nbytes // 4 + (1 << 29) for key in budgets}
    engine, _ = ps.initialize(model, ps.Config(device=options.device, **limits))
    pairs = seconds_of_pairs(engine, options, log)
    moved = engine.stats.last.h2d_bytes
    engine.close(keep=False)
    ratios = sorted(recorded / plain for recorded, plain in pairs)
    return [
        f"{options.model}, {name}",
        f"{moved / 1e6:.0f} MB",
        f"{median(plain for _, plain in pairs):.4f}",
        f"{median(recorded for recorded, _ in pairs):.4f}",
        f"{median(ratios):.3f}",
        f"{ratios[0]:.3f} - {ratios[-1]:.3f}",
    ]


def long_log(options: argparse.Namespace, folder: Path) -> Path:
    """Return the log of a thousand steps, repeated from a few."""
    log = folder / "few.jsonl"
    engine, _ = ps.initialize(
        build(options.large), ps.Config(device=options.device, device_memory="4GiB", host_memory="12GiB")
    )
    data = batches(options, options.large)
    with engine.record(log) as recording:
        for _ in range(4):
            step(engine, next(data))
            recording.log(loss=1.0, tokens=options.batch * options.sequence)
    engine.close(keep=False)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("run", "step", "timeline")}
    long = by_kind["run"]
    for number in range(1, STEPS + 1):
        long.append(by_kind["step"][-1] | {"step": number})
        if number & (number - 1) == 0:
            long.append(by_kind["timeline"][-1] | {"step": number})
    path = folder / "long.jsonl"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="gpt-40m")
    parser.add_argument("--large", default="gpt-0.7b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [overhead(options, *case, folder / "log.jsonl") for case in BUDGETS.items()]
        log, page = long_log(options, folder), folder / "page.html"
        started = time.perf_counter()
        write_report([read_run(log)], page)
        made_s = time.perf_counter() - started
        paint_s = first_paint_s(page)
        size = page.stat().st_size
    shown = "not measured, no Chromium" if paint_s is None else f"{paint_s:.2f} s"
    publish(
        "recording",
        options.device,
        f"A step with a timeline, written to a log, against one without: limit 1.01. bf16, {options.batch} x "
        f"{options.sequence} tokens.\n\nPage of {STEPS} steps of {options.large}: made in {made_s:.1f} s (limit 10 s), "
        f"{size / 1e6:.2f} MB (limit 5 MB), first paint in a headless Chromium after {shown} (limit 2 s).",
        ["case", "to the device", "step, s", "recorded step, s", "ratio (median of pairs)", "range"],
        rows,
    )


if __name__ == "__main__":
    main()
