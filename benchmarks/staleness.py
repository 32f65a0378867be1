"""Does training with delayed updates learn as well as the exact step?

python benchmarks/staleness.py [--steps 2000] [--model gpt-1m]
A GPT is trained on nine tenths of the files of the standard library. The loss on the others is measured along the way,
with the parameters that the next forward would read. Each seed has its own initial values and order of batches, the
same for each update.
"""

import argparse
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from report import publish
from torch.optim.lr_scheduler import LambdaLR

import patrickstar as ps
from patrickstar._cli.corpus import Corpus, standard_library
from patrickstar._cli.model_source import find_model
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.tokenizer import _encode, train_tokenizer
from patrickstar._cli.train import learning_rate_factor

SEEDS = 0, 1, 2
SEQUENCE, BATCH, VALIDATION_BATCHES = 128, 8, 24
MEASUREMENTS = 8
RATE, WARMUP_STEPS, MAX_NORM = 1e-3, 50, 1.0
UPDATES = {"exact": None, "delayed from step 40": ps.Delayed(after=40), "delayed from step 1": ps.Delayed(after=1)}


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Return nine tenths of the files of a corpus, and every tenth one."""
    held_out = corpus.paths[9::10]
    others = tuple(path for path in corpus.paths if path not in set(held_out))
    return replace(corpus, paths=others), replace(corpus, paths=held_out)


def validation_loss(engine: ps.Engine, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return fmean(engine(input_ids=ids, labels=ids).loss.item() for ids in batches)


def losses(
    model: str, update: ps.Delayed | None, seed: int, steps: int, tokens: list[NDArray[np.unsignedinteger]]
) -> list[float]:
    """Train, and return the validation losses: the last one after the delay has been ended."""
    source = find_model(model, None)
    torch.manual_seed(seed)
    build, weights = source.open(False)
    config = ps.Config(device="cpu", update=update, optimizer=ps.AdamW(lr=RATE, weight_decay=0.01))
    engine, optimizer = ps.initialize(build, config, weights=weights)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, WARMUP_STEPS, steps))
    batches = iter(BatchSampler(tokens[0], SEQUENCE, BATCH, seed))
    held_out = iter(BatchSampler(tokens[1], SEQUENCE, BATCH, 0))
    validation = [next(held_out) for _ in range(VALIDATION_BATCHES)]
    found = []
    for step in range(1, steps + 1):
        ids = next(batches)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == steps:
            optimizer.flush()
        if step % (steps // MEASUREMENTS) == 0:
            found.append(validation_loss(engine, validation))
    engine.close(keep=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", default="gpt-1m")
    arguments = parser.parse_args()
    vocabulary = find_model(arguments.model, None).vocabulary
    training, held_out = split(standard_library())
    tokenizer = train_tokenizer(training, vocabulary.size)
    tokens = [_encode(tokenizer, corpus, vocabulary) for corpus in (training, held_out)]
    rows, last = [], {}
    for name, update in UPDATES.items():
        runs = [losses(arguments.model, update, seed, arguments.steps, tokens) for seed in SEEDS]
        means = [fmean(run[number] for run in runs) for number in range(MEASUREMENTS)]
        last[name] = means[-1]
        seeds = " ".join(f"{run[-1]:.4f}" for run in runs)
        rows.append([name, *(f"{mean:.4f}" for mean in means), seeds, f"{means[-1] / last['exact'] - 1:+.2%}"])
        print(rows[-1], flush=True)
    numbers = [f"step {arguments.steps // MEASUREMENTS * number}" for number in range(1, MEASUREMENTS + 1)]
    publish(
        "staleness",
        "cpu",
        f"Validation loss of {arguments.model} on a held-out tenth of the files of the standard library, "
        f"{BATCH} x {SEQUENCE} tokens per step, bf16, AdamW with a peak rate of {RATE}, {WARMUP_STEPS} steps of "
        f"warm-up and a cosine, gradients clipped to {MAX_NORM}: means of {len(SEEDS)} seeds.",
        ["update", *numbers, "last, by seed", "last, against exact"],
        rows,
    )


if __name__ == "__main__":
    main()
