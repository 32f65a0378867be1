"""Geometry of shards: boxes of a tensor, and ranges of a flattened tensor expressed as boxes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub


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

    def __str__(self) -> str:
        """Return the index ranges, as in `[0:4, 8:16]`."""
        return f"[{', '.join(f'{first}:{end}' for first, end in zip(self.offsets, self.ends, strict=True))}]"

    @property
    def ends(self) -> tuple[int, ...]:
        """Index after the last one, in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: "Box") -> "Box":
        """Return the common part of two boxes; it has no elements if they do not overlap."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        return Box(offsets, tuple(max(0, end - offset) for offset, end in zip(offsets, ends, strict=True)))

    def relative_to(self, origin: "Box") -> "Box":
        """Return this box with offsets counted from those of another box."""
        return Box(tuple(map(sub, self.offsets, origin.offsets)), self.sizes)

    def within(self, outer: "Box") -> "Box":
        """Return the box that has this one's offsets from those of `outer`; the reverse of `relative_to`."""
        return Box(tuple(map(add, self.offsets, outer.offsets)), self.sizes)

    def without(self, other: "Box") -> list["Box"]:
        """Return boxes that cover the elements of this box that are not in another one."""
        common = self.intersection(other)
        if not common.numel:
            return [self]
        parts, rest = [], self
        for dim, (first, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            parts += [rest._cut(dim, rest.offsets[dim], first), rest._cut(dim, end, rest.ends[dim])]
            rest = rest._cut(dim, first, end)
        return [part for part in parts if part.numel]

    def _cut(self, dim: int, first: int, end: int) -> "Box":
        """Return the part of this box from index `first` to `end` (exclusive) of one dimension."""
        offsets = (*self.offsets[:dim], first, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], end - first, *self.sizes[dim + 1 :]))


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return boxes that cover the elements of a box that are in none of `boxes`."""
    remaining = [whole]
    for box in boxes:
        remaining = [part for other in remaining for part in other.without(box)]
    return [box for box in remaining if box.numel]


def listed(boxes: Sequence[Box]) -> str:
    """Return boxes for a message: the first three, and the number of others."""
    others = f" and {len(boxes) - 3} other boxes" if len(boxes) > 3 else ""
    return ", ".join(map(str, boxes[:3])) + others


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


def memory_range(box: Box, strides: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a box of a dense tensor in memory, and the one after its last."""
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)) + 1
