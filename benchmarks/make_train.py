"""Compare the command of `make train` with plain PyTorch in fp32: the same model, batches and settings.

python benchmarks/make_train.py [--rounds 9] [--set "device-memory=300MiB precision=fp32 ..."]
The settings are read from the Makefile; `--set` changes some. Plain PyTorch holds everything in memory and trains in a
process of its own, so that its tensors do not count in the engine's budget. Steps of both alternate: while one runs,
the other waits. The ratio is the median over pairs.
"""

import multiprocessing
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import report
import torch
import typer
from steps import checkpointed, ratio_cells
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import patrickstar as ps
from patrickstar._cli.corpus import open_corpus
from patrickstar._cli.main import app
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.tokenizer import load_tokens
from patrickstar._cli.train import learning_rate_factor
from patrickstar._cli.train_options import TrainOptions
from patrickstar._cli.training_setup import training_config
from patrickstar._layout.byte_size import format_size
from patrickstar._models.model_source import find_model

MAKEFILE = Path(__file__).parents[1] / "Makefile"
WARM_UP = 3
"""Steps that are not timed: the first is traced, the second follows the plan for the first time."""

Step = Callable[[], tuple[float, float]]
"""Runs a step; returns its seconds and its loss."""


def train_options(changes: list[str]) -> TrainOptions:
    """Return the options of `make train`, some of them changed by texts such as "precision=fp32"."""
    recipe = MAKEFILE.read_text().partition("\ntrain:")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = shlex.split(recipe.partition("patrickstar train")[2])
    for change in changes:
        name, _, value = change.partition("=")
        words += [f"--{name}", value]
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    arguments = command.make_context("train", words).params
    arguments["data"] = tuple(arguments["data"] or ())
    return TrainOptions(**{field.name: arguments[field.name] for field in fields(TrainOptions)})


def batches(options: TrainOptions) -> Iterator[torch.Tensor]:
    """Return the batches of the command."""
    vocabulary = find_model(options.model, options.vocab_size).vocabulary
    tokens = load_tokens(open_corpus(options.data), vocabulary)
    return iter(BatchSampler(tokens, options.sequence, options.batch, options.seed, 0, 1))


def built(options: TrainOptions) -> Callable[[], nn.Module]:
    """Return a function that builds the model."""
    model, _ = find_model(options.model, options.vocab_size).open()
    assert not isinstance(model, nn.Module), "the model of `make train` has random weights"
    return (lambda: checkpointed(model())) if options.activation_checkpointing else model


def steps(options: TrainOptions, trainer: object, optimizer: torch.optim.Optimizer, clip: Callable) -> Step:
    """Return the step of the command's loop."""
    factor = partial(learning_rate_factor, warmup_steps=options.warmup_steps, steps=options.steps)
    schedule, data = LambdaLR(optimizer, factor), batches(options)
    backward = getattr(trainer, "backward", torch.Tensor.backward)

    def step() -> tuple[float, float]:
        ids = next(data)
        start = time.perf_counter()
        loss = trainer(input_ids=ids, labels=ids).loss
        value = loss.item()
        backward(loss)
        clip(options.max_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return time.perf_counter() - start, value

    return step


def train_plainly(options: TrainOptions, connection: Connection) -> None:
    """Train in plain PyTorch in fp32, a step at each request, until the connection is closed."""
    torch.manual_seed(options.seed)
    model = built(options)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True)
    step = steps(options, model, optimizer, partial(nn.utils.clip_grad_norm_, list(model.parameters())))
    while connection.recv():
        connection.send(step())


def main() -> None:
    """Train both sides in turns, and publish the ratio of their rates."""
    given = report.options(__doc__, rounds=9, set="")
    options = train_options(given.set.split())
    batches(options)  # trains the tokenizer, for both
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    plain = context.Process(target=train_plainly, args=(options, theirs), daemon=True)
    plain.start()

    def plain_step() -> tuple[float, float]:
        ours.send(True)
        return ours.recv()

    torch.manual_seed(options.seed)
    with ps.initialize(built(options), training_config(options)) as (engine, optimizer):
        step = steps(options, engine, optimizer, engine.clip_grad_norm_)
        for _ in range(WARM_UP):
            plain_step()
            step()
        pairs = [(plain_step(), step()) for _ in range(given.rounds)]
        ours.send(False)
        plain.join()
        tokens = options.batch * options.sequence
        plain_s, engine_s = ([step[0] for step in side] for side in zip(*pairs, strict=True))
        device, budget_bytes = engine.device.type, engine.device_budget_bytes
        row = {
            "engine's precision": engine.config.precision,
            "model data": f"{engine.layout.model_data_bytes / budget_bytes:.1f} x {format_size(budget_bytes)}",
            "plain tokens/s": f"{tokens / median(plain_s):,.0f}",
            "engine tokens/s": f"{tokens / median(engine_s):,.0f}",
            **ratio_cells(plain_s, engine_s),
            f"losses of step {WARM_UP + given.rounds}": ", ".join(f"{loss:.3f}" for _, loss in pairs[-1]),
        }
    report.publish(
        "make_train",
        f"The command of `make train` ({options.model}, {options.batch} x {options.sequence} tokens per step) against "
        f"plain PyTorch in fp32 with its fused AdamW, which has all memory; steps alternate. CPU capability "
        f"{torch.backends.cpu.get_cpu_capability()}. Goal: at least 0.75.",
        [row],
        device=device,
    )


if __name__ == "__main__":
    main()
