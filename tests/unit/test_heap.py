"""What the C library keeps of freed memory, on the process's own heap."""

import gc
import platform
from types import SimpleNamespace

import pytest
import torch

from patrickstar.memory.heap import LARGE_AT_FIRST, LARGE_AT_MOST, Heap, process_heap
from patrickstar.memory.meter import ResidentMeter

MIB = 1 << 20


class Someone:
    """Who forbids or allows."""


ME = Someone()

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")


@pytest.fixture
def heap():
    heap = process_heap()
    if not heap._knows_plugs:
        pytest.skip("this C library, or another allocator, does not tell what comes from the system")
    # As after a first iteration: what is large is then said, and no longer what the C library has found.
    heap.let_keep(False, ME)
    heap.let_keep(True, ME)
    yield heap
    heap.let_keep(True, ME)


def freed_bytes(meter, sizes):
    """What stays of tensors that were made and freed."""
    gc.collect()  # what other tests have left is not to go in between
    meter.reclaim()
    before = meter.now(0)
    made = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    assert meter.now(0) - before > 0.9 * sum(sizes)
    made.clear()
    return meter.now(0) - before


def test_where_nothing_may_be_kept_a_large_block_goes_back_when_it_is_freed(heap):
    meter = ResidentMeter()
    heap.let_keep(False, ME)
    assert freed_bytes(meter, [MIB] * 20) < MIB
    heap.let_keep(True, ME)
    assert heap.keeps and not heap._plugs


def test_places_that_lie_free_in_the_heap_are_not_used_while_nothing_may_be_kept(heap):
    meter = ResidentMeter()
    heap.let_keep(True, ME)
    gc.collect()
    meter.reclaim()
    base = meter.now(0)
    # Small blocks between large ones: when these are freed, they leave places that the heap can't give up.
    made = [(torch.ones(4 * MIB, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8)) for _ in range(20)]
    small = [pair[1] for pair in made]
    made.clear()
    heap.let_keep(False, ME)
    assert meter.now(0) - base < 2 * MIB, "what was kept was not given back"
    assert freed_bytes(meter, [3 * MIB] * 20) < MIB
    assert len(small) == 20


def test_it_knows_the_limits_of_the_c_library():
    assert LARGE_AT_FIRST < LARGE_AT_MOST <= 32 * MIB, "glibc takes no larger one"


def test_it_keeps_nothing_while_anybody_forbids_it_and_is_there(heap):
    heap.let_keep(True, ME)
    assert heap.keeps
    one, other = Someone(), Someone()
    heap.let_keep(False, one)
    heap.let_keep(False, other)
    heap.let_keep(True, one)
    assert not heap.keeps and heap._plugged, "the other has not allowed it"
    del other
    heap.let_keep(True, ME)
    assert heap.keeps and not heap._plugs


def test_under_another_allocator_nothing_is_plugged(monkeypatch):
    heap = Heap()
    monkeypatch.setattr(heap, "_knows_plugs", False)
    heap.let_keep(False, ME)
    assert heap.keeps and heap._plugs == []
    heap.trim()


def test_that_another_allocator_was_loaded_is_noticed(monkeypatch):
    """glibc's figures don't change then, whatever is taken."""

    class Library:
        def __init__(self):
            self.mallopt = self.malloc_trim = SimpleFunction(lambda *arguments: 1)
            self.malloc = SimpleFunction(lambda size: 4096)
            self.free = SimpleFunction(lambda block: None)
            self.mallinfo2 = SimpleFunction(lambda: SimpleNamespace(hblks=0, fordblks=1 << 40))

    monkeypatch.setattr("patrickstar.memory.heap.ctypes.CDLL", lambda name: Library())
    heap = Heap()
    assert not heap._knows_plugs
    heap.let_keep(False, ME)
    assert heap._plugs == []


class SimpleFunction:
    """A function of a library, which has types."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)
