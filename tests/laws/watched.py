"""Chunk managers that check at every moment that chunks fit in the budgets, and that the tiers' counts are right."""

from itertools import pairwise

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.vm_pool import SYSTEM_PAGE, round_up
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import STAGES
from patrickstar._tiers.host_tier import HostTier

from .tiers import PAGE_BYTES


class WatchedHost(HostTier):
    """Host tier that checks its budget at each allocation; all allocations use `_new_block`."""

    manager: "Watched"

    def _new_block(self, nbytes, description):
        place = super()._new_block(nbytes, description)
        in_arenas = sum(block.nbytes for arena in self.arenas for block in arena._blocks)
        threads = self.used + self.other_bytes + nbytes - in_arenas
        assert threads in (0, STAGES * PAGE_BYTES), "only the buffers of the disk's threads are outside the arena"
        assert in_arenas + threads <= self.budget_bytes
        assert place.end <= place.arena.nbytes and self.arena_bytes <= self.budget_bytes
        return place

    def allocate(self, chunk):
        host = super().allocate(chunk)
        self.manager.check(chunk)
        return host


class Watched(ChunkManager):
    """Chunk manager that checks all budgets at each allocation of a chunk, and whenever transfers are looked at."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.host_tier.__class__, self.host_tier.manager = WatchedHost, self
        allocate = self.device_tier.allocate
        self.device_tier.allocate = lambda chunk: (allocate(chunk), self.check(chunk))

    def poll_transfers(self):
        super().poll_transfers()
        self.check()

    def check(self, *newcomers):
        device, host = self.device_tier, self.host_tier
        assert device.used <= device.chunkable_bytes and host.used + host.other_bytes <= host.budget_bytes
        check_real_bytes(self, *newcomers)
        if device.page_pool is not None:
            pages = sum(SYSTEM_PAGE for chunk in self.chunks.values() if chunk.device_bytes)
            assert device.page_pool.mapped_bytes <= device.chunkable_bytes + pages + SYSTEM_PAGE
        if self.disk_tier is not None:
            file = self.disk_tier.file
            assert file.used_bytes <= file.nbytes <= (file.capacity_bytes or file.nbytes)


def check_real_bytes(manager: ChunkManager, *more: Chunk) -> None:
    """Assert that the memory that chunks, and more of them, use, whatever their flags, equals the tiers' counts."""
    chunks, pool = {*manager.chunks.values(), *more}, manager.device_tier.page_pool
    on_device = [chunk for chunk in chunks if chunk.device_bytes]
    assert manager.device_tier.used == sum(chunk.nbytes for chunk in on_device)
    # Each page has one owner, and ranges are whole pages.
    paged = [] if pool is None else [chunk for chunk in chunks if hasattr(chunk.memory, "range")]
    for chunk in paged:
        committed = sum(run.nbytes for run in chunk.memory.range.runs)
        parked = chunk.memory.range in pool._parked
        assert (committed if not parked else 0) == (round_up(chunk.nbytes) if chunk in on_device else 0), f"{chunk}"
    if pool is not None:
        assert pool.mapped_bytes - pool.parked_bytes == sum(round_up(c.nbytes) for c in on_device if c in paged)
        assert pool.mapped_bytes >= pool.parked_bytes >= 0
    for chunk in chunks.difference(paged):
        assert chunk.storage.nbytes() == (chunk.nbytes if chunk in on_device else 0), f"{chunk}"
    (arena,) = manager.host_tier.arenas
    base = arena.memory.data_ptr()
    locations = sorted(
        (start := c.host.memory.data_ptr() - base, start + c.host.memory.nbytes) for c in chunks if c.host_bytes
    )
    assert all(0 <= start <= end <= arena.nbytes for start, end in locations)
    assert sum(end - start for start, end in locations) <= arena.touched_bytes <= round_up(arena.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(locations)), "two chunks share host memory"
    assert manager.host_tier.used == sum(end - start for start, end in locations)
