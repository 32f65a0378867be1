"""Law: updates that backward starts before the step has decided never change a bit, whatever the step decides."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import strict_device
import torch
import toys
from laws.test_late_copies import some_are_slow
from probes import manager_of, optimizer_in_backward_of, optimizer_step_of
from torch import nn

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar.errors import BudgetError

WIDTH, LAYERS = 48, 6
PARAM16_BYTES = LAYERS * 2 * (WIDTH * WIDTH + WIDTH)
RUNS_PER_TEST = 10


def build() -> nn.Module:
    return toys.layers(WIDTH, LAYERS, nn.GELU)


def batch(seed: int) -> torch.Tensor:
    return toys.inputs(1, width=WIDTH, rows=24, seed=seed)[0][0].to("strict")


def backward(trainer: Any, seed: int, factor: float = 1.0) -> torch.Tensor:
    loss = trainer(batch(seed)).float().square().mean() * factor
    trainer.backward(loss)
    return loss.detach().clone()


# What may happen between a backward and its step. Each returns results to compare.


def nothing(trainer: Any) -> list[torch.Tensor]:
    return []


def clip_nothing(trainer: Any) -> list[torch.Tensor]:
    return [trainer.clip_grad_norm_(1e9).clone()]


def clip(trainer: Any) -> list[torch.Tensor]:
    return [trainer.clip_grad_norm_(1e-3).clone()]


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


def write_parameter(trainer: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        list(trainer.module.parameters())[2].mul_(0.5)
    if not isinstance(trainer, Engine):
        trainer.follow_writes()
    return []


EVENTS = nothing, clip_nothing, clip, change_rate, read_gradients, another_backward, evaluate, discard, change_gradient


def loop(events: list[list[Callable[[Any], list[torch.Tensor]]]], backwards: list[int]) -> Callable[[Any], list[Any]]:
    """Return a training loop of one step for each list of events."""

    def run(trainer: Any) -> list[Any]:
        results: list[Any] = []
        for number, (between, count) in enumerate(zip(events, backwards, strict=True)):
            results += [backward(trainer, 10 * number + each) for each in range(count)]
            for event in between:
                results += event(trainer)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        return results

    return run


def compare(script: Callable[[Any], list[Any]], seed: int, precision: str = "bf16", **options: Any) -> ps.StepStats:
    """Train by plain PyTorch and by an engine on a device of a seeded schedule; return the engine's statistics."""
    kinds = dict(device="strict", precision=precision, optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.9))
    strict_device.configure()
    torch.manual_seed(0)
    reference = testing.ReferenceTrainer(build, ps.Config(**kinds))
    expected = script(reference)
    strict_device.configure(seed=seed)
    torch.manual_seed(0)
    hooks = dict(meter=testing.NoMeter(), poison=True, page_bytes=4096)
    hooks |= {name: options.pop(name) for name in ("evict_everything",) if name in options}
    itemsize = 4 if precision == "fp32" else 2
    options["device_memory"] = int(options.get("device_memory", 1.6) * PARAM16_BYTES * itemsize / 2) + 16384
    with Engine(build, ps.Config(**kinds, **options), **hooks) as engine:
        found = script(engine)
        testing.assert_same_bits(expected, found, f"seed {seed}: results")
        testing.assert_same_bits(reference.state_dict(), engine.state_dict(), f"seed {seed}: parameters")
        testing._assert_same_states(reference.optimizer.state_dict(), engine.optimizer.state_dict())
        assert manager_of(engine).host_tier.spare_bytes == 0, "spare blocks are left after the last step"
        return engine.stats.total


def test_updates_that_the_step_confirms_are_adopted():
    stats = compare(loop([[clip_nothing]] * 6, [1] * 6), seed=1, chunk_size="6KiB", host_memory="4MiB")
    assert stats.speculated >= 3 * LAYERS and stats.speculation_hits == stats.speculated


@pytest.mark.parametrize("device_memory", [0.5, 1.6], ids=["half of the parameters fit", "all fit"])
def test_updates_that_the_step_contradicts_are_dropped(device_memory):
    events = [[clip_nothing]] * 3 + [[clip]] * 3 + [[clip_nothing]] * 3
    options = dict(chunk_size="6KiB", host_memory="4MiB", device_memory=device_memory)
    stats = compare(loop(events, [1] * 9), seed=2, **options)
    assert 0 < stats.speculation_hits < stats.speculated
    # One step misses; the next ones assume nothing until one was not clipped.
    assert stats.speculated - stats.speculation_hits <= LAYERS + 2


@pytest.mark.parametrize(
    "event", [clip, change_rate, change_gradient, another_backward, evaluate, discard, read_gradients, write_parameter]
)
@pytest.mark.parametrize("evict_everything", [False, True], ids=["planned", "evicted at every access"])
def test_whatever_happens_before_the_step_is_seen(event, evict_everything):
    script = loop([[]] * 3 + [[event], [], [event], []], [1] * 7)
    options = dict(chunk_size="6KiB", host_memory="4MiB", device_memory=0.7, evict_everything=evict_everything)
    stats = compare(script, seed=3, **options)
    assert stats.speculated > 0


def test_overflow_drops_what_was_updated():
    script = loop([[]] * 3 + [[overflow], [], [overflow], []], [1] * 7)
    stats = compare(script, seed=4, precision="fp16", chunk_size="6KiB", host_memory="4MiB")
    assert stats.overflows == 2 and stats.speculated > 0


def test_the_last_of_several_backwards_is_known():
    stats = compare(loop([[clip_nothing]] * 5, [3] * 5), seed=5, chunk_size="6KiB", host_memory="4MiB")
    assert stats.speculated >= 2 * LAYERS and stats.speculation_hits == stats.speculated


def test_without_spare_memory_nothing_is_updated_early():
    stats = compare(loop([[clip_nothing]] * 5, [1] * 5), seed=6, chunk_size="6KiB", host_memory="340KiB")
    assert stats.speculated < LAYERS


def run(seed: int) -> ps.StepStats:
    """Train with random events, budgets and chunks by a random schedule, and compare with plain PyTorch.

    Returns:
        Statistics; of no step if the host budget is too small for accumulated gradients, which no check counts.
    """
    choice = random.Random(seed)
    steps = 8
    # Runs of steps without events let the engine begin to assume again.
    events = [[choice.choice(EVENTS) for _ in range(choice.choice([0, 0, 0, 1, 2]))] for _ in range(steps)]
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
    numel = PARAM16_BYTES // 2
    precision = choice.choice(["bf16", "bf16", "fp16", "fp32"])
    options = dict(
        chunk_size=choice.choice(["3KiB", "6KiB", "13KiB"]),
        device_memory=choice.choice([0.5, 0.7, 1.6, 3, 20]),
        host_memory=numel * 26 + 1024 * choice.choice([40, 100, 200, 1000]),
        evict_everything=choice.random() < 0.2,
    )
    try:
        return compare(loop(events, backwards), seed, precision, **options)
    except BudgetError as error:
        if "grad32" not in str(error):
            raise
        return ps.StepStats()


@pytest.mark.parametrize("first", some_are_slow(100, fast=10))
def test_no_order_of_events_changes_a_bit(first):
    stats = [run(seed) for seed in range(first, first + RUNS_PER_TEST)]
    assert sum(each.steps > 0 for each in stats) > RUNS_PER_TEST // 2
    assert sum(each.speculation_hits for each in stats) > 0, f"no hit in the runs from seed {first} on"
    assert sum(each.speculated - each.speculation_hits for each in stats) > 0, f"no miss from seed {first} on"


def test_an_engine_closes_with_speculative_updates_in_progress():
    strict_device.configure(seed=7)
    torch.manual_seed(0)
    config = ps.Config(device="strict", chunk_size="6KiB", host_memory="4MiB", device_memory="48KiB")
    engine = Engine(build, config, meter=testing.NoMeter(), poison=True)
    for seed in range(3):
        backward(engine, seed)
        engine.optimizer.step()
    backward(engine, 3)
    assert optimizer_in_backward_of(engine).speculation._updates
    module = engine.module
    expected = engine.state_dict()
    engine.close()
    testing.assert_same_bits(expected, {name: value.detach() for name, value in module.state_dict().items()}, "closed")
    assert optimizer_step_of(engine).host_updates.streamed is not None
