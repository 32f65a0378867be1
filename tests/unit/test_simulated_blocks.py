"""Blocks of CPU tensors in a dry run are those of the allocator."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from sampling import drawn

from patrickstar._dry_run.simulated_blocks import PAGE_BYTES, SimulatedBlocks
from patrickstar._hardware.cpu_allocator import CpuAllocator, cpu_allocator

KIB = 1 << 10


class Owner:
    """Whoever limits the allocator."""


@contextmanager
def only_limit(allocator: CpuAllocator, owner: Owner, nbytes: int) -> Iterator[None]:
    """Let tensors take `nbytes` more; engines of other tests set no limit meanwhile, and none of their tensors is freed."""
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(allocator, "_limits", WeakKeyDictionary()):
            allocator.set_limit(owner, allocator.live_bytes + nbytes)
            yield
    finally:
        gc.enable()
        allocator.remove_limit(owner)  # restores the limits of others


@example([(True, 128), (False, 1)], 128)  # a whole number of pages, and no byte for the header
@drawn(30, st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), min_size=1, max_size=40), st.integers(0, 8000))
def test_freed_memory_is_that_of_the_allocator(actions, limit_kib):
    """Tensors of up to 3 MB are allocated, and others freed, within a limit."""
    allocator = cpu_allocator()
    if allocator is None:
        pytest.skip("tensors on the CPU can't be counted exactly")
    owner, blocks = Owner(), SimulatedBlocks()
    tensors: list[tuple[torch.Tensor, int]] = []
    with only_limit(allocator, owner, limit_kib * KIB):
        before = allocator.live_bytes
        blocks.limit(limit_kib * KIB, 0)
        for allocates, kib in actions:
            live = allocator.live_bytes - before
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
