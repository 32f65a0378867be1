"""Boxes of tensors: ranges of elements, intersection, difference, and messages."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_local_boxes import inside

from patrickstar._layout.shard_geometry import Box, boxes_of, listed, uncovered


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_cover_the_elements_in_order(shape, draw):
    numel = torch.Size(shape).numel()
    first = draw.draw(st.integers(0, numel))
    end = draw.draw(st.integers(first, numel))
    whole = torch.arange(numel).view(shape)
    elements = []
    for begin, box in boxes_of(shape, first, end):
        part = inside(whole, box).flatten()
        assert len(part) == box.numel and part[0] == begin
        elements += part.tolist()
    assert elements == list(range(first, end))
    assert len(boxes_of(shape, first, end)) <= max(1, 2 * len(shape) - 1)


BOX = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=3, max_size=3).map(
    lambda pairs: Box(tuple(first for first, _ in pairs), tuple(size for _, size in pairs))
)


@given(BOX, st.lists(BOX, max_size=4))
def test_intersection_and_difference(whole, others):
    def mask(box):
        result = torch.zeros(8, 8, 8, dtype=torch.bool)
        inside(result, box).fill_(True)
        return result

    covered = torch.zeros(8, 8, 8, dtype=torch.bool)
    for box in others:
        assert torch.equal(mask(whole.intersection(box)), mask(whole) & mask(box))
        assert box.relative_to(whole).within(whole) == box
        covered |= mask(box)
    remaining = uncovered(whole, others)
    assert sum(box.numel for box in remaining) == (mask(whole) & ~covered).sum()
    for box in remaining:
        covered |= mask(box)
    assert not (mask(whole) & ~covered).any()


def test_boxes_in_messages():
    assert str(Box((2, 0), (3, 8))) == "[2:5, 0:8]"
    assert str(Box((), ())) == "[]"
    assert uncovered(Box((), ()), []) == [Box((), ())] and uncovered(Box((), ()), [Box((), ())]) == []
    boxes = [Box((first,), (1,)) for first in range(5)]
    assert listed(boxes) == "[0:1], [1:2], [2:3] and 2 other boxes"
    assert listed(boxes[:2]) == "[0:1], [1:2]"
