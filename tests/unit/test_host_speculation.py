"""Blocks of speculative updates: taken when an update begins, and from the oldest that has ended if none is free."""

from types import SimpleNamespace

from patrickstar._step.host_speculation import SpareMemory
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.host_tier import HostTier

SIZES = 1024, 4096


def spare(sets: int) -> tuple[HostTier, SpareMemory]:
    tier = HostTier(1 << 16, 1 << 16, HostArena, poison=True)
    tier.spare_use_bytes = tier.budget_bytes
    blocks = SpareMemory(tier)
    for _ in range(sets):
        assert blocks.provide(SIZES)
    return tier, blocks


class Home(SimpleNamespace):
    """Home of an update that can be a key."""

    __hash__ = object.__hash__


def update(done: bool = True) -> tuple[Home, SimpleNamespace]:
    """Return the home of an update, and the update."""
    return Home(sizes=SIZES, blocks=None), SimpleNamespace(running=SimpleNamespace(done=done))


def test_the_oldest_update_that_has_ended_gives_its_blocks_to_a_newer_one():
    _, blocks = spare(2)
    running, (oldest, ended), (newest, last) = update(done=False), update(), update()
    assert blocks.take(*running) and blocks.take(oldest, ended)
    held = oldest.blocks
    assert blocks.take(newest, last) and newest.blocks is held and oldest.blocks is None
    assert blocks.replaced == 1


def test_blocks_that_are_kept_are_not_taken():
    _, blocks = spare(1)
    first, ended = update()
    assert blocks.take(first, ended) and blocks.keep(first)
    assert not blocks.take(*update()) and first.blocks is not None
    (_, none), (late, ended) = spare(0), update()
    assert not none.take(late, ended) and not none.keep(late), "an update without blocks has nothing to keep"


def test_all_memory_is_released():
    tier, blocks = spare(3)
    second, ended = update()
    assert blocks.take(second, ended) and tier.spare_bytes == 3 * sum(SIZES)
    assert blocks.release(second) and not blocks.release(second)
    while blocks.release():
        pass
    assert tier.spare_bytes == 0


def test_blocks_stay_within_what_the_last_step_left():
    tier, blocks = spare(0)
    tier.release_block(tier.allocate_block(60_000))  # needed in the last step
    tier.reset_peaks()
    assert blocks.provide(SIZES) and not blocks.provide(SIZES)
