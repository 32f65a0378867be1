"""Parts of a global tensor that a process holds, from the placements of a DTensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from patrickstar._layout.shard_geometry import Box, boxes_of, memory_order

# [Note: boxes of a DTensor]
# Placements are applied one after the other, by mesh dimension. In each dimension of the tensor the process holds runs
# of consecutive indices; a placement that shards this dimension keeps the process's part of them. `Shard` cuts the
# indices into pieces of equal size, rounded up, as `torch.chunk` does. `_StridedShard` first cuts them into
# `split_factor` pieces, and each of these into one piece per process. PyTorch uses it for FSDP on top of tensor
# parallelism, transformers for several matrices packed into one (gate and up projection). Then a process holds several
# runs, and its part of the tensor consists of several boxes.


@dataclass(frozen=True)
class MeshShard:
    """Sharding of one dimension of a tensor over one dimension of a mesh.

    Attributes:
        dim: Dimension of the tensor.
        size: Size of the mesh dimension.
        coordinate: Coordinate of the process in it.
        split_factor: Number of pieces that are sharded one by one.
    """

    dim: int
    size: int
    coordinate: int
    split_factor: int = 1


Runs = tuple[tuple[int, int], ...]
"""Runs of consecutive indices in one dimension: the first index and the length of each, in the process's order."""


def local_runs(shape: Sequence[int], shards: Sequence[MeshShard]) -> tuple[Runs, ...]:
    """Return the runs that a process holds in each dimension of a tensor of this shape."""
    runs: list[Runs] = [((0, size),) for size in shape]
    for shard in shards:
        held = runs[shard.dim]
        pieces = _split(held, shard.split_factor)
        runs[shard.dim] = tuple(
            run
            for piece in pieces
            for number, part in enumerate(_split(piece, shard.size))
            if number == shard.coordinate
            for run in part
        )
    return tuple(_joined(each) for each in runs)


def local_shape(shape: Sequence[int], shards: Sequence[MeshShard]) -> tuple[int, ...]:
    """Return the shape of the local tensor of a process."""
    return tuple(sum(length for _, length in runs) for runs in local_runs(shape, shards))


def local_boxes(shape: Sequence[int], shards: Sequence[MeshShard]) -> list[tuple[Box, Box]]:
    """Return the boxes of a tensor that a process holds: each in its local tensor, and in the global tensor.

    A process without elements has one empty box, from which the shape of its local tensor follows.
    """
    positions = []
    for runs in local_runs(shape, shards):
        start, spans = 0, []
        for first, length in runs:
            spans.append((start, first, length))
            start += length
        positions.append(spans or [(0, 0, 0)])
    boxes = []
    for chosen in product(*positions):
        sizes = tuple(length for _, _, length in chosen)
        local = Box(tuple(start for start, _, _ in chosen), sizes)
        boxes.append((local, Box(tuple(first for _, first, _ in chosen), sizes)))
    return boxes


def boxes_in_range(
    shape: Sequence[int], strides: Sequence[int], boxes: Sequence[tuple[Box, Box]], first: int, end: int
) -> list[tuple[Box, Box]]:
    """Return the boxes of elements `first` to `end` (exclusive) of a dense local tensor, counted in memory order.

    Args:
        shape: Shape of the local tensor.
        strides: Its strides, in elements.
        boxes: Its boxes, each in the local and in the global tensor, as `local_boxes` returns them.
        first: First element.
        end: Element after the last one.

    Returns:
        Parts of `boxes`, each in the local and in the global tensor.
    """
    order = memory_order(shape, strides)
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    found = []
    for _, permuted in boxes_of([shape[dim] for dim in order], first, end):
        part = Box(tuple(permuted.offsets[dim] for dim in inverse), tuple(permuted.sizes[dim] for dim in inverse))
        for local, whole in boxes:
            common = part.intersection(local)
            if common.numel:
                found.append((common, common.relative_to(local).within(whole)))
    return found


def _split(runs: Runs, count: int) -> list[Runs]:
    """Split the indices of runs into `count` pieces of equal size, rounded up; the last ones may be smaller."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    return [_cut(runs, number * size, min((number + 1) * size, total)) for number in range(count)]


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Return the indices at positions `begin` to `end` of the concatenated runs."""
    parts, position = [], 0
    for first, length in runs:
        lower, upper = max(begin, position), min(end, position + length)
        if lower < upper:
            parts.append((first + lower - position, upper - lower))
        position += length
    return tuple(parts)


def _joined(runs: Runs) -> Runs:
    """Return the runs with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return tuple(joined)
