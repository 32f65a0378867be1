"""Geometry of shards: ranges of a flattened tensor expressed as boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Hyper-rectangle of a tensor: offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], first: int, end: int) -> list[tuple[int, Box]]:
    """Split elements `first` to `end` (exclusive) of a flattened tensor into boxes of contiguous elements.

    Returns pairs of a box's first flat element and the box: part of a row, whole rows, part of a row.
    """
    if not shape:
        return [(0, Box((), ()))] if first < end else []
    stride = prod(shape[1:])
    boxes: list[tuple[int, Box]] = []
    position = first
    while position < end:
        row, within = divmod(position, stride)
        if within == 0 and end - position >= stride:
            rows = (end - position) // stride
            rest = tuple(shape[1:])
            boxes.append((position, Box((row, *(0 for _ in rest)), (rows, *rest))))
            position += rows * stride
            continue
        stop = min(end, (row + 1) * stride)
        for begin, box in boxes_of(shape[1:], within, stop - row * stride):
            boxes.append((row * stride + begin, Box((row, *box.offsets), (1, *box.sizes))))
        position = stop
    return boxes


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor ordered by stride, slowest-varying first."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim)))
