"""Boxes of global tensors that processes hold, against tensors that were cut by torch."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from patrickstar._layout.local_boxes import MeshShard, boxes_in_range, local_boxes
from patrickstar._layout.shard_geometry import Box, memory_range


def inside(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of a box of a tensor."""
    return tensor[tuple(slice(first, end) for first, end in zip(box.offsets, box.ends, strict=True))]


def pieces(tensor: Tensor, dim: int, count: int) -> list[Tensor]:
    """Cut a tensor as `torch.chunk`, with empty pieces for those that it leaves out."""
    cut = list(tensor.chunk(count, dim))
    return cut + [tensor.narrow(dim, 0, 0)] * (count - len(cut))


def local_tensor(whole: Tensor, shards: list[MeshShard]) -> Tensor:
    """Cut a tensor as DTensor does, placement by placement."""
    for shard in shards:
        parts = pieces(whole, shard.dim, shard.split_factor)
        whole = torch.cat([pieces(part, shard.dim, shard.size)[shard.coordinate] for part in parts], shard.dim)
    return whole


@st.composite
def shardings(draw):
    """Draw a shape, and the shardings of each process of a mesh with the same placements."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), max_size=3))
    placed = [(draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 1, 2, 3]))) for _ in mesh]
    processes = [zip(placed, mesh, coordinates, strict=True) for coordinates in product(*map(range, mesh))]
    return shape, [[MeshShard(dim, size, own, factor) for (dim, factor), size, own in each] for each in processes]


@given(shardings())
def test_boxes_are_the_parts_that_torch_cuts(case):
    shape, processes = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    held = torch.zeros(shape, dtype=torch.long)
    for shards in processes:
        expected = local_tensor(whole, shards)
        pairs = local_boxes(shape, shards)
        assert tuple(expected.shape) == tuple(max(local.ends[dim] for local, _ in pairs) for dim in range(len(shape)))
        found = torch.full_like(expected, -1)
        for local, box in pairs:
            inside(found, local).copy_(inside(whole, box))
            inside(held, box).add_(1)
        assert torch.equal(found, expected)
    assert (held == 1).all(), "each element is in one box of one process"


@given(shardings(), st.data())
def test_ranges_of_local_tensors_are_boxes_of_both_tensors(case, draw):
    shape, processes = case
    shards = draw.draw(st.sampled_from(processes))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    order = draw.draw(st.permutations(range(len(shape))))
    # The local tensor is dense, and its dimensions are in any order in memory.
    inverse = [order.index(dim) for dim in range(len(shape))]
    local = local_tensor(whole, shards).permute(order).contiguous().permute(inverse)
    memory = local.as_strided((local.numel(),), (1,))
    first = draw.draw(st.integers(0, local.numel()))
    end = draw.draw(st.integers(first, local.numel()))
    pairs = boxes_in_range(local.shape, local.stride(), local_boxes(shape, shards), first, end)
    elements = []
    for part, box in pairs:
        assert torch.equal(inside(local, part), inside(whole, box))
        begin, stop = memory_range(part, local.stride())
        assert first <= begin < stop <= end
        span = memory[begin:stop]
        assert torch.equal(span.as_strided(part.sizes, local.stride(), span.storage_offset()), inside(local, part))
        elements += inside(whole, box).flatten().tolist()
    assert sorted(elements) == sorted(memory[first:end].tolist())
