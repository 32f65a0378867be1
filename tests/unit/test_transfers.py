"""Copies in flight while the host tier compacts or frees their blocks."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from late_transfer import LateTransfer

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.host_arena import ALIGN_BYTES
from patrickstar._tiers.swap_file import SwapFile
from patrickstar._tiers.transfer_counters import TransferCounters

CPU = torch.device("cpu")


def delay_copies(manager: ChunkManager) -> threading.Timer:
    """Delay the manager's copies by 0.2 s."""
    gate = threading.Event()
    manager.io_dispatch.copies.thread.submit([lambda staging: gate.wait()], "a slow copy")
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    return timer


def filled(manager: ChunkManager, index: int, units: int, tier: Tier, value: float) -> Chunk:
    """Create a chunk of `units` * ALIGN_BYTES, filled with `value`."""
    chunk = manager.new_chunk(PARAM16 if value < 5 else PARAM32, index, ALIGN_BYTES // 4 * units, "float32", tier)
    chunk.current(chunk.whole).fill_(value)
    manager.mark_written(chunk, on_device=tier is Tier.DEVICE)
    return chunk


@pytest.fixture
def manager():
    """Return a manager with room for six units on the host."""
    made = ChunkManager(CPU, 10_000, 6 * ALIGN_BYTES, poison=True)
    yield made
    made.close()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_compaction_waits_for_a_copy_in_flight(manager, direction):
    gap = filled(manager, 0, 2, Tier.HOST, 1.0)
    chunk = filled(manager, 1, 2, Tier.HOST if direction == "h2d" else Tier.DEVICE, 2.0)
    if direction == "d2h":
        assert manager.cache.ensure_host_block(chunk)
    other_gap = filled(manager, 2, 2, Tier.HOST, 3.0)
    timer = delay_copies(manager)
    if direction == "h2d":
        manager.transfers.start_fetch(chunk, urgent=False)
    else:
        manager.transfers.start_eviction(chunk, Tier.HOST)
    start = chunk.host.block.start
    manager.remove(gap)
    manager.remove(other_gap)
    newcomer = filled(manager, 3, 4, Tier.HOST, 9.0)
    assert chunk.host.block.start != start, "no compaction happened"
    timer.join()
    if direction == "h2d":
        manager.cache.fetch([chunk])
        assert (chunk.on_device(chunk.whole) == 2.0).all()
    else:
        manager.complete_transfers()
        assert chunk.host.valid
    assert (chunk.on_host(chunk.whole) == 2.0).all()
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()


def test_a_chunk_being_evicted_keeps_its_host_block(manager):
    """Its host copy looks like a duplicate, but will be the only copy."""
    filled(manager, 2, 3, Tier.HOST, 1.0)
    chunk = filled(manager, 0, 2, Tier.DEVICE, 2.0)
    assert manager.cache.ensure_host_block(chunk)
    timer = delay_copies(manager)
    manager.transfers.start_eviction(chunk, Tier.HOST)
    assert not manager.host_tier.has_room(2 * ALIGN_BYTES)
    newcomer = filled(manager, 1, 1, Tier.HOST, 9.0)
    timer.join()
    manager.move_to_tier(chunk, Tier.HOST)
    assert (chunk.on_host(chunk.whole) == 2.0).all() and chunk.host_bytes == 2 * ALIGN_BYTES
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()


def test_removing_a_chunk_waits_for_its_fetch(manager):
    chunk, other = filled(manager, 0, 2, Tier.HOST, 2.0), filled(manager, 1, 2, Tier.HOST, 3.0)
    timer = delay_copies(manager)
    manager.transfers.start_fetch(chunk, urgent=False)
    manager.remove(chunk)
    timer.join()
    assert (manager.device_tier.used, manager.host_tier.used) == (0, 2 * ALIGN_BYTES)
    newcomer = filled(manager, 2, 2, Tier.HOST, 9.0)
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    assert (other.on_host(other.whole) == 3.0).all()


class OtherProcesses:
    """Other processes, whose shards hold the number of earlier gathers of the chunk."""

    coordinator = SimpleNamespace(serving=False)

    def __init__(self) -> None:
        self.counters = TransferCounters()
        self.gathers = 0

    def gather(self, chunk: Chunk) -> Transfer:
        value, self.gathers = self.gathers, self.gathers + 1
        return LateTransfer("a gather", lambda: chunk.on_device(chunk.whole).fill_(value))

    def request_reduction(self, chunk: Chunk) -> Transfer:
        return LateTransfer("a reduction")


@pytest.fixture
def shared():
    """Return a manager and a chunk that it shares with other processes and has gathered."""
    manager = ChunkManager(CPU, 4 * ALIGN_BYTES, 4 * ALIGN_BYTES, poison=True, comm=OtherProcesses())
    chunk = manager.new_shared_chunk(PARAM16, 0, ALIGN_BYTES // 4, "float32")
    manager.cache.fetch([chunk])
    assert (chunk.on_device(chunk.whole) == 0).all()
    yield manager, chunk
    manager.close()


def test_a_chunk_is_gathered_over_its_gradients(shared):
    manager, chunk = shared
    chunk.on_device(chunk.whole).fill_(-1)
    manager.mark_written(chunk, on_device=True)
    manager.regather(chunk)
    assert chunk.device.valid and not manager.transfers.in_flight
    assert (chunk.on_device(chunk.whole) == 1).all()


@pytest.mark.parametrize("direction", ["gather", "reduction"])
def test_a_stale_chunk_is_dropped_with_what_is_in_flight(shared, direction):
    manager, chunk = shared
    if direction == "gather":
        manager.device_tier.free(chunk)
        manager.transfers.start_fetch(chunk, urgent=False)
    else:
        manager.transfers.evict_by_reduction(chunk)
    manager.drop_gathered([0])
    assert not manager.transfers.in_flight and manager.device_tier.used == 0


class SlowFile(SwapFile):
    """Swap file that takes 10 ms for each page."""

    def read(self, *args) -> None:
        time.sleep(0.01)
        super().read(*args)

    def write(self, *args) -> None:
        time.sleep(0.01)
        super().write(*args)


@pytest.fixture
def with_disk(tmp_path):
    """Return a manager with a slow disk."""
    file = SlowFile(tmp_path, 1 << 20, checksums=True, capacity_bytes=None)
    manager = ChunkManager(CPU, 1 << 16, 1 << 20, poison=True, disk=DiskTier(file, BLOCK_BYTES))
    yield manager
    manager.close()


def on_disk(manager: ChunkManager, value: float) -> Chunk:
    """Return a chunk of several pages on disk."""
    chunk = manager.new_chunk(PARAM32, 0, 3 * BLOCK_BYTES // 4, "float32", Tier.HOST)
    chunk.on_host(chunk.whole).fill_(value)
    manager.mark_written(chunk, on_device=False)
    manager.move_to_tier(chunk, Tier.DISK)
    return chunk


def test_a_chunk_is_read_from_disk_completely_before_it_is_used(with_disk):
    chunk = on_disk(with_disk, 2.0)
    with_disk.move_to_tier(chunk, Tier.HOST)
    assert (chunk.on_host(chunk.whole) == 2.0).all()


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_a_chunk_moves_after_its_pages(with_disk, kind):
    chunk = on_disk(with_disk, 2.0)
    page = LateTransfer("a page")
    chunk.disk.reads, chunk.disk.writes = ([page], {}) if kind == "reads" else ([], {0: page})
    with_disk.move_to_tier(chunk, Tier.HOST)
    assert page.done
