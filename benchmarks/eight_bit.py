"""Does AdamW learn as well with states of 8 bits, and how long does its update take?

python benchmarks/eight_bit.py [--steps 2000] [--model gpt-1m] [--seeds 3] [--numel 100000000] [--rounds 7]
Losses are measured as in `staleness.py`: validation loss of a GPT trained on the files of the standard library, each
seed with its own initial values and order of batches. bitsandbytes trains the same masters in plain PyTorch. Updates
alternate in one process on tensors of the same size.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from bitsandbytes.optim import AdamW8bit
from report import options, publish
from staleness import (
    BATCH,
    MAX_NORM,
    RATE,
    SEQUENCE,
    WARMUP_STEPS,
    Tokens,
    against,
    in_two_processes,
    learn,
    losses,
    tokens_of,
)
from steps import alternating

import patrickstar as ps
from patrickstar import testing
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._models.model_source import find_model

DECAY = 0.01
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


def last_loss(model: str, steps: int, tokens: Tokens, name: str, seed: int) -> float:
    optimizer = OPTIMIZERS[name][1]
    if optimizer is not None:
        return losses(model, steps, optimizer, tokens, "exact", seed)[0][-1]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    build, weights = find_model(model, None).open(False)
    assert weights is None, "the model is built with random weights"
    trainer = testing.ReferenceTrainer(build, ps.Config(device="cpu"), BlockwiseOptimizer)
    found = learn(trainer, trainer.optimizer.inner, tokens, steps, seed, measurements=1)[-1]
    print(name, seed, f"{found:.4f}", flush=True)
    return found


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


def main() -> None:
    given = options(__doc__, steps=2000, model="gpt-1m", seeds=3, numel=100_000_000, rounds=7)
    times, seeds = alternating(updates(given.numel), given.rounds), range(given.seeds)
    run = partial(last_loss, given.model, given.steps, tokens_of(given.model))
    results = in_two_processes(run, OPTIMIZERS, seeds)
    rows = []
    for name, (nbytes, _) in OPTIMIZERS.items():
        last, base = ([results[each, seed] for seed in seeds] for each in (name, "ps.AdamW"))
        difference, deviation = against(last, base)
        update_s = median(times[name])
        rows.append(
            [
                *(name, str(nbytes), " ".join(f"{value:.4f}" for value in last)),
                f"{difference:+.2%} ± {deviation:.2%}",
                *(f"{1000 * update_s:.0f} ms", f"{update_s / median(times['ps.AdamW']):.2f}"),
            ]
        )
    publish(
        "eight-bit",
        "cpu",
        f"Validation loss of {given.model} after {given.steps} steps on a held-out tenth of the files of the standard "
        f"library, {BATCH} x {SEQUENCE} tokens per step, bf16 with fp32 masters, peak rate {RATE}, {WARMUP_STEPS} "
        f"steps of warm-up and a cosine, gradients clipped to {MAX_NORM}; against AdamW: mean and standard deviation "
        f"of the seeds' ratios. Time of one update of {given.numel:,} elements on {torch.get_num_threads()} threads, "
        f"median of {given.rounds}, all alternating in one process.",
        rows,
        ["optimizer", "bytes per parameter", "loss, by seed", "against AdamW", "update", "against AdamW"],
    )


if __name__ == "__main__":
    main()
