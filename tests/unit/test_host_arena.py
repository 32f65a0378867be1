"""Host arena: first-fit allocation of blocks, and compaction."""

import mmap

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sampling import draws

from patrickstar._tiers.host_arena import ALIGN_BYTES, ArenaBlock, HostArena


def filled(arena: HostArena, nbytes: int, value: int) -> ArenaBlock:
    block = arena.allocate(nbytes)
    assert block is not None
    arena.view(block, torch.uint8).fill_(value)
    return block


def content(arena: HostArena, block: ArenaBlock) -> set[int]:
    return set(arena.view(block, torch.uint8).tolist())


def test_an_empty_arena_allocates_empty_blocks_and_memory_outlives_its_arena_while_a_view_exists():
    arena = HostArena(0)
    assert not arena.page_locked, "there is nothing to lock"
    assert arena.allocate(1) is None
    assert arena.view(arena.allocate(0), torch.float32).shape == (0,)
    arena.unlock()
    arena = HostArena(4096)
    view = arena.view(filled(arena, 4096, 7), torch.uint8)
    arena.unlock()
    del arena
    assert set(view.tolist()) == {7}


def test_compaction_moves_a_block_over_its_own_bytes():
    arena = HostArena(4096 + 128)
    gap, block = arena.allocate(128), arena.allocate(4096)
    pattern = torch.arange(4096).to(torch.uint8)
    arena.view(block, torch.uint8).copy_(pattern)
    arena.free(gap)
    arena.compact()
    assert block.start == 0
    assert torch.equal(arena.view(block, torch.uint8), pattern)


def test_free_for_good_returns_pages_to_the_system():
    page = mmap.PAGESIZE
    arena = HostArena(1 << 30)
    before, large, after = filled(arena, 64, 1), filled(arena, 8 * page, 2), filled(arena, 64, 3)
    assert arena.touched_bytes == 9 * page
    arena.free(large, for_good=True)
    assert arena.touched_bytes == 2 * page, "the first and the last page are shared with other blocks"
    assert (content(arena, before), content(arena, after)) == ({1}, {3})
    again = arena.allocate(8 * page)
    assert again.start == large.start and arena.touched_bytes == 9 * page
    assert content(arena, again) == {0, 2}, "zeroed pages between the two that stayed"


class Operations(RuleBasedStateMachine):
    """Compares the arena with a model of its blocks; each block is filled with its own number."""

    NBYTES = 10 * mmap.PAGESIZE - 8

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena(self.NBYTES)
        self.blocks: dict[ArenaBlock, int] = {}
        self.writes = 0
        self.touched: set[int] = set()

    def gaps(self) -> list[tuple[int, int]]:
        """Return offset and length of each gap; ends of blocks are rounded up."""
        gaps, offset = [], 0
        for start, end in sorted((block.start, block.end) for block in self.blocks if block.nbytes):
            gaps.append((offset, start - offset))
            offset = end
        return [*gaps, (offset, max(0, self.NBYTES - offset))]

    @rule(nbytes=st.integers(0, 12000) | st.integers(0, 400).map(lambda n: ALIGN_BYTES * n))
    def allocate(self, nbytes: int) -> None:
        starts = [start for start, length in self.gaps() if length >= nbytes]
        block = self.arena.allocate(nbytes)
        if nbytes == 0 and block is not None:
            self.blocks[block] = -1
            return
        assert (block is None) is (not starts), "allocation fails exactly if no gap is large enough"
        if block is None:
            return
        assert (block.start, block.nbytes) == (min(starts), nbytes), "the first gap that is large enough"
        assert block.start % ALIGN_BYTES == block.end % ALIGN_BYTES == 0
        assert 0 <= block.end - block.start - nbytes < ALIGN_BYTES
        self.writes += 1
        self.blocks[block] = self.writes % 251
        self.touch(block)
        self.arena.view(block, torch.uint8).fill_(self.blocks[block])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), for_good=st.booleans())
    def free(self, data, for_good: bool) -> None:
        block = data.draw(st.sampled_from(list(self.blocks)))
        del self.blocks[block]
        self.arena.free(block, for_good=for_good)
        if for_good:
            page = mmap.PAGESIZE
            self.touched -= set(range(-(-block.start // page), (block.start + block.nbytes) // page))

    def touch(self, block: ArenaBlock) -> None:
        if block.nbytes:
            self.touched |= set(range(block.start // mmap.PAGESIZE, -(-(block.start + block.nbytes) // mmap.PAGESIZE)))

    @rule()
    def compact(self) -> None:
        order = sorted((block for block in self.blocks if block.nbytes), key=lambda block: block.start)
        self.arena.compact()
        assert order == sorted(order, key=lambda block: block.start)
        assert [block.start for block in order] == [sum(p.end - p.start for p in order[:n]) for n in range(len(order))]
        for block in order:
            self.touch(block)

    @invariant()
    def blocks_keep_their_content(self) -> None:
        assert self.arena.touched_bytes == len(self.touched) * mmap.PAGESIZE
        for block, value in self.blocks.items():
            assert block.start >= 0 and block.start + block.nbytes <= self.NBYTES
            assert (self.arena.view(block, torch.uint8) == value).all()


TestOperations = Operations.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=draws(100), stateful_step_count=40)
