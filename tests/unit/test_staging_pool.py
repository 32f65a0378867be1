"""Sizes of the ring of pages through which states pass from disk to disk."""

import pytest
import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._schedule.placement import Tier
from patrickstar._step.staging_pool import StagingPool, StagingSize
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.swap_file import SwapFile


@pytest.mark.parametrize(
    ("lists", "whole", "room", "page_bytes", "sets"),
    [
        *((3, None, room, 4096, sets) for room, sets in ((0, 2), (3 * 4096 * 5, 5), (1 << 30, 12))),
        (4, 100_000, 1 << 30, 102_400, 2),  # where an update can not be cut a page of the ring holds a chunk
        (4, 10_000, 1 << 30, 12_288, 2),  # larger chunks may be cut
    ],
)
def test_a_ring_has_as_many_sets_as_there_is_room_for_but_two_at_least(lists, whole, room, page_bytes, sets):
    size = StagingSize.choose(lists, 100_000, 4096, whole, room)
    assert (size.page_bytes, size.pages, size.nbytes) == (page_bytes, lists * sets, lists * sets * page_bytes)


@pytest.mark.parametrize(("room", "sets"), [(0, 2), (20, 20 // 3), (600, 12), (1200, 20), (6000, 40)])
def test_beside_updates_on_the_host_there_are_more_sets_within_a_twentieth_of_its_memory(room, sets):
    size = StagingSize.choose(3, 100_000, 4096, None, room * 4096, beside_updates=True)
    assert size.pages == 3 * sets
    assert sets <= 12 or 20 * size.nbytes <= room * 4096


def test_pages_of_lists_pass_through_buffers_and_come_back(tmp_path):
    disk = DiskTier(SwapFile(tmp_path, 0), 4096)
    manager = ChunkManager(torch.device("cpu"), 1 << 16, 1 << 20, poison=True, disk=disk)
    numel = 3000  # three pages, the last one in part
    lists = [manager.new_chunk(kind, 0, numel, "float32", Tier.HOST) for kind in ("param32", "exp_avg")]
    for value, chunk in enumerate(lists):
        chunk.on_host(chunk.whole).copy_(torch.arange(numel) + value)
        manager.mark_written(chunk, on_device=False)
        manager.move_to_tier(chunk, Tier.DISK)
    pool = StagingPool(manager, StagingSize(4096, 4, by_pages=True))
    first, second = (pool.start_read(lists, *page) for page in pool.pages(lists)[:2])
    assert pool.start_read(lists, *pool.pages(lists)[2]) is None, "no buffers are free"
    for pages in (first, second):
        pool.wait(pages.reads)
        assert pages.ready and pages.is_current(lists)
        for value, view in enumerate(pool.views(pages).values()):
            assert torch.equal(view, torch.arange(pages.first, pages.first + pages.numel) + float(value))
            view.neg_()
    pool.write(first, lists)
    first.updated = True
    pool.drop(second)
    pool.wait_for_buffers()
    pool.collect()
    assert not pool.live and not lists[0].disk.has_writes
    for value, chunk in enumerate(lists):
        manager.move_to_tier(chunk, Tier.HOST)
        found, expected = chunk.on_host(chunk.whole), torch.arange(numel) + float(value)
        assert torch.equal(found[1024:], expected[1024:]) and torch.equal(found[:1024], -expected[:1024])
    manager.close()
