"""Parameter schemas: dtypes, item sizes and chunk lists."""

import dataclasses

import pytest
import torch

from patrickstar._layout import schema
from patrickstar._layout.schema import ITEMSIZE, PARAM16, PARAM32, ListSpec, ParamSchema, schema_for


@pytest.mark.parametrize(
    ("dtype", "trained_bytes", "frozen_bytes"),
    [("bfloat16", 14, 2), ("float16", 14, 2), ("float32", 16, 4), ("float64", 32, 8)],
)
def test_bytes_per_parameter(dtype, trained_bytes, frozen_bytes):
    trained, frozen = schema_for(dtype, trained=True), schema_for(dtype, trained=False)
    assert trained.bytes_per_param == trained_bytes
    assert frozen.bytes_per_param == frozen_bytes
    assert trained.master_dtype == ("float64" if dtype == "float64" else "float32")
    assert frozen.master_dtype == dtype


def test_a_trained_parameter_has_adams_four_lists_and_a_frozen_one_has_param16():
    trained, frozen = schema_for("bfloat16", trained=True), schema_for("bfloat16", trained=False)
    assert [spec.kind for spec in trained.lists] == [PARAM16, PARAM32, schema.EXP_AVG, schema.EXP_AVG_SQ]
    assert [spec.dtype for spec in trained.lists] == ["bfloat16", "float32", "float32", "float32"]
    assert trained.compute == trained.lists[0]
    assert trained.optimizer_lists == trained.lists[1:]
    assert trained.trained
    assert frozen.lists == (ListSpec(PARAM16, "bfloat16"),)
    assert frozen.optimizer_lists == ()
    assert not frozen.trained


def test_schemas_are_values_with_the_item_sizes_of_torch():
    for dtype in ITEMSIZE:
        assert ListSpec(PARAM16, dtype).itemsize == getattr(torch, dtype).itemsize
    assert schema_for("bfloat16", trained=True) == schema_for("bfloat16", trained=True)
    assert len({schema_for(dtype, trained) for dtype in ITEMSIZE for trained in (True, False)}) == 2 * len(ITEMSIZE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema_for("bfloat16", trained=True).lists = ()


def test_operators_read_the_first_list():
    with pytest.raises(AssertionError, match="first list"):
        ParamSchema((ListSpec(PARAM32, "float32"), ListSpec(PARAM16, "bfloat16")))


def test_split_masters_take_two_bytes_less_where_they_are_possible():
    split, whole = (schema_for("bfloat16", trained=True, split=split) for split in (True, False))
    assert [spec.kind for spec in split.state_lists] == [schema.LOW16, schema.EXP_AVG, schema.EXP_AVG_SQ]
    assert (split.bytes_per_param, split.master_dtype, split.state_kinds) == (12, "float32", whole.state_kinds)
    assert [split.gradient_itemsize(accumulates) for accumulates in (False, True)] == [2, 4]
    assert [whole.gradient_itemsize(accumulates) for accumulates in (False, True)] == [0, 4]
    for others in (dict(dtype="float32"), dict(dtype="float16"), dict(trained=False), dict(states=("exp_avg",))):
        given = dict(dtype="bfloat16", trained=True) | others
        assert schema_for(**given, split=True) == schema_for(**given) and not schema_for(**given, split=True).splits
