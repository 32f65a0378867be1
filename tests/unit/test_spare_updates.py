"""Blocks of speculative updates: taken when an update begins, and from the oldest that has ended if none is free."""

from types import SimpleNamespace

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.host_arena import ALIGN_BYTES, HostArena
from patrickstar._memory.host_tier import HostTier
from patrickstar._step.host_speculation import _SpareBlocks, _Update

SIZES = 1024, 4096


def spare(sets: int) -> tuple[HostTier, _SpareBlocks]:
    tier = HostTier(1 << 16, 1 << 16, HostArena, poison=True)
    tier.spare_use_bytes = tier.budget_bytes
    blocks = _SpareBlocks(tier)
    for _ in range(sets):
        assert blocks.provide(SIZES)
    return tier, blocks


def update(done: bool = True) -> _Update:
    chunks = [SimpleNamespace(nbytes=nbytes) for nbytes in SIZES]
    return _Update({}, chunks, [], [], [], running=SimpleNamespace(done=done))


def test_the_oldest_update_that_has_ended_gives_its_blocks_to_a_newer_one():
    _, blocks = spare(2)
    running, oldest, newest = update(done=False), update(), update()
    assert blocks.take(running) and blocks.take(oldest)
    held = oldest.blocks
    assert blocks.take(newest) and newest.blocks is held and oldest.blocks is None
    assert blocks.replaced == 1


def test_blocks_that_are_kept_are_not_taken():
    _, blocks = spare(1)
    kept = update()
    assert blocks.take(kept) and blocks.keep(kept)
    assert not blocks.take(update()) and kept.blocks is not None


def test_an_update_without_blocks_has_nothing_to_keep():
    _, blocks = spare(0)
    late = update()
    assert not blocks.take(late) and not blocks.keep(late)


def test_all_memory_is_released():
    tier, blocks = spare(3)
    taken = update()
    assert blocks.take(taken) and tier.spare_bytes == 3 * sum(SIZES)
    assert blocks.release(taken) and not blocks.release(taken)
    while blocks.release():
        pass
    assert tier.spare_bytes == 0


def test_blocks_stay_within_what_the_last_step_left():
    tier = HostTier(1 << 16, 1 << 16, HostArena, poison=True)
    tier.spare_use_bytes = tier.budget_bytes
    tier.release_block(tier.allocate_block(60_000))  # needed in the last step
    tier.reset_peaks()
    blocks = _SpareBlocks(tier)
    assert blocks.provide(SIZES) and not blocks.provide(SIZES)


def new_chunk(units: int, index: int = 0) -> Chunk:
    return Chunk("param32", index, ALIGN_BYTES // 4 * units, "float32", torch.device("cpu"))


def test_memory_for_spare_blocks_grows_with_what_is_asked_for_up_to_its_use():
    host = HostTier(1000 * ALIGN_BYTES, ALIGN_BYTES, HostArena, poison=True)
    host.allocate(new_chunk(1))
    assert host.allocate_spare([ALIGN_BYTES]) is None, "no use was stated"
    host.spare_use_bytes = 21 * ALIGN_BYTES
    held = [host.allocate_spare([ALIGN_BYTES, 2 * ALIGN_BYTES]) for _ in range(7)]
    assert all(held) and host.allocate_spare([ALIGN_BYTES]) is None
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [1, 3, 3, 6, 9], "each as large as all before"
    for blocks in held:
        for block in blocks:
            host.release_spare(block)
    assert all(host.allocate_spare([3 * ALIGN_BYTES]) for _ in range(7)), "the same memory is used again"
    assert host.arena_bytes == 22 * ALIGN_BYTES
    host.close()


def test_memory_for_spare_blocks_is_kept_until_other_data_needs_it():
    """It is page-locked, and would be locked anew."""
    host = HostTier(100 * ALIGN_BYTES, 4 * ALIGN_BYTES, HostArena, poison=True)
    first = new_chunk(3)
    host.allocate(first)
    host.spare_use_bytes = 6 * ALIGN_BYTES
    (block,) = host.allocate_spare([6 * ALIGN_BYTES])
    host.release_spare(block)
    host.allocate(new_chunk(2, index=1))
    host.free(first)
    second = new_chunk(5, index=2)
    host.allocate(second)  # no gap is large enough, until the other chunk has moved to the first arena
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 6]
    host.free(second)
    host.allocate(new_chunk(7, index=3))
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 7]
    assert host.allocate_spare([6 * ALIGN_BYTES]) is not None
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 7, 6]
    host.close()
