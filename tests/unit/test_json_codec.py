"""JSON encoding of plain data, and user state in checkpoints."""

import errno
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from checkpoint_cases import engine_of
from hypothesis import given
from hypothesis import strategies as st

from patrickstar._checkpoint import json_codec
from patrickstar.errors import CheckpointError


class Scheduler:
    """Object with a state dict."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_unsupported_types_in_the_state_are_named(tmp_path):
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"the state\['user'\]\['loader'\]\['worker'\] is a Scheduler"):
        engine.save(tmp_path / "one", {"loader": {"worker": Scheduler(1)}})
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path / "one", {"scheduler": Scheduler({1: (2, 3)})})
    scheduler = Scheduler(None)
    engine.load(tmp_path / "one", {"scheduler": scheduler})
    assert scheduler.value == {1: (2, 3)}
    with pytest.raises(CheckpointError, match="no state 'sampler'"):
        engine.load(tmp_path / "one", {"sampler": scheduler})


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)


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
