"""Chunks on the strict device: what each wait of the memory layer is for."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import strict_device
import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.transfer import Deferred
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._schedule.placement import Tier
from patrickstar._step.update import InPlace, Update
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.host_arena import ALIGN_BYTES

DEVICE = torch.device("strict", 0)
NUMEL = ALIGN_BYTES // 4
DEVICE_CHUNKS, HOST_CHUNKS = 3, 4
SEEDS = range(8)

pytestmark = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture
def manager(seed):
    """Return a manager with room for a few chunks on each tier. Work of the device is late by a schedule."""
    strict_device.configure(seed=seed)
    manager = ChunkManager(DEVICE, DEVICE_CHUNKS * ALIGN_BYTES, HOST_CHUNKS * ALIGN_BYTES, poison=True)
    yield manager
    manager.close()


def filled(manager: ChunkManager, index: int, tier: Tier, value: float) -> Chunk:
    """Create a chunk on one tier, filled with a value."""
    chunk = manager.new_chunk(PARAM16, index, NUMEL, "float32", tier)
    chunk.current(chunk.whole).fill_(value)
    manager.mark_written(chunk, on_device=tier is Tier.DEVICE)
    return chunk


def start_eviction(manager: ChunkManager, chunk: Chunk) -> None:
    """Start to copy a chunk to the host."""
    assert manager.cache.ensure_host_block(chunk)
    manager.transfers.start_eviction(chunk, Tier.HOST)


def in_flight(manager: ChunkManager, direction: str) -> Chunk:
    """Return a chunk that is on its way to the device or from it, filled with 2."""
    chunk = filled(manager, 0, Tier.HOST if direction == "fetch" else Tier.DEVICE, 2.0)
    if direction == "fetch":
        manager.transfers.start_fetch(chunk, urgent=False)
    else:
        start_eviction(manager, chunk)
    return chunk


def evicted(manager: ChunkManager, index: int, value: float) -> Chunk:
    """Return a chunk on the host that the device may have yet to write."""
    chunk = filled(manager, index, Tier.DEVICE, value)
    start_eviction(manager, chunk)
    manager.transfers.complete(chunk)
    assert chunk.host.valid and not chunk.device.present
    return chunk


def fetched_and_dropped(manager: ChunkManager, index: int, value: float) -> tuple[Chunk, torch.Tensor]:
    """Return a chunk that was fetched and evicted without a copy, and what the device reads in between."""
    chunk = filled(manager, index, Tier.HOST, value)
    manager.cache.fetch([chunk])
    read = chunk.on_device(chunk.whole).clone()
    manager.cache._evict(chunk)
    assert chunk.host.valid and not chunk.device.present
    return chunk, read


@pytest.mark.parametrize("view", ["on_host", "flat"])
def test_a_view_of_the_host_copy_waits_for_the_device(manager, view):
    chunk = evicted(manager, 0, 2.0)
    values = chunk.on_host(chunk.whole) if view == "on_host" else chunk.flat(0, NUMEL)
    assert (values == 2).all()


def test_the_host_copy_is_not_written_while_the_device_reads_it(manager):
    chunk, read = fetched_and_dropped(manager, 0, 2.0)
    manager.ensure_in_memory(chunk)
    chunk.on_host(chunk.whole).fill_(9)
    assert (read == 2).all().item()


def test_an_update_in_place_does_not_write_what_the_device_still_reads(manager):
    chunk, read = fetched_and_dropped(manager, 0, 2.0)
    master = manager.new_chunk(PARAM32, 0, NUMEL, "float32", Tier.HOST)
    managed = Mock(
        location=SimpleNamespace(chunk=0, offset=0, numel=NUMEL),
        schema=SimpleNamespace(
            state_lists=[SimpleNamespace(kind=PARAM32)], master_dtype="float32", gradients_beside=False
        ),
        state=SimpleNamespace(accumulated=False),
        chunk=chunk,
        shard_chunk=chunk,
        flat=lambda chunk, in_order: chunk.flat(0, NUMEL, in_order=in_order),
    )
    home = InPlace(Mock(manager=manager, state_chunks=lambda index: [master]))
    (span,) = home.whole(Update(0, {managed: Mock()}, (), home), beside=False, waits=False)
    span.param.fill_(9)
    assert (read == 2).all().item()


def test_no_copy_uses_the_host_after_a_chunk_is_idle(manager):
    read_by_copy, read = fetched_and_dropped(manager, 0, 2.0)
    written_by_copy = evicted(manager, 1, 3.0)
    in_flight = filled(manager, 2, Tier.HOST, 4.0)
    manager.transfers.start_fetch(in_flight, urgent=False)
    for chunk in (read_by_copy, written_by_copy, in_flight):
        manager.transfers.settle(chunk)
        chunk._host_view(chunk.whole).add_(10)
    assert (read == 2).all().item()
    assert (written_by_copy.on_host(written_by_copy.whole) == 13).all()
    assert (in_flight.on_device(in_flight.whole) == 4).all().item()


@pytest.mark.parametrize("direction", ["fetch", "evict"])
def test_a_chunk_in_flight_is_moved_once_it_has_arrived(manager, direction):
    chunk = in_flight(manager, direction)
    manager.move_to_tier(chunk, Tier.HOST)
    assert not manager.transfers.in_flight and manager.device_tier.used == 0
    assert (chunk.on_host(chunk.whole) == 2).all()


@pytest.mark.parametrize("direction", ["fetch", "evict"])
def test_a_removed_chunk_leaves_nothing_in_flight(manager, direction):
    chunk = in_flight(manager, direction)
    manager.remove(chunk)
    assert not manager.transfers.in_flight
    assert (manager.device_tier.used, manager.host_tier.used) == (0, 0)
    successors = filled(manager, 1, Tier.DEVICE, 8.0), filled(manager, 2, Tier.HOST, 9.0)
    torch.accelerator.synchronize()
    assert [set(each.current(each.whole).cpu().tolist()) for each in successors] == [{8.0}, {9.0}]


def test_all_transfers_end_at_once(manager):
    up, down = filled(manager, 0, Tier.HOST, 2.0), filled(manager, 1, Tier.DEVICE, 3.0)
    manager.transfers.start_fetch(up, urgent=False)
    start_eviction(manager, down)
    manager.complete_transfers()
    assert not manager.transfers.in_flight
    assert up.device.valid and down.host.valid and not down.device.present


def test_transfers_that_have_ended_free_their_memory_without_a_wait(manager):
    chunk = filled(manager, 0, Tier.DEVICE, 3.0)
    start_eviction(manager, chunk)
    torch.accelerator.synchronize()
    manager.cache.poll_transfers()
    assert not manager.transfers.in_flight and manager.device_tier.used == 0


def test_memory_of_running_evictions_is_freed_for_a_retry(manager):
    chunk = filled(manager, 0, Tier.DEVICE, 3.0)
    start_eviction(manager, chunk)
    manager.cache.free_memory(0)
    assert manager.device_tier.used == 0
    assert (chunk.on_host(chunk.whole) == 3).all()


def test_a_freed_host_block_is_not_written_by_the_copy_before(manager):
    chunk = evicted(manager, 0, 2.0)
    manager.host_tier.free(chunk)
    successor = filled(manager, 1, Tier.HOST, 9.0)
    torch.accelerator.synchronize()
    assert (successor.on_host(successor.whole) == 9).all()


def test_an_only_copy_in_flight_survives_the_cancelling_of_all_transfers(manager):
    chunk = filled(manager, 0, Tier.HOST, 2.0)
    manager.transfers.start_fetch(chunk, urgent=False)
    manager.host_tier.free(chunk)
    manager.cancel_transfers()
    assert chunk.device.valid
    assert (chunk.on_device(chunk.whole) == 2).all().item()


def test_held_chunks_stay_while_others_are_evicted(manager):
    held, other = filled(manager, 0, Tier.DEVICE, 2.0), filled(manager, 1, Tier.DEVICE, 3.0)
    manager.cache.hold(held)
    manager.cache.make_room((DEVICE_CHUNKS - 1) * ALIGN_BYTES, protect=())
    assert held.device.valid and not other.device.present
    manager.cache.withdraw_holds()


def test_a_chunk_that_makes_room_for_a_new_one_on_the_host_is_valid_at_once(manager):
    first, *_ = [filled(manager, index, Tier.HOST, float(index)) for index in range(HOST_CHUNKS)]
    manager.transfers.keep_duplicates = False
    filled(manager, HOST_CHUNKS, Tier.HOST, 9.0)
    assert first.device.valid and not manager.transfers.in_flight


def test_a_cancelled_eviction_no_longer_writes_to_the_host(manager):
    chunk = filled(manager, 0, Tier.DEVICE, 3.0)
    start_eviction(manager, chunk)
    manager.cancel_transfers()
    assert chunk.device.valid and not chunk.host.valid
    manager.host_tier.free(chunk)
    successor = filled(manager, 1, Tier.HOST, 9.0)
    torch.accelerator.synchronize()
    assert (successor.on_host(successor.whole) == 9).all()


def test_queued_fetches_get_the_room_of_evictions_in_flight(manager):
    first, *_ = [filled(manager, index, Tier.DEVICE, float(index)) for index in range(DEVICE_CHUNKS)]
    queued = filled(manager, DEVICE_CHUNKS, Tier.HOST, 9.0)
    start_eviction(manager, first)
    manager.cache.queue_fetches([queued])
    assert not queued.device_bytes
    manager.cache.cancel_prefetch()
    assert queued.device_bytes and not first.device_bytes


def test_a_chunk_is_evicted_once_it_has_arrived(manager):
    chunk = in_flight(manager, "fetch")
    manager.cache._evict(chunk)
    assert not manager.transfers.in_flight and manager.device_tier.used == 0
    assert (chunk.on_host(chunk.whole) == 2).all()


def test_idle_chunks_are_gone_once_room_was_made(manager):
    chunk = in_flight(manager, "evict")
    manager.cache.evict_idle(manager.device_tier.chunkable_bytes, protect=())
    assert manager.device_tier.used == 0
    assert (chunk.on_host(chunk.whole) == 2).all()


def test_processes_that_decide_alike_fetch_into_the_room_of_evictions_that_have_started(manager):
    first, *_ = [filled(manager, index, Tier.DEVICE, float(index)) for index in range(DEVICE_CHUNKS)]
    queued = filled(manager, DEVICE_CHUNKS, Tier.HOST, 9.0)
    start_eviction(manager, first)
    manager.cache.decides_alike = True
    manager.cache.queue_fetches([queued])
    assert queued.device_bytes and not first.device_bytes


def test_a_duplicate_is_freed_once_its_update_has_ended(manager):
    chunk, ended = filled(manager, 0, Tier.HOST, 2.0), []
    manager.cache.fetch([chunk])
    chunk.host.update = Deferred("an update", lambda: ended.append(chunk.host.present))
    assert manager.cache._free_duplicates(manager.host_tier.budget_bytes)
    assert ended == [True] and not chunk.host.present


@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_new_content_below_replaces_what_was_in_flight(manager, tier, direction):
    chunk = in_flight(manager, direction)
    if tier is Tier.DISK:
        manager.transfers.disk_renewed(chunk)
        assert not manager.transfers.in_flight and manager.device_tier.used == 0
        return
    manager.transfers.host_renewed(chunk, urgent=True)
    assert chunk.device.reader is None, "it is evicted no longer"
    manager.complete_transfers()
    assert chunk.host.valid and not manager.transfers.in_flight


def test_a_cancelled_fetch_no_longer_writes_to_the_device(manager):
    chunk = filled(manager, 0, Tier.HOST, 2.0)
    manager.transfers.start_fetch(chunk, urgent=False)
    manager.cancel_transfers()
    assert chunk.host.valid and not chunk.device.present
    successor = filled(manager, 1, Tier.DEVICE, 9.0)
    torch.accelerator.synchronize()
    assert (successor.on_device(successor.whole) == 9).all().item()
