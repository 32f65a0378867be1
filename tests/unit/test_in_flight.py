"""Copies that are on their way while the host tier wants their place."""

import threading

import pytest
import torch

from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.host_arena import ALIGN_BYTES
from patrickstar._schedule.placement import Tier

CPU = torch.device("cpu")


class Slow:
    """Lets the manager's copies begin a little after they are asked for, or at once when somebody waits."""

    def __init__(self, manager: ChunkManager) -> None:
        gate = threading.Event()
        manager.io_dispatch.copies.thread.submit([lambda stage: gate.wait()], "a slow copy")
        self.timer = threading.Timer(0.2, gate.set)
        self.timer.start()


def filled(manager: ChunkManager, index: int, units: int, tier: Tier, value: float) -> Chunk:
    """A chunk of ALIGN_BYTES times `units`."""
    chunk = manager.new_chunk(PARAM16 if value < 5 else PARAM32, index, ALIGN_BYTES // 4 * units, "float32", tier)
    chunk.current(chunk.whole).fill_(value)
    manager.mark_written(chunk, on_device=tier is Tier.DEVICE)
    return chunk


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_chunk_changes_places_only_when_its_copy_is_done(way):
    manager = ChunkManager(CPU, 10_000, 6 * ALIGN_BYTES, poison=True)
    gap = filled(manager, 0, 2, Tier.HOST, 1.0)
    chunk = filled(manager, 1, 2, Tier.HOST if way == "up" else Tier.DEVICE, 2.0)
    if way == "down":
        assert manager._ensure_host_block(chunk)
    other_gap = filled(manager, 2, 2, Tier.HOST, 3.0)
    slow = Slow(manager)
    if way == "up":
        manager.transfers.start_fetch(chunk, urgent=False)
    else:
        manager.transfers.start_eviction(chunk, Tier.HOST)
    start = chunk.host_block.start
    manager.remove(gap)
    manager.remove(other_gap)
    newcomer = filled(manager, 3, 4, Tier.HOST, 9.0)
    assert chunk.host_block.start != start, "the places were not closed up"
    slow.timer.join()
    if way == "up":
        manager.fetch([chunk])
        assert (chunk.on_device(chunk.whole) == 2.0).all()
    else:
        manager.complete_transfers()
        assert chunk.host_valid
    assert (chunk.on_host(chunk.whole) == 2.0).all()
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    manager.close()


def test_a_chunk_that_is_leaving_keeps_its_place():
    """The device has its bytes still, but not for long: what looks like a spare copy is to be the only one."""
    manager = ChunkManager(CPU, 10_000, 3 * ALIGN_BYTES, poison=True)
    chunk = filled(manager, 0, 2, Tier.DEVICE, 2.0)
    assert manager._ensure_host_block(chunk)
    slow = Slow(manager)
    manager.transfers.start_eviction(chunk, Tier.HOST)
    assert not manager.host_tier.has_room(2 * ALIGN_BYTES)
    newcomer = filled(manager, 1, 1, Tier.HOST, 9.0)
    slow.timer.join()
    manager.move_to_tier(chunk, Tier.HOST)
    assert (chunk.on_host(chunk.whole) == 2.0).all() and chunk.host_bytes == 2 * ALIGN_BYTES
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    manager.close()


def test_a_chunk_that_is_coming_and_is_removed_takes_nothing_along():
    manager = ChunkManager(CPU, 10_000, 4 * ALIGN_BYTES, poison=True)
    chunk, other = filled(manager, 0, 2, Tier.HOST, 2.0), filled(manager, 1, 2, Tier.HOST, 3.0)
    slow = Slow(manager)
    manager.transfers.start_fetch(chunk, urgent=False)
    manager.remove(chunk)
    slow.timer.join()
    assert (manager.device_tier.used, manager.host_tier.used) == (0, 2 * ALIGN_BYTES)
    newcomer = filled(manager, 2, 2, Tier.HOST, 9.0)
    assert (newcomer.on_host(newcomer.whole) == 9.0).all()
    assert (other.on_host(other.whole) == 3.0).all()
    manager.close()
