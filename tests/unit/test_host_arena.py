"""The slab: places in one piece of memory, first fit, and gaps that close."""

import mmap
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from patrickstar._memory.host_arena import ALIGN_BYTES, ArenaBlock, HostArena
from patrickstar._memory.vm_pool import round_up

quick = settings(derandomize=True, deadline=None, max_examples=200)


def filled(slab: HostArena, nbytes: int, value: int) -> ArenaBlock:
    place = slab.allocate(nbytes)
    assert place is not None
    slab.view(place, torch.uint8).fill_(value)
    return place


def content(slab: HostArena, place: ArenaBlock) -> set[int]:
    return set(slab.view(place, torch.uint8).tolist())


@quick
@given(st.lists(st.integers(1, 40).map(lambda n: ALIGN_BYTES * n), min_size=1, max_size=20))
def test_chunks_fill_a_slab_of_just_their_bytes_to_the_last_one(sizes):
    slab = HostArena(sum(sizes))
    locations = [slab.allocate(nbytes) for nbytes in sizes]
    assert [place.start for place in locations] == [sum(sizes[:count]) for count in range(len(sizes))]
    assert locations[-1].end == slab.nbytes
    assert slab.touched_bytes == round_up(slab.nbytes), "whole pages"
    assert slab.allocate(1) is None
    for place in locations:
        slab.free(place)
    assert slab.allocate(sum(sizes)).start == 0


def test_the_first_place_that_is_large_enough_is_taken():
    slab = HostArena(4096)
    locations = [slab.allocate(nbytes) for nbytes in (256, 128, 512, 128, 256, 128)]
    for place in locations[::2]:
        slab.free(place)
    assert slab.allocate(512).start == 384, "the first gap is too small"
    assert slab.allocate(256).start == 0
    assert slab.allocate(384).start == 1408, "behind all others"
    assert slab.allocate(256).start == 1024


def test_a_slab_ends_at_its_last_byte():
    slab = HostArena(384)
    assert slab.allocate(385) is None
    kept = slab.allocate(128)
    assert slab.allocate(257) is None
    assert slab.allocate(256).end == 384
    slab.free(kept)
    assert slab.allocate(129) is None
    assert slab.allocate(128).start == 0


def test_a_slab_need_not_end_at_a_whole_unit():
    slab = HostArena(388)
    assert slab.allocate(384).end == 384
    assert slab.allocate(5) is None
    last = slab.allocate(4)
    assert (last.start, slab.view(last, torch.uint8).numel()) == (384, 4)


def test_places_begin_at_whole_units_and_have_the_bytes_asked_for():
    slab = HostArena(4096)
    for nbytes in (1, 127, 128, 129, 400):
        place = slab.allocate(nbytes)
        assert place.start % ALIGN_BYTES == 0 and place.nbytes == nbytes
        assert place.end % ALIGN_BYTES == 0 and 0 <= place.end - place.start - nbytes < ALIGN_BYTES
        assert slab.view(place, torch.uint8).numel() == nbytes
        assert slab.view(place, torch.uint8).data_ptr() % ALIGN_BYTES == 0


def test_a_slab_of_no_bytes_has_only_places_of_none():
    slab = HostArena(0)
    assert not slab.pinned, "there is nothing to lock"
    assert slab.allocate(1) is None
    assert slab.view(slab.allocate(0), torch.float32).shape == (0,)
    slab.close()


@pytest.mark.parametrize("before", [0, 128])
def test_a_place_of_no_bytes_is_in_nobodys_way(before):
    slab = HostArena(640)
    first = slab.allocate(before)
    none, second, other_none, third = (slab.allocate(nbytes) for nbytes in (0, 128, 0, 256))
    locations = sorted([first, second, third], key=lambda place: place.start)
    assert all(one.end <= other.start for one, other in pairwise(locations))
    slab.compact()
    slab.free(none)
    slab.free(other_none)
    assert third.end <= before + 384


def test_views_are_of_the_slabs_own_memory_in_any_type():
    slab = HostArena(1024)
    slab.allocate(256)
    place = slab.allocate(256)
    numbers = slab.view(place, torch.float32)
    numbers.copy_(torch.arange(64.0))
    assert numbers.untyped_storage()._cdata == slab.memory.untyped_storage()._cdata
    assert numbers.data_ptr() == slab.memory.data_ptr() + place.start
    assert torch.equal(slab.view(place, torch.int32), numbers.view(torch.int32))
    assert slab.view(place, torch.bfloat16).shape == (128,)
    assert slab.view(place, torch.float64).shape == (32,)


def test_compaction_closes_gaps_in_order_and_keeps_bytes():
    slab = HostArena(2048)
    locations = [filled(slab, nbytes, value) for value, nbytes in enumerate((128, 256, 128, 384, 129, 128))]
    for place in (locations[0], locations[2]):
        slab.free(place)
    stale = slab.view(locations[1], torch.uint8)
    slab.compact()
    kept = [locations[1], *locations[3:]]
    assert [place.start for place in kept] == [0, 256, 640, 896]
    assert [content(slab, place) for place in kept] == [{1}, {3}, {4}, {5}]
    assert stale.data_ptr() == slab.memory.data_ptr() + 128, "a view of before must be taken anew"
    assert slab.allocate(1024).start == 1024
    assert slab.allocate(128) is None


def test_compaction_of_places_in_a_row_moves_nothing():
    slab = HostArena(1024)
    locations = [filled(slab, 256, value) for value in range(4)]
    slab.compact()
    assert [place.start for place in locations] == [0, 256, 512, 768]
    assert [content(slab, place) for place in locations] == [{0}, {1}, {2}, {3}]


def test_a_place_moves_over_its_own_bytes():
    slab = HostArena(4096 + 128)
    gap, place = slab.allocate(128), slab.allocate(4096)
    pattern = torch.arange(4096).to(torch.uint8)
    slab.view(place, torch.uint8).copy_(pattern)
    slab.free(gap)
    slab.compact()
    assert place.start == 0
    assert torch.equal(slab.view(place, torch.uint8), pattern)


def test_only_what_was_ever_in_a_place_is_taken_of_the_machine():
    slab = HostArena(1 << 40)
    assert slab.touched_bytes == 0
    first, second = filled(slab, 64, 1), filled(slab, 100, 2)
    page = mmap.PAGESIZE
    assert slab.touched_bytes == page
    slab.free(second)
    slab.free(first)
    assert slab.touched_bytes == page, "pages stay"
    filled(slab, 128, 3)
    assert slab.touched_bytes == page
    filled(slab, page, 4)
    assert slab.touched_bytes == 2 * page


def test_what_is_given_back_for_good_is_the_machines_again():
    page = mmap.PAGESIZE
    slab = HostArena(1 << 30)
    before, large, after = filled(slab, 64, 1), filled(slab, 8 * page, 2), filled(slab, 64, 3)
    assert slab.touched_bytes == 9 * page
    slab.free(large, for_good=True)
    assert slab.touched_bytes == 2 * page, "of the first and the last page, neighbours have a part"
    assert (content(slab, before), content(slab, after)) == ({1}, {3})
    again = slab.allocate(8 * page)
    assert again.start == large.start and slab.touched_bytes == 9 * page
    assert content(slab, again) == {0, 2}, "fresh pages between the two that stayed"


def test_memory_lives_as_long_as_a_tensor_over_it():
    slab = HostArena(4096)
    view = slab.view(filled(slab, 4096, 7), torch.uint8)
    slab.close()
    del slab
    assert set(view.tolist()) == {7}


class Operations(RuleBasedStateMachine):
    """Against a model that knows which bytes are whose: each place is filled with a number of its own."""

    NBYTES = 10 * mmap.PAGESIZE - 8

    def __init__(self) -> None:
        super().__init__()
        self.slab = HostArena(self.NBYTES)
        self.locations: dict[ArenaBlock, int] = {}
        self.turns = 0
        self.touched: set[int] = set()

    def gaps(self) -> list[tuple[int, int]]:
        """Where free bytes begin, and how many there are in a row; ends of places are rounded up."""
        found, at = [], 0
        for start, end in sorted((place.start, place.end) for place in self.locations if place.nbytes):
            found.append((at, start - at))
            at = end
        return [*found, (at, max(0, self.NBYTES - at))]

    @rule(nbytes=st.integers(0, 12000) | st.integers(0, 400).map(lambda n: ALIGN_BYTES * n))
    def take(self, nbytes: int) -> None:
        starts = [start for start, length in self.gaps() if length >= nbytes]
        place = self.slab.allocate(nbytes)
        if nbytes == 0 and place is not None:
            self.locations[place] = -1
            return
        assert (place is None) is (not starts), "there is room, or there is none"
        if place is None:
            return
        assert (place.start, place.nbytes) == (min(starts), nbytes)
        self.turns += 1
        self.locations[place] = self.turns % 251
        self.touch(place)
        self.slab.view(place, torch.uint8).fill_(self.locations[place])

    @precondition(lambda self: self.locations)
    @rule(data=st.data(), for_good=st.booleans())
    def give(self, data, for_good: bool) -> None:
        place = data.draw(st.sampled_from(list(self.locations)))
        del self.locations[place]
        self.slab.free(place, for_good=for_good)
        if for_good:
            page = mmap.PAGESIZE
            self.touched -= set(range(-(-place.start // page), (place.start + place.nbytes) // page))

    def touch(self, place: ArenaBlock) -> None:
        page = mmap.PAGESIZE
        if place.nbytes:
            self.touched |= set(range(place.start // page, -(-(place.start + place.nbytes) // page)))

    @rule()
    def compact(self) -> None:
        order = sorted((place for place in self.locations if place.nbytes), key=lambda place: place.start)
        self.slab.compact()
        assert order == sorted(order, key=lambda place: place.start)
        assert [place.start for place in order] == [sum(p.end - p.start for p in order[:n]) for n in range(len(order))]
        for place in order:
            self.touch(place)

    @invariant()
    def every_place_has_its_bytes(self) -> None:
        assert self.slab.touched_bytes == len(self.touched) * mmap.PAGESIZE
        for place, value in self.locations.items():
            assert place.start >= 0 and place.start + place.nbytes <= self.NBYTES
            assert (self.slab.view(place, torch.uint8) == value).all()


TestOperations = Operations.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=100, stateful_step_count=40)
