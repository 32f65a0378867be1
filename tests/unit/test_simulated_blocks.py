"""Blocks of CPU tensors in a dry run are those of the allocator, and pages of chunks those of their pool."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from sampling import drawn

from patrickstar._dry_run.simulated_blocks import PAGE_BYTES, SimulatedBlocks
from patrickstar._dry_run.simulated_pages import SimulatedPagePool
from patrickstar._hardware.cpu_allocator import CpuAllocator, TensorCounter, cpu_allocator
from patrickstar._hardware.vm_pool import PagePool, can_move_pages

KIB = 1 << 10


@contextmanager
def limited(allocator: CpuAllocator, nbytes: int) -> Iterator[TensorCounter]:
    """Let tensors take `nbytes` more, while no collection frees tensors of other tests."""
    gc.collect()
    gc.disable()
    counter = allocator.counter()
    counter.set_limit(nbytes)
    try:
        yield counter
    finally:
        gc.enable()
        counter.set_limit(None)


@example([(True, 128), (False, 1)], 128)  # a whole number of pages, and no byte for the header
@drawn(30, st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), min_size=1, max_size=40), st.integers(0, 8000))
def test_freed_memory_is_that_of_the_allocator(actions, limit_kib):
    """Tensors of up to 3 MB are allocated, and others freed, within a limit."""
    allocator = cpu_allocator()
    if allocator is None:
        pytest.skip("tensors on the CPU can't be counted exactly")
    blocks = SimulatedBlocks()
    tensors: list[tuple[torch.Tensor, int]] = []
    with limited(allocator, limit_kib * KIB) as counter:
        blocks.limit(limit_kib * KIB, 0)
        for allocates, kib in actions:
            live = counter.live_bytes
            if allocates or not tensors:
                size = blocks.take(kib * KIB, live)
                tensors.append((torch.empty(kib * KIB, dtype=torch.uint8), size))
            else:
                tensor, size = tensors.pop(kib % len(tensors))
                nbytes = tensor.nbytes
                del tensor
                blocks.free(size, live - nbytes)
            assert blocks.cached_bytes == allocator.cached_bytes
        tensors.clear()


def test_pages_of_new_blocks_are_counted_once():
    blocks = SimulatedBlocks()
    blocks.limit(1 << 30, 0)
    first = blocks.take(200 * KIB, 0)
    assert first == 200 * KIB + PAGE_BYTES, "whole pages, with a header"
    assert blocks.take(100 * KIB, 0) == 0, "small ones are not mapped"
    assert (blocks.take_fresh(), blocks.take_fresh()) == (first, 0)
    blocks.free(first, 0)
    assert blocks.take(190 * KIB, 0) == first and blocks.take_fresh() == 0, "the freed block is large enough"
    blocks.free(first, 0)
    assert blocks.take(100 * KIB + (64 << 10), 0) < first, "and too large for this one"


@drawn(60, st.lists(st.tuples(st.sampled_from(["commit", "park", "trim"]), st.integers(0, 99)), max_size=60))
def test_pages_of_chunks_are_those_of_the_pool(actions):
    """Chunks of up to 3 pages get memory and lose it; unused pages are returned."""
    if not can_move_pages():
        pytest.skip("this system can't move pages")
    pools = PagePool(), SimulatedPagePool()
    ranges = [[pool.new_range(1 + 5000 * count) for pool in pools] for count in range(3)]
    backed = [False] * len(ranges)
    for action, value in actions:
        chosen = value % len(ranges)
        for number, pool in enumerate(pools):
            if action == "trim":
                pool.trim(500 * value)
            elif action == "commit" and not backed[chosen]:
                pool.commit(ranges[chosen][number])
            elif action == "park" and backed[chosen]:
                pool.decommit(ranges[chosen][number])
        if action != "trim":
            backed[chosen] = action == "commit"
        real, simulated = pools
        assert (simulated.mapped_bytes, simulated.parked_bytes) == (real.mapped_bytes, real.parked_bytes)
    for pool, own in zip(pools, zip(*ranges, strict=True), strict=True):
        pool.trim(0)
        for each in own:
            pool.release(each)
        assert (pool.mapped_bytes, pool.parked_bytes) == (0, 0)
