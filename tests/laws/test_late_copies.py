"""Law 1 with asynchronous copies: for any schedule of late copies, results are bit-identical to plain PyTorch.

See [Note: late copies] in `late_copies.py`. The test parameter is the seed of a schedule.
"""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from late_copies import LateHardware, LateKernels, LateTransfer
from seeded import assert_same_model, engine_of, reference_of
from toys import Shape, batches, train

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.transfers import ChunkTransfers
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import HostCopy, fill_poison
from patrickstar._tiers.host_arena import HostArena

from .models import config, largest_access
from .tiers import small_engine, with_budgets


def random_shape(choice: random.Random) -> Shape:
    kinds = choice.choices(["mlp", "attention", "plain"], k=choice.randint(1, 4))
    return Shape(tuple(kinds), choice.random() < 0.5, choice.random() < 0.3, choice.random() < 0.4)


def random_loop(choice: random.Random, precision: str, data: Callable[..., Any] = batches) -> ps.testing.Script:
    """Draw a loop of five steps with accumulation, clipping, updates in backward, evaluation, save and load."""
    steps = [
        {
            "accumulation": choice.choice([1, 1, 2]),
            "clip": choice.random() < 0.3,
            "update": precision != "fp16" and choice.random() < 0.4,
            "evaluate": choice.random() < 0.2,
            "save_and_load": choice.random() < 0.15,
            "length": choice.choice([5, 5, 5, 3]),
        }
        for _ in range(5)
    ]

    def script(trainer, optimizer):
        results = []
        for step in steps:
            if step["evaluate"]:
                with torch.no_grad():
                    results.append(trainer.eval()(*data(1)[0]).clone())
                trainer.train()
            if step["save_and_load"]:
                trainer.load_state_dict({name: value.clone() for name, value in trainer.state_dict().items()})
            update = step["update"] and not step["clip"] and step["accumulation"] == 1
            for batch in data(step["accumulation"], step["length"]):
                loss = trainer(*batch)
                trainer.backward(loss, **({"update": True} if update else {}))
                results.append(loss.detach().clone())
            if step["clip"]:
                results.append(trainer.clip_grad_norm_(0.1).clone())
            optimizer.step()
            optimizer.zero_grad()
        return results

    return script


def run_drawn(
    seed: int, directory, begin: Callable[[], dict], data=batches, check=lambda engine: None, **kinds
) -> ps.StepStats | None:
    """Train a random model in a random loop with random budgets, and compare it with plain PyTorch.

    `begin` returns hooks of the engine, before it is created; `check` is called with it after training; `kinds` are
    more options of `Config`. Return the statistics, or None if the budgets are too small.
    """
    choice = random.Random(seed)
    shape, precision = random_shape(choice), choice.choice(["bf16", "fp16", "fp32"])
    options = config(precision, choice.choice([256, 700, 4096, "auto"])).model_copy(update=kinds)
    script = random_loop(choice, precision, data)
    least = largest_access(
        shape.build, with_budgets(options, None, None), lambda engine: script(engine, engine.optimizer)
    )
    options = with_budgets(options, least + choice.choice([0, 700, 4000]), options.host_memory)
    options = options.model_copy(update={"activation_offload": choice.random() < 0.3})
    if choice.random() < 0.3:
        options = with_budgets(options, options.device_memory, 60 * 1024 + choice.randint(0, 30000), ps.Disk(directory))
    reference = reference_of(shape.build, options)
    expected = script(reference, reference.optimizer)
    hooks = begin()
    try:
        engine = small_engine(shape.build, options, evict_everything=choice.random() < 0.3, **hooks)
    except ps.errors.BudgetError:
        return None
    try:
        ps.testing.assert_same_bits(expected, script(engine, engine.optimizer), f"schedule {seed}: results of the loop")
        assert_same_model(reference, engine, f"schedule {seed}: ")
        check(engine)
        return engine.stats.total
    except ps.errors.BudgetError as error:
        if "grad32" not in str(error):
            raise
        return None  # The check before training does not count gradient lists.
    finally:
        engine.close()


def run_schedules(seeds: range, directory, failures: float = 0.0) -> tuple[int, int]:
    """Run schedules, most of which must have sufficient budgets; return the numbers of copies and of retries."""
    ran = []
    for seed in seeds:
        hardware = LateHardware(seed, failures)
        hooks = {"hardware": hardware, "kernels": LateKernels(CppBackend.find())}
        stats = run_drawn(
            seed, directory, lambda hooks=hooks: hooks, check=lambda _, hardware=hardware: hardware.check_pending()
        )
        if stats is not None:
            ran.append((hardware.queued, stats.memory_retries))
    assert len(ran) > len(seeds) // 2, f"only {len(ran)} of {seeds} ran"
    return sum(queued for queued, _ in ran), sum(retries for _, retries in ran)


def some_are_slow(count: int, fast: int) -> list:
    """Return ranges of at most ten seeds, `count` in all, for tests, of which those from `fast` on are slow."""
    starts = sorted({fast, *range(0, count, 10)})
    return [
        pytest.param(range(first, end), marks=[pytest.mark.slow] if first >= fast else [], id=str(first))
        for first, end in pairwise([*starts, count])
    ]


NORM_BESIDE_EVICTIONS = [pytest.param([seed], id=f"only {seed}") for seed in (140, 180)]
"""A chunk is on its way to the disk while the norm of gradients is computed."""


@pytest.mark.parametrize("seeds", [*some_are_slow(200, fast=5), *NORM_BESIDE_EVICTIONS])
def test_no_schedule_of_late_copies_changes_results(seeds, tmp_path):
    assert run_schedules(seeds, tmp_path)[0] > 0, "no copy was queued"


@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_a_failed_allocation_is_retried_and_does_not_change_results(seeds, tmp_path):
    assert run_schedules(seeds, tmp_path, failures=0.1)[1] > 0


def test_an_allocation_that_fails_twice_is_an_error_and_training_can_continue():
    shape = Shape(("mlp", "mlp", "mlp"))
    options = config("bf16", 256, device_memory=4000)
    reference = reference_of(shape.build, options)
    expected = train(reference, batches(2)), train(reference, batches(3))
    hardware = LateHardware(seed=0, failures_in_a_row=2)
    message = r"param16\[\d\] needs \d+ bytes .* failed twice.*no \d+ contiguous bytes"
    with engine_of(shape.build, options, hardware=hardware) as engine:
        assert train(engine, batches(2)) == expected[0]
        hardware.failures = 1.0
        with pytest.raises(ps.errors.BudgetError, match=message):
            engine(*batches(1)[0])
        hardware.failures = 0.0
        assert train(engine, batches(3)) == expected[1]


def test_the_host_does_not_wait_for_copies_to_the_device():
    """Without grad, chunks are fetched on demand: the compute stream waits for the copy, and the host does not."""
    shape = Shape(("mlp", "mlp", "mlp"))
    hardware = LateHardware(seed=0)
    options = config("bf16", 512, device_memory=6000)
    with engine_of(shape.build, options, hardware=hardware) as engine, torch.no_grad():
        engine(*batches(1)[0])
        queued, waited = hardware.queued, hardware.host_waits
        engine(*batches(1)[0])
        assert hardware.queued - queued > 5, "the budget is large enough for everything"
        assert hardware.host_waits == waited


def no_order(monkeypatch):
    """Do not order computation after the copy that it needs."""
    monkeypatch.setattr(LateTransfer, "order", lambda self: None)


def no_wait_before_host_memory_is_freed(monkeypatch):
    """Reuse host memory while a copy may still read it."""
    mapped = []  # a copy into memory that is unmapped would end the process
    unlock = HostArena.unlock
    monkeypatch.setattr(HostArena, "unlock", lambda arena: (mapped.append(arena.memory), unlock(arena)))
    settle = HostCopy.settle

    def settle_unless_moved(copy, *, move=False, **options):
        if not move:
            settle(copy, **options)

    monkeypatch.setattr(HostCopy, "settle", settle_unless_moved)


def no_wait_before_the_host_writes(monkeypatch):
    """Write a gradient over a host copy that an earlier fetch may still read."""

    def ensure(self, *chunks, in_order=False):
        if any(chunk.device.writer is not None or not chunk.in_memory for chunk in chunks):
            self.cache.fetch(chunks)

    monkeypatch.setattr(ChunkManager, "ensure_in_memory", ensure)


def device_memory_is_reused_at_once(monkeypatch):
    """Overwrite an evicted chunk's device memory while it is still being copied to the host."""
    start_eviction = ChunkTransfers.start_eviction

    def evict_at_once(self, chunk, tier):
        start_eviction(self, chunk, tier)
        if tier is Tier.HOST:
            fill_poison(chunk.on_device(chunk.whole))

    monkeypatch.setattr(ChunkTransfers, "start_eviction", evict_at_once)


FAULTS = {
    no_order: 2,
    no_wait_before_host_memory_is_freed: 28,
    no_wait_before_the_host_writes: 3,
    device_memory_is_reused_at_once: 1,
}
"""With the first seed of the schedules that most likely fail."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_missing_wait_is_found(fault, monkeypatch, tmp_path):
    """Check the simulation itself: with an injected fault a schedule fails."""
    fault(monkeypatch)
    found = "schedule .* differs|source of a copy was overwritten|device memory was freed"
    with pytest.raises(AssertionError, match=found):
        for first in (FAULTS[fault], *range(0, 200, 10)):
            run_schedules(range(first, first + 10), tmp_path)
