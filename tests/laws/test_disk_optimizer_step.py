"""The update from disk to disk: what is read when, and that the pool's pages all come back."""

import time
from functools import partial
from unittest import mock

import pytest
import torch
from probes import complete_updates, disk_step_of, manager_of, optimizer_step_of, shards_of
from seeded import engine_of
from torch import nn
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar._layout.schema import EXP_AVG
from patrickstar._schedule.eviction_prefetch import DemandFetch
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.swap_file import SwapFile

WIDTH = 64


def engine_on(folder, device_memory="24KiB", host_memory="140KiB", **hooks) -> ps.Engine:
    memory = {"device_memory": device_memory, "host_memory": host_memory}
    config = ps.Config(device="cpu", chunk_size=8448, disk=ps.Disk(folder), **memory)
    return engine_of(partial(layers, WIDTH, 12, nn.Tanh), config, page_bytes=4096, **hooks)


@pytest.fixture
def engine(tmp_path):
    with engine_on(tmp_path) as engine:
        yield engine


def steps(engine: ps.Engine, count: int) -> None:
    train(engine, inputs(1, WIDTH, rows=4) * count)


def test_a_step_returns_before_its_updates_and_the_next_forward_ends_them(engine):
    pipeline = disk_step_of(engine)
    steps(engine, 2)
    pending, parameters = pipeline.unfinished, engine.inspect().parameters
    # Pages that were read on trust may be updated already.
    assert pending and pending <= {param.chunk for param in parameters if param.optimizer_tier == "disk"}
    assert all(param.update_pending and not param.has_gradient for param in parameters if param.chunk in pending)
    engine(torch.zeros(4, WIDTH))
    assert not pipeline.unfinished


def test_all_pages_come_back_and_nothing_is_read_twice(engine):
    pool = disk_step_of(engine).staging_pool
    steps(engine, 3)
    engine.state_dict()
    before = engine.inspect()
    tiers = {param.chunk: param.optimizer_tier for param in before.parameters}
    on_disk = sum(chunk.optimizer_bytes for chunk in engine.layout.chunks if tiers[chunk.index] == "disk")
    steps(engine, 4)
    engine.state_dict()
    after = engine.inspect()
    param16 = after.h2d_bytes - before.h2d_bytes
    assert after.disk_write_bytes - before.disk_write_bytes >= 4 * on_disk
    # What the last step read on trust was read in place of what the first found there.
    read = after.disk_read_bytes - before.disk_read_bytes
    assert abs(read - param16 - 4 * on_disk) <= pool.size.nbytes + engine.layout.param16_bytes * 4
    assert all(there.owner is None for there in pool.live), "an update holds pages after its end"


@pytest.fixture
def slow_writes(monkeypatch):
    """Let the disk take 10 ms to write a page."""
    write = SwapFile.write

    def slow_write(*args) -> None:
        time.sleep(0.01)
        write(*args)

    monkeypatch.setattr(SwapFile, "write", slow_write)


def test_who_waits_for_a_buffer_sleeps(engine, slow_writes):
    pipeline = disk_step_of(engine)
    steps(engine, 2)
    pages = sum(len(update.pages) for update in pipeline.updates)
    with mock.patch.object(pipeline.read_ahead, "start", wraps=pipeline.read_ahead.start) as read_ahead:
        pipeline.finish_all()
    assert 0 < read_ahead.call_count <= 3 * pages


def test_reads_that_were_interrupted_are_made_up_for(engine):
    pipeline = disk_step_of(engine)
    steps(engine, 2)
    while not pipeline._queued():
        assert pipeline.unfinished
        pipeline.read_ahead.start(pipeline.updates)
    interrupted = pipeline._queued()[0]
    pipeline.staging_pool.wait(interrupted.reads)
    interrupted.reads.clear()
    pipeline.finish_all()
    assert len(interrupted.reads) == len(interrupted.lists)


def test_after_the_last_update_every_page_is_on_disk(engine, slow_writes):
    steps(engine, 2)
    disk_step_of(engine).finish_all()
    assert not any(chunk.disk.has_writes for chunk in manager_of(engine).chunks.values())


def test_gradients_on_disk_are_read_for_an_update_on_the_host(tmp_path):
    results = []
    for moved in (False, True):
        engine = engine_on(tmp_path, host_memory="600KiB")
        steps(engine, 2)
        on_host = {param.chunk for param in engine.inspect().parameters if param.optimizer_tier == "host"}
        assert on_host
        engine.backward(mean_square(engine(*inputs(1, WIDTH, rows=4)[0])))
        for index in on_host if moved else ():
            chunk = manager_of(engine).param16[index]
            manager_of(engine).move_to_tier(chunk, Tier.DISK)
            assert not chunk.in_memory
        shards_of(engine).update_param_views()
        engine.optimizer.step()
        results.append(engine.state_dict())
        engine.close()
    ps.testing.assert_same_bits(*results, "parameters")


def test_a_gradient_is_assigned_after_the_deferred_update(tmp_path):
    """As in a loop that computes gradients by itself."""
    results = []
    for memory in ({}, {"device_memory": "64MiB", "host_memory": "64MiB"}):
        engine = engine_on(tmp_path, **memory)
        steps(engine, 2)
        for value in (0.1, -0.2):
            assert memory or disk_step_of(engine).unfinished
            gradients = [torch.full(param.shape, value, dtype=param.dtype) for param in engine.module.parameters()]
            for param, gradient in zip(engine.module.parameters(), gradients, strict=True):
                param.grad = gradient
            engine.optimizer.step()
        results.append(engine.state_dict())
        engine.close()
    ps.testing.assert_same_bits(*results, "parameters")


def test_without_looking_ahead_pages_are_read_when_they_are_waited_for(tmp_path):
    engine = engine_on(tmp_path, prefetch_policy=DemandFetch)
    pipeline = disk_step_of(engine)
    steps(engine, 1)
    assert pipeline.unfinished and not pipeline.staging_pool.live
    steps(engine, 1)
    engine.close()


def test_an_early_update_enters_the_pipeline_in_backward(engine):
    steps(engine, 2)
    values = torch.randn(4, WIDTH)
    loss = mean_square(engine(values))
    assert not disk_step_of(engine).unfinished
    engine.backward(loss, update=True)
    assert disk_step_of(engine).unfinished or any(
        managed.state.updated_in_backward for managed in shards_of(engine).managed_params
    )
    engine.optimizer.step()


class Skipping(nn.Module):
    """Layers of which a call may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(WIDTH, 12, nn.Tanh)

    def forward(self, values: torch.Tensor, skipped: tuple[int, ...] = ()) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            values = values if number in skipped else layer(values)
        return values


@pytest.mark.parametrize(("late", "host_memory"), [(ps.Delayed(after=3), "200KiB"), (ps.LockFree(after=3), "480KiB")])
def test_states_leave_the_disk_after_their_last_update_there(tmp_path, late, host_memory):
    """A step whose updates are late moves them to the host, also if it has no gradients for them."""
    results = []
    for ended in (False, True):
        budgets = {"device_memory": "24KiB", "host_memory": host_memory, "disk": ps.Disk(tmp_path)}
        config = ps.Config(device="cpu", chunk_size=8448, update=late, **budgets)
        with engine_of(Skipping, config, page_bytes=4096, prefetch_policy=DemandFetch) as engine:
            manager, values = manager_of(engine), inputs(1, WIDTH, rows=4)[0]
            for skipped in ((), (), (2, 3)):
                if skipped and ended:
                    complete_updates(engine)
                if skipped:  # and a new plan has found room for their states
                    manager.host_tier.budget_bytes += 1 << 20
                    optimizer_step_of(engine).tiers.home.update(dict.fromkeys(skipped, Tier.HOST))
                engine.backward(mean_square(engine(*values, skipped)))
                assert ended or disk_step_of(engine).unfinished >= set(skipped)
                engine.optimizer.step()
            assert all(manager[EXP_AVG, index].in_memory for index in skipped)
            results.append(engine.state_dict())
    ps.testing.assert_same_bits(*results, "parameters")
