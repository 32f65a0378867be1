"""Copies in flight while the host tier compacts or frees their blocks."""

import threading

import pytest
import torch

from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.host_arena import ALIGN_BYTES
from patrickstar._schedule.placement import Tier

CPU = torch.device("cpu")


class DelayedCopies:
    """Delays the manager's copies by 0.2 s."""

    def __init__(self, manager: ChunkManager) -> None:
        gate = threading.Event()
        manager.io_dispatch.copies.thread.submit([lambda staging: gate.wait()], "a slow copy")
        self.timer = threading.Timer(0.2, gate.set)
        self.timer.start()


def filled(manager: ChunkManager, index: int, units: int, tier: Tier, value: float) -> Chunk:
    """Create a chunk of `units` * ALIGN_BYTES, filled with `value`."""
    chunk = manager.new_chunk(PARAM16 if value < 5 else PARAM32, index, ALIGN_BYTES // 4 * units, "float32", tier)
    chunk.current(chunk.whole).fill_(value)
    manager.mark_written(chunk, on_device=tier is Tier.DEVICE)
    return chunk


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_compaction_waits_for_a_copy_in_flight(direction):
    manager = ChunkManager(CPU, 10_000, 6 * ALIGN_BYTES, poison=True)
    gap = filled(manager, 0, 2, Tier.HOST, 1.0)
    chunk = filled(manager, 1, 2, Tier.HOST if direction == "h2d" else Tier.DEVICE, 2.0)
    if direction == "d2h":
        assert manager._ensure_host_block(chunk)
    other_gap = filled(manager, 2, 2, Tier.HOST, 3.0)
    delayed = DelayedCopies(manager)
    if direction == "h2d":
        manager.transfers.start_fetch(chunk, urgent=False)
    else:
        manager.transfers.start_eviction(chunk, Tier.HOST)
    start = chunk.host_block.start
    manager.remove(gap)
    manager.remove(other_gap)
    newcomer = filled(manager, 3, 4, Tier.HOST, 9.0)
    assert chunk.host_block.start != start, "no compaction happened"
    delayed.timer.join()
    if direction == "h2d":
        manager.fetch([chunk])
        assert (chunk.on_device(chunk.whole) == 2.0).all()
    else:
        manager.complete_transfers()
        assert chunk.host_valid
    assert (chunk.on_host(chunk.whole) == 2.0).all()
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    manager.close()


def test_a_chunk_being_evicted_keeps_its_host_block():
    """Its host copy looks like a duplicate, but will be the only copy."""
    manager = ChunkManager(CPU, 10_000, 3 * ALIGN_BYTES, poison=True)
    chunk = filled(manager, 0, 2, Tier.DEVICE, 2.0)
    assert manager._ensure_host_block(chunk)
    delayed = DelayedCopies(manager)
    manager.transfers.start_eviction(chunk, Tier.HOST)
    assert not manager.host_tier.has_room(2 * ALIGN_BYTES)
    newcomer = filled(manager, 1, 1, Tier.HOST, 9.0)
    delayed.timer.join()
    manager.move_to_tier(chunk, Tier.HOST)
    assert (chunk.on_host(chunk.whole) == 2.0).all() and chunk.host_bytes == 2 * ALIGN_BYTES
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    manager.close()


def test_removing_a_chunk_waits_for_its_fetch():
    manager = ChunkManager(CPU, 10_000, 4 * ALIGN_BYTES, poison=True)
    chunk, other = filled(manager, 0, 2, Tier.HOST, 2.0), filled(manager, 1, 2, Tier.HOST, 3.0)
    delayed = DelayedCopies(manager)
    manager.transfers.start_fetch(chunk, urgent=False)
    manager.remove(chunk)
    delayed.timer.join()
    assert (manager.device_tier.used, manager.host_tier.used) == (0, 2 * ALIGN_BYTES)
    newcomer = filled(manager, 2, 2, Tier.HOST, 9.0)
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    assert (other.on_host(other.whole) == 3.0).all()
    manager.close()
