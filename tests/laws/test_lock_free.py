"""Law: a lock-free run, its replay and plain PyTorch in the order of its log give the same bits."""

import random

import pytest
from lock_free_cases import (
    HOST_BYTES,
    IN_MEMORY,
    STEPS,
    USUAL,
    config_of,
    engine_with,
    let_chances_pass,
    on_disk,
    run_random,
    run_three,
)
from seeded import reference_of
from speculation_cases import DELAYED_EVENTS, PARAM16_BYTES, build, loop, step
from toys import train

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._params.local_shards import LocalShards
from patrickstar._schedule.placement import Tier

from .test_late_copies import some_are_slow
from .tiers import Room, blocks, inputs, options, small_engine
from .tiers import on_disk as least_budgets_on_disk


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("replayed", [None, IN_MEMORY], ids=["replay from disk", "replay in memory"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_run_replay_and_reference_agree(share, replayed, precision, monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, share)
    host = dict(host_memory=HOST_BYTES + PARAM16_BYTES) if precision == "fp32" else {}
    stats = run_three(USUAL, tmp_path, replayed=replayed, **on_disk(tmp_path) | host, precision=precision)
    assert stats.disk_write_bytes > 0 and stats.staleness > 0 and stats.peak_staleness <= 4


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_gradients_that_no_update_has_used_are_never_older(max_staleness, monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, 1.0)  # every update waits until it must not wait any longer
    config = config_of(ps.LockFree(max_staleness=max_staleness, after=1), **on_disk(tmp_path))
    with engine_with(config) as engine:
        found = []
        for number in range(STEPS):
            step(engine, number)
            found.append(engine.stats.last.peak_staleness)
        assert found[: max_staleness + 1] == list(range(max_staleness + 1)) and max(found) == max_staleness


def test_with_a_staleness_of_one_the_bits_are_those_of_a_delayed_update(monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, 1.0)
    config = least_budgets_on_disk(
        blocks, options(update=ps.LockFree(max_staleness=1, after=1)), tmp_path, inputs(1)[0], Room()
    )
    delayed = reference_of(blocks, options(update=ps.Delayed(after=1)))
    with small_engine(blocks, config) as engine:
        for batch in inputs(STEPS):
            ps.testing.assert_same_bits(train(delayed, [batch]), train(engine, [batch]), "loss")
        assert engine.stats.last.staleness == 1, "some states are in memory"


def test_states_in_memory_are_updated_in_the_step_on_a_cpu(tmp_path):
    """Then nothing is late: the bits are those of plain PyTorch."""
    config = config_of(ps.LockFree(after=1), **IN_MEMORY)
    exact = reference_of(build, config.model_copy(update={"update": None}))
    with engine_with(config) as engine:
        ps.testing.assert_same_bits(USUAL(exact), USUAL(engine), "results")
        assert engine.stats.total.peak_staleness == 0


@pytest.mark.parametrize("event", DELAYED_EVENTS[1:])
def test_whatever_happens_before_the_step(event, monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, 0.7)
    script = loop([[]] * 2 + [[event], [], [event], []], [1] * 6)
    run_three(script, tmp_path, replayed=IN_MEMORY, **on_disk(tmp_path))


@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_random_loops(seeds, monkeypatch, tmp_path):
    tested = 0
    for seed in seeds:
        let_chances_pass(monkeypatch, random.Random(seed).choice([0.0, 0.5, 0.9, 1.0]), seed)
        tested += run_random(seed, tmp_path)
    assert tested > len(seeds) // 2


@pytest.mark.parametrize("more_kib", [43, 49, 58, 70])
def test_gradient_lists_that_move_states_to_the_disk(more_kib, monkeypatch, tmp_path):
    """Room on the host for a list is made by single chunks of states; an update moves the others after them."""
    moved, free_host = [], ChunkManager.free_host

    def noted(manager, nbytes):
        before = {chunk for chunk in manager.chunks.values() if chunk.in_memory}
        fits = free_host(manager, nbytes)
        moved.extend(chunk for chunk in before if not chunk.in_memory)
        return fits

    monkeypatch.setattr(ChunkManager, "free_host", noted)
    monkeypatch.setattr(LocalShards, "grad_list_tier", lambda shards, managed: Tier.HOST)
    let_chances_pass(monkeypatch, 0.5, 3)
    budgets = on_disk(tmp_path) | {"host_memory": HOST_BYTES + more_kib * 1024}
    run_three(loop([[]] * 8, [1, 1, 2, 1, 1, 1, 1, 1]), tmp_path, chunk_size="3KiB", device_memory=1.6, **budgets)
    assert moved
