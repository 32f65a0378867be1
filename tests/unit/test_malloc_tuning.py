"""Test malloc tuning on the process's own heap."""

import gc
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from patrickstar._memory.malloc_tuning import MAX_MMAP_THRESHOLD, MIN_MMAP_THRESHOLD, MallocHeap, process_heap
from patrickstar._memory.memory_meter import ResidentMeter

MIB = 1 << 20


class Requester:
    """Requester that forbids or allows caching."""


REQUESTER = Requester()

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")


def begin(heap):
    """Fix the mmap threshold, as after a first iteration; glibc adjusts it before."""
    heap.set_caching(False, REQUESTER)
    heap.set_caching(True, REQUESTER)


@pytest.fixture
def heap():
    heap = process_heap()
    if not heap._supported:
        pytest.skip("this C library or allocator does not count mapped blocks")
    begin(heap)
    yield heap
    heap.set_caching(True, REQUESTER)


def freed_bytes(meter, sizes):
    """Return the bytes that stay resident of freed tensors."""
    gc.collect()  # free garbage of other tests before the measurement
    meter.reclaim()
    before = meter.now(0)
    made = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    assert meter.now(0) - before > 0.9 * sum(sizes)
    made.clear()
    return meter.now(0) - before


def large_blocks_are_returned(heap):
    meter = ResidentMeter()
    heap.set_caching(False, REQUESTER)
    assert freed_bytes(meter, [MIB] * 20) < MIB
    heap.set_caching(True, REQUESTER)
    assert heap.caching and not heap._fillers


def heap_holes_are_not_reused(heap):
    meter = ResidentMeter()
    heap.set_caching(True, REQUESTER)
    gc.collect()
    meter.reclaim()
    base = meter.now(0)
    # Keep every second block: the freed ones between them leave holes that the heap can't return.
    made = [(torch.ones(4 * MIB, dtype=torch.uint8), torch.ones(MIB, dtype=torch.uint8)) for _ in range(20)]
    small = [pair[1] for pair in made]
    made.clear()
    assert meter.now(0) - base > 60 * MIB, "no freed memory was cached"
    heap.set_caching(False, REQUESTER)
    assert meter.now(0) - base < 22 * MIB, "cached memory was not returned"
    assert freed_bytes(meter, [3 * MIB] * 20) < MIB
    assert len(small) == 20


@pytest.mark.parametrize("check", [large_blocks_are_returned, heap_holes_are_not_reused])
def test_no_caching_while_forbidden(heap, check):
    """Run in a separate process, without memory and threads of other tests."""
    done = subprocess.run([sys.executable, __file__, check.__name__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_thresholds_are_valid_for_glibc():
    assert MIN_MMAP_THRESHOLD < MAX_MMAP_THRESHOLD <= 32 * MIB, "glibc accepts no larger threshold"


def test_caching_is_forbidden_while_any_requester_forbids_it(heap):
    heap.set_caching(True, REQUESTER)
    assert heap.caching
    one, other = Requester(), Requester()
    heap.set_caching(False, one)
    heap.set_caching(False, other)
    heap.set_caching(True, one)
    assert not heap.caching and heap._caching_forbidden, "the other requester still forbids it"
    del other
    heap.set_caching(True, REQUESTER)
    assert heap.caching and not heap._fillers


def test_unsupported_allocator_is_left_alone(monkeypatch):
    heap = MallocHeap()
    monkeypatch.setattr(heap, "_supported", False)
    heap.set_caching(False, REQUESTER)
    assert heap.caching and heap._fillers == []
    heap.trim()


def test_other_allocator_is_detected(monkeypatch):
    """glibc's statistics do not change if another allocator serves malloc."""

    class Library:
        def __init__(self):
            self.mallopt = self.malloc_trim = SimpleFunction(lambda *arguments: 1)
            self.malloc = SimpleFunction(lambda size: 4096)
            self.free = SimpleFunction(lambda block: None)
            self.mallinfo2 = SimpleFunction(lambda: SimpleNamespace(hblks=0, fordblks=1 << 40))

    monkeypatch.setattr("patrickstar._memory.malloc_tuning.ctypes.CDLL", lambda name: Library())
    heap = MallocHeap()
    assert not heap._supported
    heap.set_caching(False, REQUESTER)
    assert heap._fillers == []


class SimpleFunction:
    """Library function with settable types."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


if __name__ == "__main__":
    the_heap = process_heap()
    begin(the_heap)
    globals()[sys.argv[1]](the_heap)
