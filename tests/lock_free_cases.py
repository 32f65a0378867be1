"""Runs with lock-free updates, their replays and their references, for laws on several devices."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import speculation_cases as cases
from seeded import assert_same_model, engine_of, reference_of
from speculation_cases import DELAYED_EVENTS, PARAM16_BYTES, build

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.streamed_update import StreamedUpdate
from patrickstar.errors import BudgetError

PROGRESS, WITHDRAW = DiskOptimizerStep.progress, StreamedUpdate.withdraw
HOST_BYTES = 200 * 1024 + 4 * PARAM16_BYTES
"""Room for the buffers and a part of the states."""
IN_MEMORY = dict(disk=None, host_memory="4MiB")
"""Budgets of a replay, which needs no disk."""
STEPS = 8
USUAL = cases.loop([[]] * STEPS, [1] * STEPS)


def on_disk(directory: Path) -> dict[str, Any]:
    """Return budgets with which a part of the states is on disk."""
    return dict(disk=ps.Disk(directory), host_memory=HOST_BYTES)


def config_of(update: ps.LockFree, *, precision: str = "bf16", **options: Any) -> ps.Config:
    """Return a configuration, with `device_memory` in multiples of the parameters' bytes."""
    itemsize = 4 if precision == "fp32" else 2
    device_bytes = int(options.pop("device_memory", 2.5) * PARAM16_BYTES * itemsize / 2) + 16384
    options = dict(device="cpu", chunk_size="18KiB", optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.9)) | options
    return ps.Config(update=update, precision=precision, device_memory=device_bytes, **options)


def engine_with(config: ps.Config, **hooks: Any) -> Engine:
    """Create an engine that poisons freed memory and has small pages."""
    return engine_of(build, config, page_bytes=8192, **hooks)


def replaying(config: ps.Config, log: Path, **options: Any) -> ps.Config:
    """Return the configuration of a replay."""
    update = config.update.model_copy(update={"replay": log, "log": None})
    return config.model_copy(update={"update": update} | options)


def reference_with(config: ps.Config, log: Path, model_func: Callable[[], Any] = build) -> testing.ReferenceTrainer:
    """Create the reference that follows a log."""
    plain = replaying(config, log, device_memory=None, host_memory=None, disk=None)
    return reference_of(model_func, plain, testing.LockFreeOptimizer)


def let_chances_pass(patch: pytest.MonkeyPatch, share: float, seed: int = 0) -> None:
    """Let a share of the chances to update pages between operators pass, and worker threads begin late, at random."""
    choice = random.Random(seed)

    def sometimes(step: DiskOptimizerStep) -> None:
        if choice.random() >= share:
            PROGRESS(step)

    def withdraw_or_wait(update: StreamedUpdate) -> bool:
        if choice.random() >= share:
            update.wait()
        return WITHDRAW(update)

    patch.setattr(DiskOptimizerStep, "progress", sometimes)
    patch.setattr(StreamedUpdate, "withdraw", withdraw_or_wait)


def run_three(
    script: Callable[[Any], list[Any]],
    folder: Path,
    after: int = 1,
    *,
    replayed: dict[str, Any] | None = None,
    **options: Any,
) -> ps.StepStats:
    """Run with a log, replay it with other options, follow it in plain PyTorch; compare all bits; return statistics."""
    log = folder / "updates.jsonl"
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
        assert_same_model(reference, engine, "replay: ")
    return stats


def run_random(seed: int, folder: Path, **options: Any) -> bool:
    """Compare a random loop with random budgets; return False if these are too small."""
    choice = random.Random(seed)
    script, precision = cases.random_loop(choice, DELAYED_EVENTS), choice.choice(["bf16", "bf16", "fp16", "fp32"])
    after, replayed = choice.choice([0, 1, 4, 40]), choice.choice([None, IN_MEMORY])
    options = (
        dict(
            precision=precision,
            max_staleness=choice.choice([1, 2, 4, 7]),
            gradient_dtype=choice.choice(["fp32", "fp32", "16-bit" if precision != "fp16" else "fp32"]),
            chunk_size=choice.choice(["3KiB", "13KiB", "18KiB", "40KiB"]),
            device_memory=choice.choice([1.6, 2.5, 20]),
            host_memory=HOST_BYTES + choice.choice([0, 30, 100]) * 1024 + PARAM16_BYTES * (precision == "fp32"),
            disk=ps.Disk(folder),
            evict_everything=choice.random() < 0.2,
        )
        | options
    )
    try:
        run_three(script, folder, after, replayed=replayed, **options)
    except BudgetError:
        return False
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return True
