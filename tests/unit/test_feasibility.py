"""Does it fit: what the error names works, one byte less does not, and what passes can be trained."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patrickstar as ps
from patrickstar.engine.engine import Engine
from patrickstar.errors import BudgetError
from patrickstar.layout.lists import scheme_for
from patrickstar.layout.mapping import Layout, ParamSpec, build_layout
from patrickstar.layout.sizes import format_size
from patrickstar.schedule.feasibility import check_budgets, least_bytes
from patrickstar.testing import NoMeter

quick = settings(derandomize=True, deadline=None, max_examples=300)

SCHEMES = [scheme_for(dtype, trained) for dtype in ("bfloat16", "float32") for trained in (True, False)]
AMPLE = 1 << 50

layouts = st.builds(
    lambda drawn, chunk_numel: build_layout(
        [ParamSpec(f"p{i}", numel, scheme) for i, (numel, scheme) in enumerate(drawn)], chunk_numel
    ),
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from(SCHEMES)), min_size=1, max_size=12),
    st.integers(1, 300),
)


def refusal(layout: Layout, device_bytes: int, host_bytes: int) -> str | None:
    """What `check_budgets` says against these budgets, None if nothing."""
    try:
        check_budgets(layout, device_bytes, host_bytes)
    except BudgetError as error:
        return str(error)
    return None


def named(message: str) -> tuple[int, int, int]:
    """The figures a refusal ends with: the smallest device budget of all, and a pair of budgets that works."""
    least = re.search(r"device_memory=(\d+) bytes plus what activations take", message)
    pair = re.search(r"with device_memory=(\d+) host_memory=(\d+) bytes", message)
    assert least and pair, message
    return int(least[1]), int(pair[1]), int(pair[2])


@quick
@given(layouts)
def test_the_least_bytes_are_those_of_the_layout(layout):
    needs = least_bytes(layout)
    assert needs.total_bytes == layout.model_data_bytes
    assert needs.device_bytes == max(chunk.numel * chunk.scheme.compute.itemsize for chunk in layout.chunks)


@quick
@given(layouts, st.floats(0, 1.5), st.floats(0, 1.5))
def test_the_budgets_a_refusal_names_work_and_one_byte_less_does_not(layout, device_share, host_share):
    device, host = (int(share * layout.model_data_bytes) for share in (device_share, host_share))
    message = refusal(layout, device, host)
    if message is None:
        return
    least_device, with_device, with_host = named(message)
    assert refusal(layout, with_device, with_host) is None
    if with_host:
        assert refusal(layout, with_device, with_host - 1) is not None
    assert refusal(layout, least_device, AMPLE) is None
    assert refusal(layout, least_device - 1, AMPLE) is not None
    assert with_device == max(device, least_device)


@quick
@given(layouts, st.floats(0, 1.5), st.floats(0, 1.5), st.integers(0, 1000))
def test_more_memory_is_never_refused_where_less_was_not(layout, device_share, host_share, more):
    device, host = (int(share * layout.model_data_bytes) for share in (device_share, host_share))
    if refusal(layout, device, host) is None:
        assert refusal(layout, device, host + more) is None


@quick
@given(layouts)
def test_memory_for_everything_is_enough(layout):
    largest = least_bytes(layout).device_bytes
    everything = layout.model_data_bytes
    assert refusal(layout, largest, everything) is None
    assert refusal(layout, everything + largest, everything) is None
    assert "the device budget of" in (refusal(layout, largest - 1, AMPLE) or "")
    assert "the host budget of" in (refusal(layout, largest, everything - largest - 1) or "")


@quick
@given(layouts, st.floats(0, 1.2))
def test_a_refusal_says_the_bytes_of_the_model_data_and_of_the_tier_that_is_too_small(layout, share):
    device = int(share * least_bytes(layout).device_bytes)
    total = layout.model_data_bytes
    message = refusal(layout, device, 0)
    if message is None:
        return
    assert f"{total} bytes ({format_size(total)})" in message
    assert ("the device budget of" in message) == (device < least_bytes(layout).device_bytes)
    if "the device budget of" in message:
        assert f"the device budget of {device} bytes ({format_size(device)})" in message
    if "the host budget" in message:
        assert "the host budget of 0 bytes (0 B)" in message


# What passes the check has to train, with nothing but model data on the tiers.


def train_two_steps(widths: list[int], device_bytes: int, host_bytes: int) -> None:
    """Train a chain of layers, each in a chunk of its own."""
    layers = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(widths)]
    config = ps.Config(device="cpu", device_memory=device_bytes, host_memory=host_bytes or 1, chunk_size=2)
    engine = Engine(nn.Sequential(*layers), config, meter=NoMeter())
    for _ in range(2):
        engine.backward(engine(torch.ones(1, widths[0])).float().sum())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    engine.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("widths", [[8, 8], [8, 8, 8, 8], [4, 8, 16, 8, 4, 2]], ids=str)
@pytest.mark.parametrize("sixteenths", [0, 1, 5, 8, 12, 15, 16, 17, 24, 40, 112, 200])
def test_budgets_that_pass_the_check_can_be_trained_with(widths, sixteenths):
    """The device budget in sixteenths of `param16`; the host budget the least that the check lets through."""
    numels = [inputs * outputs for inputs, outputs in pairwise(widths)]
    scheme = scheme_for("bfloat16", trained=True)
    layout = build_layout([ParamSpec(f"p{i}", numel, scheme) for i, numel in enumerate(numels)], 1)
    device = max(layout.param16_bytes * sixteenths // 16, least_bytes(layout).device_bytes)
    message = refusal(layout, device, 0)
    host = 0 if message is None else named(message)[2]
    check_budgets(layout, device, host)
    train_two_steps(widths, device, host)
