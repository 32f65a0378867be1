"""Does AdamW learn as well with states of 8 bits, and how long does its update take?

python benchmarks/eight_bit.py [--steps 2000] [--model gpt-1m] [--seeds 3] [--numel 100000000] [--rounds 7]
Losses are measured as in `staleness.py`: validation loss of a GPT trained on the files of the standard library, each
seed with its own initial values and order of batches. bitsandbytes trains the same masters in plain PyTorch. Updates
alternate in one process on tensors of the same size.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch
from bitsandbytes.optim import AdamW8bit
from numpy.typing import NDArray
from report import publish
from staleness import BATCH, MAX_NORM, SEQUENCE, VALIDATION_BATCHES, WARMUP_STEPS, losses, split, validation_loss
from torch.optim.lr_scheduler import LambdaLR

import patrickstar as ps
from patrickstar import testing
from patrickstar._cli.corpus import standard_library
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.tokenizer import _encode, train_tokenizer
from patrickstar._cli.train import learning_rate_factor
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._models.model_source import find_model

Tokens = list[NDArray[np.unsignedinteger]]
RATE, DECAY = 1e-3, 0.01
BITSANDBYTES = "bitsandbytes.optim.AdamW8bit"
OPTIMIZERS = {
    "ps.AdamW": (14, ps.AdamW(lr=RATE, weight_decay=DECAY)),
    "ps.AdamW8bit": (8, ps.AdamW8bit(lr=RATE, weight_decay=DECAY)),
    BITSANDBYTES: (8.03, None),
}
"""Bytes of model data per parameter, and the optimizer of the engine."""


class BlockwiseOptimizer(testing.ReferenceOptimizer):
    """bitsandbytes' 8-bit AdamW over the fp32 masters of plain PyTorch."""

    def __init__(self, trainer: testing.ReferenceTrainer) -> None:
        super().__init__(trainer)
        masters = [master for master in trainer.masters.values() if master.requires_grad or master.is_floating_point()]
        self.inner = AdamW8bit(masters, lr=RATE, weight_decay=DECAY)
        self.param_groups = self.inner.param_groups


def losses_of_bitsandbytes(model: str, steps: int, tokens: Tokens, seed: int) -> list[float]:
    """Train on one thread as `staleness.losses` does, and return the last validation loss."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    build, weights = find_model(model, None).open(False)
    assert weights is None, "the model is built with random weights"
    trainer = testing.ReferenceTrainer(build, ps.Config(device="cpu"), BlockwiseOptimizer)
    scheduler = LambdaLR(trainer.optimizer.inner, partial(learning_rate_factor, warmup_steps=WARMUP_STEPS, steps=steps))
    batches = iter(BatchSampler(tokens[0], SEQUENCE, BATCH, seed))
    held_out = iter(BatchSampler(tokens[1], SEQUENCE, BATCH, 0))
    validation = [next(held_out) for _ in range(VALIDATION_BATCHES)]
    for _ in range(steps):
        ids = next(batches)
        trainer.backward(trainer(input_ids=ids, labels=ids).loss)
        trainer.clip_grad_norm_(MAX_NORM)
        trainer.optimizer.step()
        scheduler.step()
    return [validation_loss(trainer, validation)]  # type: ignore[arg-type]


def last_loss(model: str, steps: int, tokens: Tokens, name: str, seed: int) -> float:
    optimizer = OPTIMIZERS[name][1]
    if optimizer is None:
        found = losses_of_bitsandbytes(model, steps, tokens, seed)
    else:
        found = losses(model, steps, optimizer, tokens, "exact", seed)[0]
    print(name, seed, f"{found[-1]:.4f}", flush=True)
    return found[-1]


def updates(numel: int) -> dict[str, Callable[[], None]]:
    """Return an update of each optimizer, of as many elements."""
    kernel = CppBackend.find()
    assert kernel is not None, "this installation has no C++ kernel; see `patrickstar doctor`"
    param = torch.full((numel,), 0.01, dtype=torch.bfloat16)
    master = torch.nn.Parameter(torch.randn(numel))
    master.grad = torch.zeros(numel)
    blockwise = AdamW8bit([master], lr=RATE, weight_decay=DECAY)

    def ours(rule_kind: type[AdamRule], states: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        rule = rule_kind(RATE, 0.9, 0.999, 1e-8, DECAY, True, 10)
        return lambda: kernel.update([Span(param, Gradient(param), master.detach(), states, rule)], ())

    def theirs() -> None:
        assert master.grad is not None
        master.grad.copy_(param)
        blockwise.step()
        with torch.no_grad():
            param.copy_(master)

    floats = torch.zeros(numel), torch.full((numel,), 1e-4)
    codes = torch.randint(256, (numel,), dtype=torch.uint8), torch.randint(256, (numel,), dtype=torch.uint8)
    return {"ps.AdamW": ours(AdamRule, floats), "ps.AdamW8bit": ours(Adam8bitRule, codes), BITSANDBYTES: theirs}


def seconds(numel: int, rounds: int) -> dict[str, float]:
    """Return the median time of each update, all of which alternate."""
    runs = updates(numel)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in times.items()}


def rows_of(results: dict[tuple[str, int], float], times: dict[str, float], seeds: range) -> Iterator[list[str]]:
    for name, (nbytes, _) in OPTIMIZERS.items():
        last = [results[name, seed] for seed in seeds]
        ratios = [results[name, seed] / results["ps.AdamW", seed] - 1 for seed in seeds]
        deviation = stdev(ratios) if len(seeds) > 1 else 0
        yield [
            name,
            str(nbytes),
            " ".join(f"{value:.4f}" for value in last),
            f"{fmean(ratios):+.2%} ± {deviation:.2%}",
            f"{1000 * times[name]:.0f} ms",
            f"{times[name] / times['ps.AdamW']:.2f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", default="gpt-1m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times, seeds = seconds(options.numel, options.rounds), range(options.seeds)
    vocabulary = find_model(options.model, None).vocabulary
    training, held_out = split(standard_library())
    tokenizer: Any = train_tokenizer(training, vocabulary.size)
    tokens = [_encode(tokenizer, corpus, vocabulary) for corpus in (training, held_out)]
    runs = list(product(OPTIMIZERS, seeds))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        run = partial(last_loss, options.model, options.steps, tokens)
        results = dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))
    publish(
        "eight-bit",
        "cpu",
        f"Validation loss of {options.model} after {options.steps} steps on a held-out tenth of the files of the "
        f"standard library, {BATCH} x {SEQUENCE} tokens per step, bf16 with fp32 masters, peak rate {RATE}, "
        f"{WARMUP_STEPS} steps of warm-up and a cosine, gradients clipped to {MAX_NORM}; against AdamW: mean and "
        f"standard deviation of the seeds' ratios. Time of one update of {options.numel:,} elements on "
        f"{torch.get_num_threads()} threads, median of {options.rounds}, all alternating in one process.",
        ["optimizer", "bytes per parameter", "loss, by seed", "against AdamW", "update", "against AdamW"],
        list(rows_of(results, times, seeds)),
    )


if __name__ == "__main__":
    main()
