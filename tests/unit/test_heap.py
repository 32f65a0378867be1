"""What the C library keeps of freed memory, on the process's own heap."""

import platform

import pytest
import torch

from patrickstar.memory.heap import LARGE_AT_FIRST, LARGE_AT_MOST, Heap, process_heap
from patrickstar.memory.meter import ResidentMeter

MIB = 1 << 20

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")


@pytest.fixture
def heap():
    heap = process_heap()
    yield heap
    heap.let_keep(True)


def freed_bytes(meter, sizes):
    """What stays of tensors that were made and freed."""
    meter.reclaim()
    before = meter.now(0)
    made = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    assert meter.now(0) - before > 0.9 * sum(sizes)
    made.clear()
    return meter.now(0) - before


def test_where_nothing_may_be_kept_a_large_block_goes_back_when_it_is_freed(heap):
    meter = ResidentMeter()
    heap.let_keep(True)
    assert freed_bytes(meter, [MIB] * 50) > 40 * MIB
    heap.let_keep(False)
    assert freed_bytes(meter, [MIB] * 50) < MIB
    heap.let_keep(True)
    assert freed_bytes(meter, [MIB] * 50) > 40 * MIB, "and is kept again afterwards"


def test_places_that_lie_free_in_the_heap_are_not_used_while_nothing_may_be_kept(heap):
    meter = ResidentMeter()
    heap.let_keep(True)
    # Small blocks between large ones: when these are freed, they leave places that the heap can't give up.
    made = [(torch.ones(4 * MIB, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8)) for _ in range(20)]
    small = [pair[1] for pair in made]
    made.clear()
    before = meter.now(0)
    heap.let_keep(False)
    assert before - meter.now(0) > 70 * MIB, "what was kept was not given back"
    assert freed_bytes(meter, [3 * MIB] * 20) < MIB
    assert len(small) == 20


def test_it_knows_the_limits_of_the_c_library():
    assert LARGE_AT_FIRST < LARGE_AT_MOST <= 32 * MIB, "glibc takes no larger one"


def test_without_glibc_nothing_happens(monkeypatch):
    heap = Heap()
    monkeypatch.setattr(heap, "_libc", None)
    heap.let_keep(False)
    heap.trim()
    assert heap._plugs == []
