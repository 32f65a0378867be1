"""Law: updates that backward starts before the step has decided never change a bit, whatever the step decides."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import speculation_cases as cases
import strict_device
import torch
from laws.test_late_copies import some_are_slow
from probes import complete_updates, manager_of, optimizer_in_backward_of, optimizer_step_of, shards_of
from seeded import engine_of
from speculation_cases import EVENTS, LAYERS, backward, batch, build, clip, clip_nothing, loop

import patrickstar as ps
from patrickstar import testing
from patrickstar._schedule.placement import Tier
from patrickstar._step.disk_speculation import DiskSpeculation, SparePages
from patrickstar._step.host_speculation import HostSpeculation, SpareBlocks
from patrickstar._step.speculation import Speculation
from patrickstar._step.streamed_update import THREADS
from patrickstar._step.update import Update

ON_HOST = {"chunk_size": "6KiB", "host_memory": "4MiB"}


def compare(script: Callable[[Any], list[Any]], seed: int, precision: str = "bf16", **options: Any) -> ps.StepStats:
    """Compare with plain PyTorch on a device of a seeded schedule."""
    strict_device.configure(seed=seed)
    return cases.compare(script, precision, device="strict", **options)


@pytest.mark.parametrize("backwards", [1, 3])
def test_updates_that_the_step_confirms_are_committed(backwards):
    """The last of several backwards is known."""
    stats = compare(loop([[clip_nothing]] * 6, [backwards] * 6), seed=1, **ON_HOST)
    assert stats.speculated >= LAYERS and stats.speculation_hits == stats.speculated


@pytest.mark.parametrize("device_memory", [0.5, 1.6], ids=["half of the parameters fit", "all fit"])
def test_updates_that_the_step_contradicts_are_dropped(device_memory):
    events = [[clip_nothing]] * 3 + [[clip]] * 3 + [[clip_nothing]] * 3
    stats = compare(loop(events, [1] * 9), seed=2, **ON_HOST, device_memory=device_memory)
    assert 0 < stats.speculation_hits < stats.speculated
    # One step misses; the next ones assume nothing until one was not clipped.
    assert stats.speculated - stats.speculation_hits <= LAYERS + 2


@pytest.mark.parametrize("event", [*EVENTS[2:], cases.write_parameter])
@pytest.mark.parametrize("room", [False, True], ids=["planned", "evicted at every access"])
def test_whatever_happens_before_the_step_is_seen(event, room):
    script = loop([[]] * 3 + [[event], [], [event], []], [1] * 7)
    assert compare(script, seed=3, **ON_HOST, device_memory=0.7, evict_everything=room).speculated > 0


def test_overflow_drops_what_was_updated():
    script = loop([[]] * 3 + [[cases.overflow], [], [cases.overflow], []], [1] * 7)
    stats = compare(script, seed=4, precision="fp16", **ON_HOST)
    assert stats.overflows == 2 and stats.speculated > 0


def test_without_spare_memory_nothing_is_updated_early():
    stats = compare(loop([[clip_nothing]] * 5, [1] * 5), seed=6, chunk_size="6KiB", host_memory="340KiB")
    assert stats.speculated < LAYERS


@pytest.mark.parametrize("event", [each for each in EVENTS[1:] if "gradient" not in each.__name__])
def test_updates_from_disk_see_whatever_happens_before_the_step(event, tmp_path, monkeypatch):
    begun, begin = [], SparePages.begin
    monkeypatch.setattr(SparePages, "begin", lambda home, rules: begun.append(rules) or begin(home, rules))
    compare(loop([[]] * 3 + [[event], [], [], [event], []], [1] * 8), seed=9, **cases.on_disk(tmp_path))
    assert begun


def test_chunks_on_disk_are_updated_early_though_the_host_had_no_spare_memory(tmp_path, monkeypatch):
    begin, decide, end = SparePages.begin, HostSpeculation.end_step, DiskSpeculation.end_step
    events = []

    def allow_all(speculation, confident):
        end(speculation, confident)
        speculation._limit = 99  # as if many updates had been late

    monkeypatch.setattr(SparePages, "begin", lambda home, rules: events.append("disk") or begin(home, rules))
    monkeypatch.setattr(DiskSpeculation, "end_step", allow_all)
    monkeypatch.setattr(HostSpeculation, "end_step", lambda host: events.append("step") or decide(host) + 1000)
    compare(loop([[]] * 8, [1] * 8), seed=10, **cases.on_disk(tmp_path))
    steps = " ".join(events).split("step")
    assert all("disk" in each for each in steps[4:8]), f"updates from disk before each step: {steps}"


@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_no_order_of_events_changes_a_bit(seeds):
    stats = [strict_device.configure(seed=seed) or cases.run(seed, device="strict") for seed in seeds]
    assert sum(each.steps > 0 for each in stats) > len(seeds) // 2
    assert sum(each.speculation_hits for each in stats) > 0, f"no hit in the runs in {seeds}"
    assert sum(each.speculated - each.speculation_hits for each in stats) > 0, f"no miss in {seeds}"


@contextmanager
def no_update_begins(engine: ps.Engine) -> Iterator[None]:
    """Keep the worker threads of updates on the host busy until the step has decided which of them count."""
    updates = optimizer_step_of(engine).updates.host
    assert updates is not None and updates.streamed is not None
    complete_updates(engine)  # those of the last step, which would wait behind the job
    decided = threading.Event()
    updates.streamed._pool.submit([lambda stage: decided.wait()] * THREADS, "jobs before all updates", urgent=True)
    end_step = HostSpeculation.end_step

    def end(speculation: HostSpeculation) -> int:
        decided.set()
        return end_step(speculation)

    with mock.patch.object(HostSpeculation, "end_step", end):
        try:
            yield
        finally:
            decided.set()


def test_an_update_that_has_not_begun_copies_no_bytes():
    """The step does it then, and copies the gradients once, as an early update does."""
    strict_device.configure(seed=8)
    memory = f"{3 * cases.PARAM16_BYTES}B"  # parameters and activations, and no states
    config = ps.Config(device="strict", **ON_HOST, device_memory=memory)
    copied = []
    with engine_of(build, config) as engine:
        for seed in range(6):
            with no_update_begins(engine) if seed == 4 else nullcontext():
                backward(engine, seed)
                engine.optimizer.step()
            copied.append(engine.stats.last)
    assert copied[4].speculation_hits == 0
    assert [stats.d2h_bytes for stats in copied[1:]] == 5 * [cases.PARAM16_BYTES]


def trained(seed: int) -> ps.Engine:
    """Return an engine whose next backward starts updates."""
    strict_device.configure(seed=seed)
    engine = engine_of(build, ps.Config(device="strict", **ON_HOST, device_memory="48KiB"))
    for number in range(3):
        backward(engine, number)
        engine.optimizer.step()
    return engine


def undecided(engine: ps.Engine) -> list[Update]:
    """Return the updates that the step will decide on."""
    return list(optimizer_in_backward_of(engine).speculation._undecided)


def test_an_engine_closes_with_speculative_updates_in_progress():
    engine = trained(seed=7)
    backward(engine, 3)
    assert undecided(engine)
    module = engine.module
    expected = engine.state_dict()
    engine.close()
    testing.assert_same_bits(expected, {name: value.detach() for name, value in module.state_dict().items()}, "closed")


@pytest.mark.parametrize("event", ["another", "error"])
def test_results_that_the_step_can_not_use_take_no_memory(event):
    """A backward that another one follows, or that has failed, leaves no updates."""
    with trained(seed=8) as engine:
        started = []

        def end(gradient: torch.Tensor) -> None:
            started.extend(undecided(engine))
            if event == "error":
                raise ValueError("no gradient")

        inputs = batch(3).requires_grad_()
        inputs.register_hook(end)
        with pytest.raises(ValueError, match="no gradient") if event == "error" else nullcontext():
            engine.backward(engine(inputs).float().square().mean())
        if event == "another":
            backward(engine, 4)
        assert started and not undecided(engine) and not manager_of(engine).host_tier.spare.uses


def end_updates(engine: ps.Engine) -> list[Update]:
    """Let the updates that backward has started end before the step, and return them."""
    optimizer_in_backward_of(engine).speculation.progress()
    for update in undecided(engine):
        update.running.wait()
    return undecided(engine)


def test_results_that_are_there_at_the_step_are_in_place_when_it_returns():
    with trained(seed=9) as engine:
        complete_updates(engine)
        backward(engine, 3)
        ended = end_updates(engine)
        engine.optimizer.step()
        assert ended and engine.stats.last.speculation_hits
        assert not set(ended) & set(optimizer_step_of(engine).updates.queue.updates)


def test_results_replace_what_is_on_its_way_to_the_device(monkeypatch):
    """Its copy on the host is freed once it has arrived, as that of any parameter if all fit on the device."""

    def add_host_copies(trainer: Any) -> list[Any]:
        if isinstance(trainer, ps.Engine):
            manager = manager_of(trainer)
            assert all([manager.cache.ensure_host_block(chunk) for chunk in manager.param16.values()])
        return []

    def fetch(trainer: Any) -> list[Any]:
        if isinstance(trainer, ps.Engine):
            manager = manager_of(trainer)
            for update in end_updates(trainer):
                manager.cache.withdraw_hold(update.param16)
                manager.move_to_tier(update.param16, Tier.HOST)
                manager.transfers.start_fetch(update.param16, urgent=False)
            assert manager.transfers.in_flight
            manager.transfers.keep_duplicates = False
        return []

    commit, moving = SpareBlocks.commit, []

    def note_and_commit(home: SpareBlocks, update: Update) -> None:
        moving.append(update.param16 in home.data.manager.transfers.in_flight)
        commit(home, update)

    monkeypatch.setattr(SpareBlocks, "commit", note_and_commit)
    events = [[], [], [add_host_copies], [fetch], [add_host_copies], [fetch]]
    compare(loop(events, [1] * 6), seed=11, **ON_HOST, device_memory=3)
    assert any(moving)


def test_a_chunk_on_its_way_to_the_host_is_updated_early(monkeypatch):
    progress = Speculation.progress

    def evict_and_progress(speculation: Speculation) -> None:
        manager = speculation.data.manager
        for index in () if speculation.assumption is None else speculation.assumption.candidates:
            chunk = speculation.data.by_chunk[index][0].shard_chunk
            manager.cache.withdraw_hold(chunk)
            if not chunk.pins and chunk.device.valid and chunk not in manager.transfers.in_flight:
                assert manager.cache.ensure_host_block(chunk)
                manager.transfers.start_eviction(chunk, Tier.HOST)
        progress(speculation)

    def end(trainer: Any) -> list[Any]:
        if isinstance(trainer, ps.Engine):
            end_updates(trainer)
        return []

    monkeypatch.setattr(Speculation, "progress", evict_and_progress)
    assert compare(loop([[end]] * 6, [1] * 6), seed=12, **ON_HOST).speculation_hits >= LAYERS


def test_a_step_waits_until_an_update_that_has_begun_has_memory():
    with trained(seed=13) as engine:
        host_tier, updates = manager_of(engine).host_tier, optimizer_step_of(engine).updates
        complete_updates(engine)
        home = SpareBlocks(shards_of(engine), 0, updates, [])
        begun = Update(0, {}, (), home, running=mock.Mock(withdraw=lambda: False))
        host_tier.spare_use_bytes = host_tier.spare_bytes + sum(home.use.sizes)
        assert host_tier.allocate_spare(home.use.sizes)
        timer = threading.Timer(0.1, home._bind)
        timer.start()
        assert home.keep(begun)
        timer.join()
        assert host_tier.release_spare(home.use)


def test_an_update_that_is_dropped_has_ended_before_its_memory_is_used_again():
    with trained(seed=14) as engine:
        host_tier, updates = manager_of(engine).host_tier, optimizer_step_of(engine).updates
        complete_updates(engine)
        home, held = SpareBlocks(shards_of(engine), 0, updates, []), []
        running = mock.Mock(cancel=lambda: held.append(home.use.blocks is not None))
        host_tier.spare_use_bytes = host_tier.spare_bytes + sum(home.use.sizes)
        assert host_tier.allocate_spare(home.use.sizes)
        home._bind()
        home.drop(Update(0, {}, (), home, running=running))
        assert held == [True] and home.use.blocks is None
