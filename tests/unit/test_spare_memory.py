"""Blocks of speculative updates: taken when an update begins, and from the oldest that has ended if none is free."""

from patrickstar._hardware.transfer import CompletedTransfer
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.spare_memory import SpareUse

SIZES = 1024, 4096


class Running(CompletedTransfer):
    """Update that ends when it is cancelled."""

    done = False

    def cancel(self) -> None:
        self.done = True


def tier(sets: int) -> HostTier:
    host = HostTier(1 << 16, 1 << 16, HostArena, poison=True)
    host.spare_use_bytes = host.budget_bytes
    for _ in range(sets):
        assert host.allocate_spare(SIZES)
    return host


def ended() -> SpareUse:
    return SpareUse(SIZES, CompletedTransfer("an update"))


def test_the_oldest_update_that_has_ended_gives_its_blocks_to_a_newer_one():
    spare = tier(2).spare
    running, oldest, newest = SpareUse(SIZES, Running("an update")), ended(), ended()
    assert spare.take(running) and spare.take(oldest)
    held = oldest.blocks
    assert spare.take(newest) and newest.blocks is held and oldest.blocks is None
    assert spare.replaced == 1


def test_blocks_that_are_kept_are_not_taken():
    spare, first = tier(1).spare, ended()
    assert spare.take(first) and spare.keep(first)
    assert not spare.take(ended()) and first.blocks is not None
    none, late = tier(0).spare, ended()
    assert none.is_empty and not none.take(late) and not none.keep(late), "without blocks there is nothing to keep"


def test_all_memory_is_released():
    host, second = tier(3), ended()
    assert host.spare.take(second) and host.spare_bytes == 3 * sum(SIZES)
    assert host.release_spare(second) and not host.release_spare(second)
    while host.release_spare():
        pass
    assert host.spare_bytes == 0 and host.spare.is_empty


def test_other_data_takes_free_blocks_first_then_those_of_the_oldest_update_which_is_cancelled():
    host = tier(3)
    uses = [SpareUse(SIZES, Running("an update")) for _ in range(2)]
    assert all(host.spare.take(use) for use in uses)
    host.make_room(host.free_bytes + 1, "a chunk")
    assert host.spare_bytes == 2 * sum(SIZES) and not any(use.running.done for use in uses)
    host.make_room(host.free_bytes + 1, "a chunk")
    assert [use.running.done for use in uses] == [True, False] and uses[0].blocks is None and uses[1].blocks
    host.make_room(host.budget_bytes, "a chunk")
    assert host.spare_bytes == 0 and uses[1].blocks is None
    assert not host.spare.keep(uses[1]), "the update of lost blocks does not count"


def test_blocks_stay_within_what_the_last_step_left():
    host = tier(0)
    host.release_block(host.allocate_block(60_000))  # needed in the last step
    host.reset_peaks()
    assert host.allocate_spare(SIZES) and not host.allocate_spare(SIZES)
