"""What the C library keeps of freed memory, on the process's own heap."""

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


class Someone:
    """Who forbids or allows."""


ME = Someone()

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")


def begin(heap):
    """As after a first iteration: what is large is then said, and no longer what the C library has found."""
    heap.set_caching(False, ME)
    heap.set_caching(True, ME)


@pytest.fixture
def heap():
    heap = process_heap()
    if not heap._supported:
        pytest.skip("this C library, or another allocator, does not tell what comes from the system")
    begin(heap)
    yield heap
    heap.set_caching(True, ME)


def freed_bytes(meter, sizes):
    """What stays of tensors that were made and freed."""
    gc.collect()  # what other tests have left is not to go in between
    meter.reclaim()
    before = meter.now(0)
    made = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    assert meter.now(0) - before > 0.9 * sum(sizes)
    made.clear()
    return meter.now(0) - before


def a_large_block_goes_back(heap):
    meter = ResidentMeter()
    heap.set_caching(False, ME)
    assert freed_bytes(meter, [MIB] * 20) < MIB
    heap.set_caching(True, ME)
    assert heap.caching and not heap._fillers


def places_that_lie_free_are_not_used(heap):
    meter = ResidentMeter()
    heap.set_caching(True, ME)
    gc.collect()
    meter.reclaim()
    base = meter.now(0)
    # Blocks that stay between others that go: when these are freed, they leave places that the heap can't give up.
    made = [(torch.ones(4 * MIB, dtype=torch.uint8), torch.ones(MIB, dtype=torch.uint8)) for _ in range(20)]
    small = [pair[1] for pair in made]
    made.clear()
    assert meter.now(0) - base > 60 * MIB, "nothing was kept that could be given back"
    heap.set_caching(False, ME)
    assert meter.now(0) - base < 22 * MIB, "what was kept was not given back"
    assert freed_bytes(meter, [3 * MIB] * 20) < MIB
    assert len(small) == 20


@pytest.mark.parametrize("what", [a_large_block_goes_back, places_that_lie_free_are_not_used])
def test_while_nothing_may_be_kept(heap, what):
    """In a process of its own: what other tests have left in this one, memory and threads, comes and goes."""
    done = subprocess.run([sys.executable, __file__, what.__name__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_it_knows_the_limits_of_the_c_library():
    assert MIN_MMAP_THRESHOLD < MAX_MMAP_THRESHOLD <= 32 * MIB, "glibc takes no larger one"


def test_it_keeps_nothing_while_anybody_forbids_it_and_is_there(heap):
    heap.set_caching(True, ME)
    assert heap.caching
    one, other = Someone(), Someone()
    heap.set_caching(False, one)
    heap.set_caching(False, other)
    heap.set_caching(True, one)
    assert not heap.caching and heap._caching_forbidden, "the other has not allowed it"
    del other
    heap.set_caching(True, ME)
    assert heap.caching and not heap._fillers


def test_under_another_allocator_nothing_is_plugged(monkeypatch):
    heap = MallocHeap()
    monkeypatch.setattr(heap, "_supported", False)
    heap.set_caching(False, ME)
    assert heap.caching and heap._fillers == []
    heap.trim()


def test_that_another_allocator_was_loaded_is_noticed(monkeypatch):
    """glibc's figures don't change then, whatever is taken."""

    class Library:
        def __init__(self):
            self.mallopt = self.malloc_trim = SimpleFunction(lambda *arguments: 1)
            self.malloc = SimpleFunction(lambda size: 4096)
            self.free = SimpleFunction(lambda block: None)
            self.mallinfo2 = SimpleFunction(lambda: SimpleNamespace(hblks=0, fordblks=1 << 40))

    monkeypatch.setattr("patrickstar._memory.malloc_tuning.ctypes.CDLL", lambda name: Library())
    heap = MallocHeap()
    assert not heap._supported
    heap.set_caching(False, ME)
    assert heap._fillers == []


class SimpleFunction:
    """A function of a library, which has types."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


if __name__ == "__main__":
    the_heap = process_heap()
    begin(the_heap)
    globals()[sys.argv[1]](the_heap)
