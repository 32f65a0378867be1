"""Boxes of a manifest's tensors: each element is in exactly one of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sampling import draws

from patrickstar._checkpoint import manifest as module
from patrickstar._checkpoint.manifest import Manifest, ManifestFile, ManifestTensor

box = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=draws(300), deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(box, max_size=4), st.booleans())
def test_parts_are_accepted_if_they_cover_a_tensor_once(rows, columns, boxes, cut):
    if cut:  # random boxes seldom fit: often those of a cut tensor
        row = min(rows, len(boxes))
        boxes = [(0, 0, row, columns), (row, 0, rows - row, columns)]
    count = torch.zeros(8, 8, dtype=torch.int64)
    for row, column, height, width in boxes:
        count[row : row + height, column : column + width] += 1
    whole = torch.zeros(8, 8, dtype=torch.int64)
    whole[:rows, :columns] = 1
    within = all(row + height <= rows and column + width <= columns for row, column, height, width in boxes)
    parts = [{"offsets": each[:2], "sizes": each[2:], "file": 0, "at": 0} for each in map(list, boxes)]
    fields = {"dtype": "float32", "shape": [rows, columns], "parts": parts}
    if within and torch.equal(count, whole):
        ManifestTensor.model_validate(fields)
    else:
        with pytest.raises(ValidationError, match=r"exceeds the shape|overlap|do not cover"):
            ManifestTensor.model_validate(fields)


def test_a_manifest_that_was_written_is_read_back(tmp_path):
    part = {"offsets": [0], "sizes": [8], "file": 0, "at": 0}
    tensor = ManifestTensor.model_validate({"dtype": "float32", "shape": [8], "parts": [part]})
    file = ManifestFile(name="rank-00000.safetensors", nbytes=4096, sums=["0" * 16])
    (tmp_path / file.name).write_bytes(bytes(4096))
    manifest = Manifest(processes=1, written_by="a test", page_bytes=4096, files=[file], tensors={"weight": tensor})
    module.write_manifest(tmp_path, manifest, 7)
    assert module.read_manifest(tmp_path) == manifest and module.read_sequence(tmp_path) == 7
