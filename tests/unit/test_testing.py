"""Comparison of tensors by their bits."""

import pytest
import torch

from patrickstar.testing import assert_same_bits

NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "x: 0 differs in 1 bytes of 4"),
        (NAN[:1], NAN[1:], "x: 0 differs in 1 bytes of 4"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), r"x: 0 is torch.float64 \(2,\), not torch.float32"),
        (torch.zeros(2), torch.zeros(2, 1), r"x: 0 is torch.float32 \(2, 1\), not torch.float32 \(2,\)"),
        (3, 4, "x: 0 is 4, not 3"),
    ],
)
def test_other_bits_dtypes_and_shapes_differ(one, other, says):
    assert_same_bits([one, one], [one, one], "x")
    for values in ([one], [other]):
        assert_same_bits({"a": values[0]}, {"a": values[0]}, "x")
    with pytest.raises(AssertionError, match=says):
        assert_same_bits([one], [other], "x")
    with pytest.raises(AssertionError, match="x: 1 tensors expected, 2 found"):
        assert_same_bits([one], [one, one], "x")
