"""Host tier: accounting, eviction of duplicate copies, and compaction."""

import mmap

import pytest
import torch
from late_transfer import LateTransfer

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.transfer import Deferred
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ALIGN_BYTES
from patrickstar._tiers.host_tier import HostTier
from patrickstar.errors import BudgetError

CPU = torch.device("cpu")


def tier(budget: int, arena: int | None = None, *, poison: bool = True) -> HostTier:
    return HostTier(budget, budget if arena is None else arena, Hardware(CPU).host_arena, poison=poison)


def chunk_on(host: HostTier, units: int, value: float = 1.0, index: int = 0) -> Chunk:
    """Create a chunk of `units` * ALIGN_BYTES, filled with `value`."""
    chunk = Chunk("param32", index, ALIGN_BYTES // 4 * units, "float32", CPU)
    host.allocate(chunk).fill_(value)
    chunk.host.valid = True
    return chunk


def values(chunk: Chunk) -> set[float]:
    return set(chunk.on_host(chunk.whole).tolist())


def test_a_released_block_is_used_again_after_its_copy():
    host, copy = tier(3 * ALIGN_BYTES), LateTransfer("a copy")
    block = host.allocate_block(2 * ALIGN_BYTES)
    host.copy_issued(block, copy)
    host.release_block(block)
    assert host.other_bytes == 0
    assert host.allocate_block(ALIGN_BYTES).start == 2 * ALIGN_BYTES, "the copy still reads or writes the first bytes"
    assert not copy.waits
    assert host.allocate_block(2 * ALIGN_BYTES).start == 0
    assert copy.waits == 1


def test_blocks_move_after_their_copies():
    host, copy = tier(4 * ALIGN_BYTES), LateTransfer("a copy")
    first, second = host.allocate_block(ALIGN_BYTES), host.allocate_block(ALIGN_BYTES)
    host.copy_issued(second, copy)
    host.release_block(first)
    assert host.allocate_block(3 * ALIGN_BYTES).start == ALIGN_BYTES
    assert copy.waits == 1 and second.start == 0


def test_peaks_are_those_since_the_last_reset_and_a_summary_has_what_is_used():
    host = tier(4096)
    chunk, small = chunk_on(host, 8), chunk_on(host, 2)
    block = host.allocate_block(512)
    host.free(chunk)
    host.release_block(block)
    assert (host.peak, host.other_peak) == (1280, 512)
    host.reset_peaks()
    assert (host.peak, host.other_peak) == (256, 0)
    host.free(small)
    block = host.allocate_block(128)
    assert (host.peak, host.other_peak) == (256, 128)
    chunk_on(host, 2)
    others = "offloaded activations and pages in flight 128 bytes of a budget of 4096 bytes"
    assert host.usage_summary() == f"chunks use 256 bytes and {others}"


def test_arena_is_no_larger_than_the_budget_and_may_be_smaller():
    assert tier(1000, 4000).arena_bytes == 1000
    host = tier(4000, 1000)
    assert (host.arena_bytes, host.free_bytes) == (1000, 4000)


def test_a_second_arena_is_added_within_the_budget():
    host = tier(16384, 4096)
    chunks = [chunk_on(host, 8, value, value) for value in range(4)]
    more = chunk_on(host, 32, 9.0)
    assert len(host.arenas) == 2 and host.arena_bytes == 8192
    assert (host.used, host.free_bytes) == (8192, 8192)
    assert [values(chunk) for chunk in (*chunks, more)] == [{0.0}, {1.0}, {2.0}, {3.0}, {9.0}]
    assert host.touched_bytes == 2 * mmap.PAGESIZE
    host.free(more)
    block = host.allocate_block(4096)
    assert len(host.arenas) == 2, "existing arenas are used first"
    host.view(block, torch.uint8).fill_(1)
    assert [values(chunk) for chunk in chunks] == [{0.0}, {1.0}, {2.0}, {3.0}]
    host.unlock()


def test_errors_state_the_missing_bytes_and_nothing_is_counted():
    host = tier(4096)
    chunk = chunk_on(host, 16)
    needs = r"pages needs 4096 bytes on the host.*Raise host_memory by at least 2048 "
    with pytest.raises(BudgetError, match=needs) as caught:
        host.allocate_block(4000, "pages")
    assert caught.value.short_bytes == 2048
    with pytest.raises(BudgetError, match="needs 4096 contiguous bytes"):
        chunk_on(host, 32)
    assert (host.used, host.other_bytes, host.free_bytes) == (2048, 0, 2048)
    assert values(chunk) == {1.0}


def test_only_duplicate_copies_are_freed_to_make_room():
    host = tier(8 * ALIGN_BYTES)
    only, double, other = (chunk_on(host, 2, value, value) for value in range(3))
    double.allocate_device()
    double.device.valid = True
    assert not host.has_room(5 * ALIGN_BYTES)
    assert double.host.present, "nothing is freed if that does not make enough room"
    assert host.has_room(2 * ALIGN_BYTES)
    assert double.host.present, "nothing is freed without need"
    assert host.has_room(4 * ALIGN_BYTES)
    assert not double.host.present and not double.host.valid
    assert (values(only), values(other)) == ({0.0}, {2.0})
    double.device.valid = False
    double.free_device(poison=False)


@pytest.mark.parametrize("poison", [True, False])
def test_freed_memory_is_poisoned_on_request(poison):
    host = tier(4096, poison=poison)
    chunk = chunk_on(host, 1, 5.0)
    freed = chunk.host.memory
    host.free(chunk)
    assert freed.isnan().all() if poison else (freed == 5.0).all()


@pytest.fixture
def between_gaps():
    """Return a full tier from which two chunks were freed, and the chunk between them, which moves for a larger one."""
    host = tier(8 * ALIGN_BYTES)
    first, second, third, _ = (chunk_on(host, 2, value, value) for value in range(4))
    host.free(first)
    host.free(third)
    return host, second


@pytest.mark.parametrize("kind", ["reader", "writer"])
def test_transfers_in_flight_are_waited_for_before_blocks_move(between_gaps, kind):
    (host, second), copy = between_gaps, LateTransfer("a copy")
    setattr(second.host, kind, copy)
    block = host.allocate_block(256)
    assert copy.waits == 0, "there was a gap, so no block moved"
    host.release_block(block)
    chunk_on(host, 4)
    assert copy.waits == 1 and second.host.block.start == 0
    setattr(second.host, kind, copy)
    host.free(second)
    assert copy.waits == 2, "nor may its block be reused"


@pytest.mark.parametrize("kind", ["save", "update"])
def test_saves_and_updates_of_a_host_copy_are_ended_before_its_block_moves(between_gaps, kind):
    (host, second), ended = between_gaps, []

    def end() -> None:
        setattr(second.host, kind, None)  # as a running update does
        ended.append(second.host.block.start)

    setattr(second.host, kind, Deferred(kind, end))
    chunk_on(host, 4)
    assert ended == [2 * ALIGN_BYTES] and second.host.block.start == 0


def test_host_copies_that_an_ending_update_exchanges_move_after_what_reads_them_then():
    """Delayed parameters exchange their place with those that operators read, which a copy to the device follows."""
    host, copy = tier(8 * ALIGN_BYTES), LateTransfer("a copy to the device")
    first_gap, param, second_gap, delayed = (chunk_on(host, 2, value, value) for value in range(4))
    host.free(first_gap)
    host.free(second_gap)

    def end() -> None:
        param.host.update = delayed.host.update = None
        host.exchange_blocks(param, delayed)
        param.host.reader = copy

    param.host.update = delayed.host.update = Deferred("an update", end)
    chunk_on(host, 4)
    assert copy.waits == 1
    assert (values(param), values(delayed)) == ({3.0}, {1.0})


def test_memory_of_the_device_that_a_checkpoint_writer_reads_is_freed_after_its_reads():
    manager, ended = ChunkManager(CPU, 4 * ALIGN_BYTES, 4 * ALIGN_BYTES, poison=True), []
    chunk = manager.new_chunk("param32", 0, ALIGN_BYTES // 4, "float32", Tier.DEVICE)
    chunk.in_use.save = Deferred("a save", lambda: ended.append(chunk.device.present))
    manager.device_tier.free(chunk)
    assert ended == [True] and not chunk.device.present
    manager.close()


def test_memory_for_spare_blocks_grows_with_what_is_asked_for_up_to_its_use():
    host = tier(1000 * ALIGN_BYTES, ALIGN_BYTES)
    chunk_on(host, 1)
    assert not host.allocate_spare([ALIGN_BYTES]), "no use was stated"
    host.spare_use_bytes = 21 * ALIGN_BYTES
    assert all(host.allocate_spare([ALIGN_BYTES, 2 * ALIGN_BYTES]) for _ in range(7))
    assert not host.allocate_spare([ALIGN_BYTES])
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [1, 3, 3, 6, 9], "each as large as all before"
    while host.release_spare():
        pass
    assert all(host.allocate_spare([3 * ALIGN_BYTES]) for _ in range(7)), "the same memory is used again"
    assert host.arena_bytes == 22 * ALIGN_BYTES
    host.unlock()


def test_memory_for_spare_blocks_is_kept_until_other_data_needs_it():
    """It is page-locked, and would be locked anew."""
    host = tier(100 * ALIGN_BYTES, 4 * ALIGN_BYTES)
    first = chunk_on(host, 3)
    host.spare_use_bytes = 6 * ALIGN_BYTES
    assert host.allocate_spare([6 * ALIGN_BYTES]) and host.release_spare()
    chunk_on(host, 2, index=1)
    host.free(first)
    second = chunk_on(host, 5, index=2)  # no gap is large enough, until the other chunk has moved to the first arena
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 6]
    host.free(second)
    chunk_on(host, 7, index=3)
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 7]
    assert host.allocate_spare([6 * ALIGN_BYTES])
    assert [arena.nbytes // ALIGN_BYTES for arena in host.arenas] == [4, 7, 6]
    host.unlock()
