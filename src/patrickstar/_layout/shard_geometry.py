"""Elements in a row, and the boxes of a tensor that they are: what a part of a parameter is, whoever cut it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it begins, and how far it reaches, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], first: int, end: int) -> list[tuple[int, Box]]:
    """The boxes that elements `first` to `end` of a tensor make, counted in the order of its shape.

    Each comes with its first element, and its own elements lie in a row: a part of a row, whole rows, a part of a row.
    """
    if not shape:
        return [(0, Box((), ()))] if first < end else []
    stride = prod(shape[1:])
    found: list[tuple[int, Box]] = []
    at = first
    while at < end:
        row, within = divmod(at, stride)
        if within == 0 and end - at >= stride:
            rows = (end - at) // stride
            rest = tuple(shape[1:])
            found.append((at, Box((row, *(0 for _ in rest)), (rows, *rest))))
            at += rows * stride
            continue
        stop = min(end, (row + 1) * stride)
        for begin, box in boxes_of(shape[1:], within, stop - row * stride):
            found.append((row * stride + begin, Box((row, *box.offsets), (1, *box.sizes))))
        at = stop
    return found


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor in the order in which its memory runs through them, the slowest first."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim)))
