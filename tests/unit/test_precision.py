"""The mixed-precision protocol: dtypes by parameter, inputs cast in their containers, loss scaling, clipping."""

import dataclasses
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from sampling import fixed_draws
from torch import nn

from patrickstar._params.precision import LossScaler, cast_inputs, clip_coefficient, compute_dtypes, tensors_in
from patrickstar.errors import ConfigError, ModelError

given = fixed_draws(200)

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Any
    mask: Any = None


@dataclasses.dataclass
class Counted:
    """A dataclass with a field that its constructor does not take."""

    values: torch.Tensor
    count: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.count = self.values.numel()


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a mapping too, as model outputs of Hugging Face are."""

    x: torch.Tensor | None = None

    def __post_init__(self):
        self["x"] = self.x

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def cast(value):
    return cast_inputs(value, BF16, CPU)


# Inputs

leaves = st.sampled_from([FP32, FP16, BF16, torch.float64, torch.int64, torch.bool]).map(
    lambda dtype: torch.ones(2, dtype=dtype)
) | st.sampled_from([None, 3, 2.5, "text", True])
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.tuples(inner, inner).map(lambda two: Batch(*two)),
    ),
    max_leaves=12,
)


def check_cast(before: Any, after: Any) -> None:
    """Check that containers and values are the same, floating tensors in bf16."""
    assert type(after) is type(before)
    if isinstance(before, torch.Tensor):
        assert after.dtype == (BF16 if before.is_floating_point() else before.dtype)
        assert torch.equal(after.double(), before.double())
    elif isinstance(before, dict):
        assert list(after) == list(before)
        for key, value in before.items():
            check_cast(value, after[key])
    elif dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            check_cast(getattr(before, field.name), getattr(after, field.name))
    elif isinstance(before, list | tuple):
        assert len(after) == len(before)
        for one, other in zip(before, after, strict=True):
            check_cast(one, other)
    else:
        assert after is before


@given(nested)
def test_floating_tensors_are_cast_in_any_nest_of_containers(value):
    check_cast(value, cast(value))


def test_what_is_cast_already_is_not_copied():
    tensor, ids = torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64)
    found = cast({"x": [tensor], "ids": ids})
    assert found["x"][0] is tensor and found["ids"] is ids
    assert cast(torch.Size([2, 3])) == torch.Size([2, 3])
    assert cast(Batch) is Batch and cast("abc") == "abc", "these are no containers"


def test_inputs_go_to_the_device_and_the_callers_containers_are_left_alone():
    inner = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    given_in = {"x": inner, "batch": Batch(torch.ones(2))}
    found = cast_inputs(given_in, BF16, torch.device("meta"))
    assert [(t.device.type, t.dtype) for t in found["x"]] == [("meta", BF16), ("meta", torch.int64)]
    assert given_in["x"] is inner
    assert inner[0].dtype == given_in["batch"].tokens.dtype == FP32


def test_a_gradient_flows_through_the_cast():
    leaf = torch.ones(2, requires_grad=True)
    cast({"x": leaf})["x"].sum().backward()
    assert leaf.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "mapping", [kind(x=torch.ones(1)) for kind in (OrderedDict, partial(defaultdict, list), UserDict, Output)], ids=repr
)
def test_mappings_keep_their_kind(mapping):
    found = cast(mapping)
    assert type(found) is type(mapping)
    assert found["x"].dtype == BF16
    assert mapping["x"].dtype == FP32
    if isinstance(mapping, Output):
        assert (found.x.dtype, mapping.x.dtype) == (BF16, FP32)
    counted = cast(Counted(torch.ones(3)))  # its constructor does not take each of its fields
    assert (counted.values.dtype, counted.count) == (BF16, 3)


def test_a_packed_sequence_keeps_its_batch_sizes_where_pytorch_wants_them():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    assert cast(packed).data.dtype == BF16
    moved = cast_inputs(packed, BF16, torch.device("meta"))
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


def test_all_tensors_are_found_once_wherever_they_are():
    leaf = torch.ones(1)
    holder = SimpleNamespace(own=leaf, batch=Batch([leaf, "text"], {"mask": (leaf, None)}))
    holder.itself = holder
    assert all(tensor is leaf for tensor in tensors_in([holder, holder, 3]))
    assert len(tensors_in([holder, holder, 3])) == 3
    assert tensors_in({"a": 1, "b": torch.Tensor}) == []


def test_a_model_of_one_dtype_computes_in_the_one_asked_for():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert set(compute_dtypes(model, BF16).values()) == {BF16}
    assert set(compute_dtypes(model, FP32).values()) == {FP32}
    assert list(compute_dtypes(model, BF16)) == [name for name, _ in model.named_parameters()]
    assert set(compute_dtypes(model.half(), BF16).values()) == {BF16}
    # Integers keep their dtype and are no mixture.
    model = nn.Linear(2, 2, bias=False)
    model.table = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    assert compute_dtypes(model, BF16) == {"weight": BF16, "table": torch.int64}
    # A model that mixes dtypes has made its choice.
    model = nn.ModuleDict({"body": nn.Linear(2, 2, dtype=BF16), "norm": nn.LayerNorm(2)})
    body, norm = dict.fromkeys(("body.weight", "body.bias"), BF16), dict.fromkeys(("norm.weight", "norm.bias"), FP32)
    assert compute_dtypes(model, FP16) == body | norm


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (lambda: nn.BatchNorm1d(2), FP32),
        (lambda: nn.BatchNorm2d(2), FP32),
        (lambda: nn.SyncBatchNorm(2), FP32),
        (lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True), FP32),
        (lambda: nn.InstanceNorm1d(2, affine=True), BF16),
        (lambda: nn.BatchNorm1d(2, track_running_stats=False), BF16),
        (lambda: nn.GroupNorm(1, 2), BF16),
    ],
)
def test_a_norm_with_running_statistics_computes_in_their_dtype(norm, dtype):
    found = compute_dtypes(nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm())), BF16)
    assert found == {"0.weight": BF16, "0.bias": BF16, "1.0.weight": dtype, "1.0.bias": dtype}


def test_a_complex_parameter_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"'1\.weight' is complex"):
        compute_dtypes(model, BF16)


def test_parameters_kept_in_fp32():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "router": nn.ModuleDict({"gate": nn.Linear(2, 2)})})
    names = [name for name, _ in model.named_parameters()]

    def in_fp32(*patterns, compute=BF16):
        return [name for name, dtype in compute_dtypes(model, compute, patterns).items() if dtype == FP32]

    assert in_fp32() == []
    assert in_fp32("router") == in_fp32("gate") == in_fp32("router.gate") == ["router.gate.weight", "router.gate.bias"]
    assert in_fp32("gate.weight") == in_fp32("router.*.weight") == ["router.gate.weight"]
    assert in_fp32("weight") == ["body.weight", "router.gate.weight"]
    assert in_fp32("body.*") == ["body.weight", "body.bias"]
    assert in_fp32("*") == in_fp32("body", "router") == names
    for missing in ("gat", "weigh", "gate.body", "x"):
        with pytest.raises(ConfigError, match=f"no parameter of the model has '{missing}'"):
            in_fp32(missing)
    # A tied parameter is kept by any of its names.
    model = nn.ModuleDict({"embedding": nn.Embedding(2, 2), "head": nn.Linear(2, 2, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert compute_dtypes(model, BF16, ("head",)) == {"embedding.weight": FP32}


def test_parameters_that_transformers_keeps_in_fp32():
    model = nn.ModuleDict({"wo": nn.Linear(2, 2), "gate": nn.Linear(2, 2), "wi": nn.Linear(2, 2)})
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"wo"}, {"gate"}
    for compute, in_fp32 in ((BF16, {"gate"}), (FP16, {"gate", "wo"}), (FP32, {"gate", "wo", "wi"})):
        dtypes = compute_dtypes(model, compute)
        assert {name.partition(".")[0] for name, dtype in dtypes.items() if dtype == FP32} == in_fp32


class Impatient(LossScaler):
    GROWTH_INTERVAL = 3


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_follows_torchs_gradient_scaler(overflows):
    theirs = torch.amp.GradScaler("cpu", enabled=True)
    assert (theirs._init_scale, theirs.get_growth_interval()) == (LossScaler.INITIAL_SCALE, LossScaler.GROWTH_INTERVAL)
    ours = Impatient(enabled=True)
    scale, good_steps = torch.tensor(LossScaler.INITIAL_SCALE), torch.zeros((), dtype=torch.int32)
    for overflow in overflows:
        ours.update(overflow)
        torch._amp_update_scale_(scale, good_steps, torch.tensor(float(overflow)), 2.0, 0.5, Impatient.GROWTH_INTERVAL)
        assert (ours.scale, ours.good_steps) == (scale.item(), good_steps.item())


def test_a_resumed_scaler_goes_on_where_the_other_was_and_without_fp16_nothing_is_scaled():
    one, other, off = Impatient(enabled=True), Impatient(enabled=True), LossScaler(enabled=False)
    for overflow in (True, True, False, False):
        one.update(overflow)
        off.update(overflow)
    other.load_state_dict({})
    assert other.scale == LossScaler.INITIAL_SCALE
    for scaler in (other, off):
        scaler.load_state_dict(one.state_dict())
    for scaler in (one, other):
        scaler.update(overflow=False)
    assert one.scale == other.scale == LossScaler.INITIAL_SCALE / 2
    assert off.scale == 1.0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.sampled_from([0.1, 1.0, 100.0]), st.integers(0, 9))
def test_clipping_follows_clip_grad_norm(numels, max_norm, seed):
    """PyTorch sums in float32, in an order of its own: its norm is near, and what follows from a norm is the same."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(numel, generator=generator) for numel in numels]
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
    total, factor = clip_coefficient(math.sqrt(math.fsum(torch.cat(grads).double().square().tolist())), max_norm)
    assert total == pytest.approx(float(expected), rel=1e-6)
    for param, grad in zip(params, grads, strict=True):
        assert torch.allclose(param.grad, grad * factor, rtol=2e-6, atol=0)
        param.grad = grad.clone()
    assert factor <= 1
    nn.utils.clip_grads_with_norm_(params, max_norm, torch.tensor(total), foreach=False)
    assert all(torch.equal(grad * factor, param.grad) for grad, param in zip(grads, params, strict=True))


@given(st.floats(0, 1e300), st.floats(1e-6, 1e6))
def test_norm_and_factor_are_numbers_of_single_precision(norm, max_norm):
    total, factor = clip_coefficient(norm, max_norm)
    assert total == float(torch.tensor(norm, dtype=FP32))
    assert factor == float(torch.clamp(max_norm / (torch.tensor(total) + 1e-6), max=1.0))


def test_a_norm_that_is_no_number_stays_one():
    assert all(math.isnan(value) for value in clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(math.inf, 1.0) == (math.inf, 0.0)
    assert clip_coefficient(0.0, 1.0) == (0.0, 1.0)
