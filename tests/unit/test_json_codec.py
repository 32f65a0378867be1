"""JSON encoding of plain data."""

import errno
from collections import Counter, OrderedDict

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._checkpoint import json_codec

numbers = st.booleans() | st.integers() | st.floats(allow_nan=False)
leaves = st.none() | numbers | st.text(max_size=5) | st.binary(max_size=5)
data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$dict", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=draws(100))
@given(data)
def test_plain_data_round_trip(value):
    decoded = json_codec.loads(json_codec.dumps(value, "value"), "value")
    assert decoded == value and repr(decoded) == repr(value)


def test_other_types_round_trip():
    value = [Counter({3: 1}), OrderedDict(b=1, a=2), {1, 2}, frozenset("a"), float("inf"), errno.ENOSPC, numpy.int64(3)]
    assert json_codec.loads(json_codec.dumps(value, "value"), "value") == value
    for array in (numpy.arange(6, dtype=numpy.uint32).reshape(2, 3), numpy.empty((0, 2))):
        decoded = json_codec.loads(json_codec.dumps(array, "value"), "value")
        assert decoded.dtype == array.dtype and numpy.array_equal(decoded, array)
    for tensor in (torch.randn(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor([True])):
        decoded = json_codec.loads(json_codec.dumps(tensor, "value"), "value")
        assert decoded.dtype == tensor.dtype and torch.equal(decoded, tensor)
