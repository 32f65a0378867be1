"""Training loops with events between backward and step, for the laws of speculative updates."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import toys
from probes import let_updates_begin, manager_of
from seeded import compared
from torch import nn

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar.errors import BudgetError

Event = Callable[[Any], list[torch.Tensor]]
"""What may happen between a backward and its step."""

WIDTH, LAYERS = 48, 6
PARAM16_BYTES = LAYERS * 2 * (WIDTH * WIDTH + WIDTH)


def build() -> nn.Module:
    """Build layers, each in chunks of its own."""
    return toys.layers(WIDTH, LAYERS, nn.GELU)


def partly_frozen() -> nn.Module:
    """Build such a model whose first parameter is frozen."""
    model = build()
    next(model.parameters()).requires_grad_(False)
    return model


def batch(seed: int) -> torch.Tensor:
    """Return a batch on the host."""
    return toys.inputs(1, width=WIDTH, rows=24, seed=seed)[0][0]


def backward(trainer: Any, seed: int, factor: float = 1.0, *, accumulate: bool = False) -> torch.Tensor:
    """Run forward and backward; return the loss."""
    loss = trainer(batch(seed)).float().square().mean() * factor
    trainer.backward(loss, accumulate=accumulate)
    return loss.detach().to("cpu", copy=True)


def step(trainer: Any, number: int) -> torch.Tensor:
    """Run one step, and return its loss."""
    loss = backward(trainer, number)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss


def trained(engine: Engine, folder: Path, first: int, last: int, saves: int = 0) -> Engine:
    """Train from step `first` to `last`, from a checkpoint of the step before if there is one.

    Args:
        saves: Save each step that is a multiple of this; print each step, and how many updates were early so far.
    """
    if (folder / f"step {first - 1}").exists():
        engine.load(folder / f"step {first - 1}")
    for number in range(first, last + 1):
        backward(engine, number)
        if saves:
            print(number, engine.stats.total.speculated, flush=True)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if saves and number % saves == 0:
            engine.save(folder / f"step {number}", wait=number % (2 * saves) == 0)
    return engine


def on_disk(directory: Path, **disk: Any) -> dict[str, Any]:
    """Return budgets that leave states on disk, where updates have pages to themselves."""
    return dict(chunk_size="18KiB", device_memory=2.0, host_memory="170KiB", disk=ps.Disk(directory, **disk))


# What may happen between a backward and its step. Each returns results to compare.


def nothing(trainer: Any) -> list[torch.Tensor]:
    return []


def clip_nothing(trainer: Any) -> list[torch.Tensor]:
    return [trainer.clip_grad_norm_(1e9).to("cpu", copy=True)]


def clip(trainer: Any) -> list[torch.Tensor]:
    return [trainer.clip_grad_norm_(1e-3).to("cpu", copy=True)]


def change_rate(trainer: Any) -> list[torch.Tensor]:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5
    return []


def read_gradients(trainer: Any) -> list[torch.Tensor]:
    names = list(dict(trainer.module.named_parameters()))[::3]
    return [grad.to("cpu", copy=True) for name in names if (grad := trainer.gradient(name)) is not None]


def change_gradient(trainer: Any) -> list[torch.Tensor]:
    param = list(trainer.module.parameters())[-2]
    if isinstance(trainer, Engine):
        param.grad.mul_(2.0)
    else:
        trainer.master(param).grad.mul_(2.0)
    return []


def another_backward(trainer: Any) -> list[torch.Tensor]:
    return [backward(trainer, 77)]


def overflow(trainer: Any) -> list[torch.Tensor]:
    """Add a gradient that overflows in fp16, and clips to nothing in others."""
    return [backward(trainer, 78, 1e30)]


def evaluate(trainer: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [trainer(batch(79)).to("cpu", copy=True)]


def discard(trainer: Any) -> list[torch.Tensor]:
    trainer.optimizer.zero_grad()
    return []


def flush(trainer: Any) -> list[torch.Tensor]:
    trainer.optimizer.flush()
    return []


def write_parameter(trainer: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        list(trainer.module.parameters())[2].mul_(0.5)
    if not isinstance(trainer, Engine):
        trainer.follow_writes()
    return []


EVENTS = nothing, clip_nothing, clip, change_rate, read_gradients, another_backward, evaluate, discard, change_gradient
DELAYED_EVENTS = nothing, nothing, clip_nothing, clip, change_rate, read_gradients, discard, change_gradient, flush
"""Events that a delayed update allows: the parameters are not read between a backward and its step."""


def loop(events: list[list[Callable[[Any], list[torch.Tensor]]]], backwards: list[int]) -> Callable[[Any], list[Any]]:
    """Return a training loop of one step for each list of events."""

    def run(trainer: Any) -> list[Any]:
        results: list[Any] = []
        for number, (between, count) in enumerate(zip(events, backwards, strict=True)):
            results += [backward(trainer, 10 * number + each, accumulate=each + 1 < count) for each in range(count)]
            if isinstance(trainer, Engine):
                let_updates_begin(trainer)
            for event in between:
                results += event(trainer)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        return results

    return run


def compare(script: Callable[[Any], list[Any]], precision: str = "bf16", **options: Any) -> ps.StepStats:
    """Train by plain PyTorch and by an engine, and compare all bits; return the engine's statistics.

    Args:
        options: Of `Config`, `device_memory` in multiples of the parameters' bytes; and hooks of the engine.
    """
    kinds = dict(device=options.pop("device"), precision=precision)
    kinds["optimizer"] = ps.EMA(ps.AdamW(lr=1e-2), decay=0.9)
    kinds |= {name: options.pop(name) for name in ("update",) if name in options}
    hooks: dict[str, Any] = dict(page_bytes=8192)
    hooks |= {name: options.pop(name) for name in ("evict_everything", "hardware") if name in options}
    itemsize = 4 if precision == "fp32" else 2
    options["device_memory"] = int(options.get("device_memory", 1.6) * PARAM16_BYTES * itemsize / 2) + 16384
    with compared(build, ps.Config(**kinds, **options), script, **hooks) as engine:
        assert manager_of(engine).host_tier.spare_bytes == 0, "spare blocks are left after the last step"
        return engine.stats.total


def random_loop(choice: random.Random, kinds: Sequence[Event] = EVENTS) -> Callable[[Any], list[Any]]:
    """Return a loop with random events of these kinds."""
    steps = 8
    # Steps without events let the engine begin to assume again.
    events = [[choice.choice(kinds) for _ in range(choice.choice([0, 0, 0, 1, 2]))] for _ in range(steps)]
    for between in events:
        if discard in between:  # nothing is left to clip or to change
            between[:] = [discard]
        elif clip in between or clip_nothing in between:  # then gradients are final
            between.sort(key=lambda event: event in (clip, clip_nothing))
            while between.count(clip) + between.count(clip_nothing) > 1:
                between.pop()
        elif change_gradient in between and another_backward in between:
            between.remove(change_gradient)
    backwards = [choice.choice([1, 1, 2])] * steps
    if choice.random() < 0.3:
        backwards[choice.randrange(steps)] += 1
    return loop(events, backwards)


def run(seed: int, kinds: Sequence[Event] = EVENTS, **options: Any) -> ps.StepStats:
    """Train with random events, budgets and chunks, and compare with plain PyTorch.

    Return statistics; of no step if the budgets are too small for accumulated gradients, which no check counts.
    """
    choice = random.Random(seed)
    script, precision = random_loop(choice, kinds), choice.choice(["bf16", "bf16", "fp16", "fp32"])
    options = (
        dict(
            chunk_size=choice.choice(["3KiB", "6KiB", "13KiB"]),
            device_memory=choice.choice([0.5, 0.7, 1.6, 3, 20]),
            host_memory=PARAM16_BYTES * 13 + 1024 * choice.choice([40, 100, 200, 1000]),
            evict_everything=choice.random() < 0.2,
        )
        | options
    )
    try:
        return compare(script, precision, **options)
    except BudgetError:
        return ps.StepStats()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
