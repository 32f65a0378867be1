"""Law: a lock-free run, its replay and plain PyTorch in the order of its log give the same bits."""

import random

import pytest
import speculation_cases as cases
import torch
from speculation_cases import DELAYED_EVENTS, PARAM16_BYTES, build, loop

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar.errors import BudgetError

from .test_delayed import run_step
from .test_late_copies import some_are_slow
from .tiers import Room, blocks, inputs, mean_square, options, small_engine
from .tiers import on_disk as least_budgets_on_disk

RUNS_PER_TEST = 10
STEPS = 8
HOST_BYTES = 200 * 1024 + 4 * PARAM16_BYTES
"""Room for the buffers and a part of the states."""


def config_of(update, *, precision="bf16", **options):
    itemsize = 4 if precision == "fp32" else 2
    device = int(options.pop("device_memory", 2.5) * PARAM16_BYTES * itemsize / 2) + 16384
    optimizer = ps.EMA(ps.AdamW(lr=1e-2), decay=0.9)
    return ps.Config(
        device="cpu",
        update=update,
        precision=precision,
        optimizer=optimizer,
        device_memory=device,
        **{"chunk_size": "18KiB"} | options,
    )


def engine_with(config, model_func=build, **hooks):
    torch.manual_seed(0)
    return Engine(model_func, config, **dict(meter=testing.NoMeter(), poison=True, page_bytes=8192) | hooks)


def reference_with(config, log, model_func=build):
    update = config.update.model_copy(update={"replay": log, "log": None})
    torch.manual_seed(0)
    plain = config.model_copy(update={"update": update, "device_memory": None, "host_memory": None, "disk": None})
    return testing.ReferenceTrainer(model_func, plain, testing.LockFreeOptimizer)


@pytest.fixture
def sluggish(monkeypatch):
    """Let a share of the chances to update pages between operators pass, at random."""
    progress = DiskOptimizerStep.progress

    def choose(share, seed=0):
        choice = random.Random(seed)

        def sometimes(self):
            if choice.random() >= share:
                progress(self)

        monkeypatch.setattr(DiskOptimizerStep, "progress", sometimes)

    return choose


def run_three(script, tmp_path, after=1, *, replayed=None, **options):
    """Run with a log, replay the log with other options, and follow it in plain PyTorch; compare all bits.

    Returns:
        Statistics of the first run.
    """
    log = tmp_path / "updates.jsonl"
    log.unlink(missing_ok=True)
    hooks = {name: options.pop(name) for name in ("evict_everything",) if name in options}
    late = {name: options.pop(name) for name in ("max_staleness", "gradient_dtype") if name in options}
    config = config_of(ps.LockFree(after=after, log=log, **late), **options)
    with engine_with(config, **hooks) as engine:
        found = script(engine)
        state, optimizer, stats = engine.state_dict(), engine.optimizer.state_dict(), engine.stats.total
    reference = reference_with(config, log)
    testing.assert_same_bits(script(reference), found, "results of the reference")
    testing.assert_same_bits(reference.state_dict(), state, "parameters of the reference")
    testing._assert_same_states(reference.optimizer.state_dict(), optimizer)
    again = config_of(ps.LockFree(after=after, replay=log, **late), **options | (replayed or {}))
    with engine_with(again, **hooks) as engine:
        testing.assert_same_bits(found, script(engine), "results of the replay")
        testing.assert_same_bits(state, engine.state_dict(), "parameters of the replay")
        testing._assert_same_states(optimizer, engine.optimizer.state_dict())
    return stats


def on_disk(tmp_path):
    return dict(disk=ps.Disk(tmp_path), host_memory=HOST_BYTES)


IN_MEMORY = dict(disk=None, host_memory="4MiB")
"""Budgets of a replay, which needs no disk."""


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("replayed", [None, IN_MEMORY], ids=["replay from disk", "replay in memory"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_run_replay_and_reference_agree(share, replayed, precision, sluggish, tmp_path):
    sluggish(share)
    host = dict(host_memory=HOST_BYTES + PARAM16_BYTES) if precision == "fp32" else {}
    script = loop([[]] * STEPS, [1] * STEPS)
    stats = run_three(script, tmp_path, replayed=replayed, **on_disk(tmp_path) | host, precision=precision)
    assert stats.disk_write_bytes > 0 and stats.staleness > 0 and stats.peak_staleness <= 4


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_gradients_that_no_update_has_used_are_never_older(max_staleness, sluggish, tmp_path):
    sluggish(1.0)  # every update waits until it must not wait any longer
    config = config_of(ps.LockFree(max_staleness=max_staleness, after=1), **on_disk(tmp_path))
    with engine_with(config) as engine:
        found = []
        for number in range(STEPS):
            run_step(engine, number)
            found.append(engine.stats.last.peak_staleness)
        assert found[: max_staleness + 1] == list(range(max_staleness + 1)) and max(found) == max_staleness


def test_with_a_staleness_of_one_the_bits_are_those_of_a_delayed_update(sluggish, tmp_path):
    sluggish(1.0)
    config = least_budgets_on_disk(
        blocks, options(update=ps.LockFree(max_staleness=1, after=1)), tmp_path, inputs(1)[0], Room()
    )
    torch.manual_seed(0)
    delayed = testing.ReferenceTrainer(blocks, options(update=ps.Delayed(after=1)))
    torch.manual_seed(0)
    with small_engine(blocks, config) as engine:
        for batch in inputs(STEPS):
            losses = []
            for trainer in (delayed, engine):
                losses.append(mean_square(trainer(*batch)))
                trainer.backward(losses[-1])
                trainer.optimizer.step()
            testing.assert_same_bits([losses[0].detach()], [losses[1].detach()], "loss")
        assert engine.stats.last.staleness == 1, "some states are in memory"


@pytest.mark.parametrize("after", [0, 1, 4, 40])
def test_updates_before_the_first_lock_free_one_are_exact(after, tmp_path):
    run_three(loop([[]] * STEPS, [1] * STEPS), tmp_path, after, **on_disk(tmp_path))


def test_states_in_memory_are_updated_in_the_step_on_a_cpu(tmp_path):
    """Then nothing is late: the bits are those of plain PyTorch."""
    script = loop([[]] * STEPS, [1] * STEPS)
    config = config_of(ps.LockFree(after=1), **IN_MEMORY)
    torch.manual_seed(0)
    exact = testing.ReferenceTrainer(build, config.model_copy(update={"update": None}))
    with engine_with(config) as engine:
        testing.assert_same_bits(script(exact), script(engine), "results")
        assert engine.stats.total.peak_staleness == 0


def test_sums_in_16_bits(sluggish, tmp_path):
    sluggish(0.9)
    script = loop([[]] * STEPS, [1] * STEPS)
    run_three(script, tmp_path, gradient_dtype="16-bit", replayed=IN_MEMORY, **on_disk(tmp_path))


@pytest.mark.parametrize("event", DELAYED_EVENTS[1:])
def test_whatever_happens_before_the_step(event, sluggish, tmp_path):
    sluggish(0.7)
    script = loop([[]] * 2 + [[event], [], [event], []], [1] * 6)
    run_three(script, tmp_path, replayed=IN_MEMORY, **on_disk(tmp_path))


@pytest.mark.parametrize("first", some_are_slow(100, fast=10))
def test_random_loops(first, sluggish, tmp_path):
    tested = 0
    for seed in range(first, first + RUNS_PER_TEST):
        choice = random.Random(seed)
        sluggish(choice.choice([0.0, 0.5, 0.9, 1.0]), seed)
        script, precision = cases.random_loop(choice, DELAYED_EVENTS), choice.choice(["bf16", "bf16", "fp16", "fp32"])
        options = dict(
            precision=precision,
            max_staleness=choice.choice([1, 2, 4, 7]),
            gradient_dtype=choice.choice(["fp32", "fp32", "16-bit"]),
            chunk_size=choice.choice(["3KiB", "13KiB", "18KiB", "40KiB"]),
            device_memory=choice.choice([1.6, 2.5, 20]),
            host_memory=HOST_BYTES + choice.choice([0, 30, 100]) * 1024 + PARAM16_BYTES * (precision == "fp32"),
            disk=ps.Disk(tmp_path),
            evict_everything=choice.random() < 0.2,
        )
        try:
            run_three(
                script, tmp_path, choice.choice([0, 1, 2, 5]), replayed=choice.choice([None, IN_MEMORY]), **options
            )
            tested += 1
        except BudgetError:
            continue
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert tested > RUNS_PER_TEST // 2
