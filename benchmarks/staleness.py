"""Does training with delayed or lock-free updates learn as well as the exact step?

python benchmarks/staleness.py [--steps 2000] [--model gpt-1m] [--rate 1e-3] [--beta1 0.9] [--seeds 3]
Needs `pip install '.[plots]'`. With another rate, beta1 or number of seeds it prints its table, and leaves
the results and the picture as they are.

A GPT is trained on nine tenths of the files of the standard library. The loss on the others is measured along the way,
with the parameters that the next forward would read, and at the end after all updates. Each seed has its own initial
values and order of batches, the same for each update.

Lock-free updates follow a log that this script writes: between two steps a quarter of the pages is updated, in turn, in
the reverse order of the chunks. That is the order on a disk whose rate is a quarter of what the exact step needs.
"""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from report import options, publish, table
from steps import train_step
from torch.optim.lr_scheduler import LambdaLR

import patrickstar as ps
from patrickstar._cli.corpus import standard_library
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.tokenizer import _encode, train_tokenizer
from patrickstar._cli.train import learning_rate_factor
from patrickstar._models.model_source import find_model
from patrickstar._step.update_log import FORMAT
from patrickstar.testing import NoMeter

SEQUENCE, BATCH, VALIDATION_BATCHES = 128, 8, 24
MEASUREMENTS = 20
RATE, BETA1, SEEDS = 1e-3, 0.9, 3
WARMUP_STEPS, MAX_NORM = 50, 1.0
AFTER, SWEEP_STEPS = 40, 4
"""First step with late updates, and steps in which lock-free updates sweep all pages."""
DISK_SLOWER = 4
"""Time of the disk for all states, in steps without a disk: that of an exact or delayed step."""
Tokens = list[NDArray[np.unsignedinteger]]
"""Those of the training and of the validation."""
UPDATES = "exact", "delayed", "lock-free"
PICTURE = Path(__file__).parents[1] / "docs" / "staleness.svg"


def write_log(path: Path, pages: dict[str, Any], steps: int) -> None:
    """Write the log of a run in which each interval updates the next pages, so that `SWEEP_STEPS` sweep all."""
    header = {"format": FORMAT, "after_step": AFTER - 1, "after": AFTER, "gradient_dtype": "fp32", "chunks": pages}
    order = [(int(chunk), number) for chunk in reversed(pages) for number in range(_count(pages[chunk]))]
    used = dict.fromkeys(order, AFTER - 1)

    def lines() -> Iterator[dict[str, Any]]:
        for step in range(AFTER, steps + 1):
            turn = (step - AFTER - 1) % SWEEP_STEPS
            due = order[turn * len(order) // SWEEP_STEPS : (turn + 1) * len(order) // SWEEP_STEPS]
            due = due if step > AFTER else []
            yield {"step": step, "updates": [[*page, used[page] + 1, step - 1] for page in due]}
            used.update(dict.fromkeys(due, step - 1))

    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines())))


def _count(chunk: dict[str, Any]) -> int:
    """Return the number of pages of a chunk."""
    numel = max(first + numel for _, first, numel in chunk["params"])
    return -(-numel // chunk["page_numel"])


def engine_of(model: str, update: ps.Delayed | ps.LockFree | None, seed: int, optimizer: ps.Optimizer) -> ps.Engine:
    source = find_model(model, None)
    torch.manual_seed(seed)
    build, weights = source.open()
    budgets = {"device_memory": "1GiB", "host_memory": "1GiB", "chunk_size": "64KiB"}
    config = ps.Config(device="cpu", update=update, optimizer=optimizer, **budgets)
    return ps.Engine(build, config, weights=weights, meter=NoMeter())


def validation_loss(engine: ps.Engine, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return fmean(engine(input_ids=ids, labels=ids).loss.item() for ids in batches)


def learn(engine: ps.Engine, tokens: Tokens, steps: int, seed: int) -> list[float]:
    """Train, and return the validation losses along the way."""
    scheduler = LambdaLR(engine.optimizer, partial(learning_rate_factor, warmup_steps=WARMUP_STEPS, steps=steps))
    batches, held_out = (
        iter(BatchSampler(part, SEQUENCE, BATCH, of)) for part, of in zip(tokens, (seed, 0), strict=True)
    )
    validation = [next(held_out) for _ in range(VALIDATION_BATCHES)]
    found = []
    for step in range(1, steps + 1):
        train_step(engine, next(batches), max_norm=MAX_NORM)
        scheduler.step()
        if step == steps:
            engine.optimizer.flush()
        if step % (steps // MEASUREMENTS) == 0:
            found.append(validation_loss(engine, validation))
    return found


def losses(
    model: str, steps: int, spec: ps.Optimizer, tokens: Tokens, name: str, seed: int
) -> tuple[list[float], float]:
    """Train on one thread, and return the validation losses and the mean staleness."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        update: ps.Delayed | ps.LockFree | None = None
        if name == "delayed":
            update = ps.Delayed(after=AFTER)
        elif name == "lock-free":
            path = Path(folder) / "updates.jsonl"
            with engine_of(model, ps.LockFree(after=AFTER, log=path), seed, spec):
                pass  # its log describes the pages
            write_log(path, json.loads(path.read_text())["chunks"], steps)
            update = ps.LockFree(after=AFTER, replay=path)
        engine = engine_of(model, update, seed, spec)
    found = learn(engine, tokens, steps, seed)
    staleness = engine.stats.total.staleness
    engine.close(keep=False)
    print(name, seed, f"{found[-1]:.4f}", flush=True)
    return found, staleness


def tokens_of(model: str) -> Tokens:
    """Return the tokens of nine tenths of the files of the standard library, and of every tenth one."""
    vocabulary, corpus = find_model(model, None).vocabulary, standard_library()
    held_out = corpus.paths[9::10]
    training = tuple(path for path in corpus.paths if path not in set(held_out))
    parts = [replace(corpus, paths=paths) for paths in (training, held_out)]
    tokenizer = train_tokenizer(parts[0], vocabulary.size)
    return [_encode(tokenizer, part, vocabulary) for part in parts]


def against(last: list[float], other: list[float]) -> tuple[float, float]:
    """Return mean and standard deviation of the seeds' relative differences."""
    ratios = [value / base - 1 for value, base in zip(last, other, strict=True)]
    return fmean(ratios), stdev(ratios) if len(ratios) > 1 else 0.0


def draw(means: dict[str, list[float]], steps: int) -> None:
    """Draw the mean losses against steps, and against time on a disk `DISK_SLOWER` times too slow."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "staleness"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    numbers = [steps // MEASUREMENTS * number for number in range(1, MEASUREMENTS + 1)]
    for name, values in means.items():
        slower = 1 if name == "lock-free" else DISK_SLOWER
        axes[0].plot(numbers, values, label=name, linewidth=1)
        axes[1].plot([number * slower for number in numbers], values, label=name, linewidth=1)
    axes[0].set(xlabel="steps", ylabel="validation loss")
    axes[1].set(xlabel=f"time, in steps without a disk; the disk is {DISK_SLOWER} times too slow")
    axes[0].legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    given = options(__doc__, steps=2000, model="gpt-1m", rate=RATE, beta1=BETA1, seeds=SEEDS)
    published = (given.rate, given.beta1, given.seeds) == (RATE, BETA1, SEEDS)
    seeds, spec = range(given.seeds), ps.AdamW(lr=given.rate, betas=(given.beta1, 0.999), weight_decay=0.01)
    run = partial(losses, given.model, given.steps, spec, tokens_of(given.model))
    runs = list(product(UPDATES, seeds))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))
    means = {
        name: [fmean(each) for each in zip(*(results[name, seed][0] for seed in seeds), strict=True)]
        for name in UPDATES
    }
    if published:
        draw(means, given.steps)
    rows = []
    for name in UPDATES:
        last, exact = ([results[each, seed][0][-1] for seed in seeds] for each in (name, "exact"))
        difference, deviation = against(last, exact)
        row = {"update": name, "staleness": f"{fmean(results[name, seed][1] for seed in seeds):.2f}"}
        for quarter in (1, 2, 3, 4):
            row[f"step {given.steps * quarter // 4}"] = f"{means[name][MEASUREMENTS * quarter // 4 - 1]:.4f}"
        row |= {"last, by seed": " ".join(f"{value:.4f}" for value in last)}
        rows.append(row | {"last, against exact": f"{difference:+.2%}", "deviation": f"{deviation:.2%}"})
    intro = (
        f"Validation loss of {given.model} on a held-out tenth of the files of the standard library, {BATCH} x "
        f"{SEQUENCE} tokens per step, bf16, AdamW with a peak rate of {given.rate} and beta1 {given.beta1}, "
        f"{WARMUP_STEPS} steps of warm-up and a cosine, gradients clipped to {MAX_NORM}: means of {len(seeds)} seeds. "
        f"Updates are late from step {AFTER}; lock-free ones update a quarter of the pages between two steps. The last "
        f"column is the standard deviation over the seeds of the one before. Curves: docs/staleness.svg."
    )
    if published:
        publish("staleness", intro, rows)
    else:
        print(intro, table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
