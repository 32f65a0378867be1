"""Updates of pages from disk, which a worker thread runs beside the strict device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import strict_device
import toys
from probes import disk_step_of, manager_of, optimizer_step_of
from seeded import engine_of
from torch import nn

import patrickstar as ps
from patrickstar._schedule.placement import Tier
from patrickstar._step.streamed_update import THREADS, StreamedUpdate
from patrickstar._tiers.chunk import Chunk

WIDTH = 64


@contextmanager
def new_engine(directory: Path, depth: int = 8, bias: bool = True, **options) -> Iterator[ps.Engine]:
    """Return an engine whose optimizer states are on disk."""
    strict_device.configure(seed=1)
    options = dict(device_memory="120KiB", host_memory="280KiB", disk=ps.Disk(directory)) | options
    config = ps.Config(device="strict", chunk_size="18KiB", **options)
    with engine_of(lambda: toys.layers(WIDTH, depth, nn.GELU, bias=bias), config, page_bytes=4096) as engine:
        yield engine


def backward(engine: ps.Engine, hook=None, **options) -> None:
    ((batch,),) = toys.inputs(1, width=WIDTH, rows=32)
    batch = batch.to("strict").requires_grad_(hook is not None)
    if hook is not None:
        batch.register_hook(hook)
    engine.backward(engine(batch).float().square().mean(), **options)


def updated(engine: ps.Engine) -> set[Chunk]:
    """Return the `param16` chunks whose update is in progress."""
    live = disk_step_of(engine).staging_pool.live
    return {pages.owner.param16 for pages in live if pages.update is not None and not pages.updated}


def set_later(event: threading.Event) -> threading.Timer:
    timer = threading.Timer(0.2, event.set)
    timer.start()
    return timer


@contextmanager
def updates_in_progress(engine: ps.Engine, tier: Tier = Tier.DEVICE) -> Iterator[threading.Event]:
    """Return a context after a step whose updates do not end before the event is set.

    `tier`: of the first gradients.
    """
    pipeline, opened = disk_step_of(engine), threading.Event()
    for _ in range(3):
        backward(engine)
        engine.optimizer.step()
    pipeline.finish_all()
    backward(engine)
    manager = manager_of(engine)
    manager.move_to_tier(manager.param16[0], tier)
    begun = threading.Barrier(THREADS + 1)
    pool = optimizer_step_of(engine).updates.host.streamed._pool
    pool.submit([lambda stage: (begun.wait(600), opened.wait(600))] * THREADS, "updates without end")
    begun.wait(600)
    engine.optimizer.step()
    while not updated(engine):
        pipeline.progress()
    try:
        yield opened
    finally:
        opened.set()


def test_a_step_ends_before_its_pages_are_updated(tmp_path):
    with new_engine(tmp_path) as engine:
        pipeline = disk_step_of(engine)
        with updates_in_progress(engine):
            assert pipeline.unfinished
            assert all(chunk.updating for chunk in updated(engine))
        engine.optimizer.zero_grad()
        backward(engine)
        assert not pipeline.unfinished and not updated(engine)


@pytest.mark.parametrize(
    ("tier", "move"),
    [(Tier.DEVICE, "evict"), (Tier.DEVICE, "move"), (Tier.HOST, "fetch"), (Tier.HOST, "free"), (Tier.HOST, "stop")],
)
def test_a_chunk_moves_once_its_update_has_ended(tmp_path, tier, move):
    """Chunks that are being updated count as any other: what moves does not depend on the speed of the thread."""
    with new_engine(tmp_path) as engine:
        manager = manager_of(engine)
        chunk = manager.param16[0]
        with updates_in_progress(engine, tier) as opened:
            assert chunk in updated(engine) and chunk.device.valid == (tier is Tier.DEVICE)
            timer = set_later(opened)
            if move == "evict":
                manager.cache.make_room(manager.device_tier.chunkable_bytes, protect=())
            elif move == "move":
                manager.move_to_tier(chunk, Tier.HOST)
            elif move == "fetch":
                manager.cache.queue_fetches([chunk])
                assert not opened.is_set() and not chunk.device_bytes, "a prefetch does not wait"
                manager.cache.fetch([chunk])
            elif move == "stop":
                manager.cache.queue_fetches([chunk])
                manager.cache.cancel_prefetch()
                assert not opened.is_set() and not chunk.device_bytes, "a step does not wait for what was queued"
                chunk.finish_update()
                manager.cache.poll_transfers()
                assert chunk.device_bytes, "what was queued and has room is fetched after the update"
            else:
                assert manager.free_host(manager.host_tier.budget_bytes - manager.host_tier.other_bytes)
            assert opened.is_set() and chunk not in updated(engine) and not chunk.updating
            timer.join()


@pytest.mark.parametrize("keep", [True, False])
def test_an_engine_closes_with_updates_in_progress(tmp_path, keep):
    with new_engine(tmp_path) as engine:
        with updates_in_progress(engine) as opened:
            timer = set_later(opened)
            engine.close(keep=keep)
            timer.join()
        assert not updated(engine)
        assert all(param.isnan().all() != keep for param in engine.module.parameters())


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("error", [ps.errors.DiskError("the disk is gone"), KeyboardInterrupt()], ids=repr)
def test_an_engine_closes_after_an_error_with_updates_in_progress(tmp_path, monkeypatch, tier, error):
    with new_engine(tmp_path) as engine:
        pipeline, names = disk_step_of(engine), dict(engine.module.named_parameters())
        with updates_in_progress(engine, tier) as opened:
            timer = set_later(opened)
            monkeypatch.setattr(pipeline.staging_pool, "collect", mock.Mock(side_effect=error))
            with suppress(type(error)):
                engine.close()
            timer.join()
        assert not pipeline._queue.runs(on_disk=True)
        assert all(type(param) is nn.Parameter and param.device.type == "cpu" for param in names.values())
        assert all(param.untyped_storage().nbytes() > 0 for param in names.values())


def test_updates_that_have_ended_are_written_without_a_wait(tmp_path):
    with new_engine(tmp_path) as engine:
        pipeline = disk_step_of(engine)
        with updates_in_progress(engine):
            updating = [pages for pages in pipeline.staging_pool.live if pages.update is not None]
        for pages in updating:
            pages.update.job.wait()
        pipeline.progress()
        assert updating and all(pages.updated for pages in updating)


def test_no_update_runs_after_one_has_failed(tmp_path):
    with new_engine(tmp_path) as engine:
        pipeline = disk_step_of(engine)
        with updates_in_progress(engine):
            updating = [pages for pages in pipeline.staging_pool.live if pages.update is not None]
            pipeline._abort(ValueError("an update failed"))
            assert updating and all(pages.update.done for pages in updating)
            assert not pipeline.unfinished and not pipeline.staging_pool.live


def test_buffers_of_an_update_that_is_given_up_are_free_once_nothing_uses_them(tmp_path):
    with new_engine(tmp_path) as engine:
        pipeline = disk_step_of(engine)
        with updates_in_progress(engine):
            updating = [pages for pages in pipeline.staging_pool.live if pages.update is not None]
            for update in {pages.owner for pages in updating}:
                pipeline.release(update)
            ended = [pages.update.done for pages in updating]
            assert ended and all(ended)
            assert not updated(engine)


def test_products_of_an_update_end_while_the_device_has_room_for_them(tmp_path, monkeypatch):
    """The room is free until other chunks are fetched: the training thread goes on after the update."""
    waited, wait, ended = threading.Event(), StreamedUpdate.wait, []

    def note_and_wait(update: StreamedUpdate) -> None:
        waited.set()
        wait(update)

    monkeypatch.setattr(StreamedUpdate, "wait", note_and_wait)
    with new_engine(tmp_path, depth=16, bias=False, host_memory="420KiB", optimizer=ps.Muon()) as engine:
        pipeline = disk_step_of(engine)
        backward(engine)
        engine.optimizer.step()
        monkeypatch.setattr(pipeline.staging_pool, "keep_until", lambda update: ended.append(update.done))
        pool = optimizer_step_of(engine).updates.host.streamed._pool
        pool.submit([lambda stage: waited.wait(600)], "what the thread does until an update is waited for")
        pipeline.finish_all()
    assert ended[0], "the first page has a matrix, and the thread has begun once its update was waited for"


def test_a_chunk_on_its_way_to_the_host_is_updated_there(tmp_path):
    results = []
    for evict in (False, True):
        with new_engine(tmp_path) as engine:
            manager, pipeline = manager_of(engine), disk_step_of(engine)
            for _ in range(2):
                backward(engine)
                manager.complete_transfers()
                chunk = manager.param16[0]
                manager.cache.fetch([chunk])  # in the first iteration no chunk stays that no operator uses
                if evict:
                    assert manager.free_host(chunk.nbytes) and manager.cache.ensure_host_block(chunk)
                    manager.transfers.start_eviction(chunk, Tier.HOST)
                engine.optimizer.step()
                pipeline.finish_all()
                assert chunk.device.valid is not evict
                engine.optimizer.zero_grad()
            results.append(engine.state_dict())
    ps.testing.assert_same_bits(*results, "parameters")
