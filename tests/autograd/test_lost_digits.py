"""Frozen parameters lose the digits that their chunks do not have, and `close` says so once, in numbers."""

import logging

import pytest
import torch
from torch import nn

import patrickstar as ps

LOGGER = "patrickstar._engine.lost_digits"


def frozen_and_trained(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False)).to(dtype)
    model[0].requires_grad_(False)
    return model


def closed(model, caplog, precision="bf16", keep=True, **options):
    """Create an engine and close it, twice; return what was said."""
    config = ps.Config(device="cpu", precision=precision, device_memory="1MiB", host_memory="1MiB")
    engine, _ = ps.initialize(model, config, **options)
    with caplog.at_level(logging.WARNING, LOGGER):
        engine.close(keep=keep)
        engine.close(keep=keep)
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize(
    ("precision", "dtype", "name"), [("bf16", torch.bfloat16, "bfloat16"), ("fp16", torch.float16, "float16")]
)
def test_close_says_what_was_rounded(caplog, precision, dtype, name):
    model = frozen_and_trained()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    (said,) = closed(model, caplog, precision)
    assert f"2 frozen parameters, 72 elements, come back in {name}, as chunks held them: 144 B of 288 B" in said
    assert "from '0.weight' on" in said and "merge_and_unload" in said
    for key, value in model.state_dict().items():
        torch.testing.assert_close(
            value, values[key].to(dtype) if key.startswith("0.") else values[key], rtol=0, atol=0
        )


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (frozen_and_trained(), {"precision": "fp32"}),
        (frozen_and_trained(torch.bfloat16), {}),
        (nn.Linear(8, 8), {}),
        (frozen_and_trained(), {"keep": False}),
    ],
    ids=["fp32", "given in bf16", "all trained", "values are not kept"],
)
def test_close_is_silent_where_nothing_was_lost(caplog, model, options):
    assert not closed(model, caplog, **options)


def test_parameters_of_frozen_modules_and_the_dtype_of_weights_count(caplog):
    """Parameters on the meta device have the values, and the digits, that `weights` gives them."""
    assert "4 frozen parameters, 78 elements" in closed(frozen_and_trained(), caplog, frozen={"a": nn.Linear(2, 2)})[-1]
    values = {name: value.clone() for name, value in frozen_and_trained().state_dict().items()}
    with torch.device("meta"):
        model = frozen_and_trained(torch.bfloat16)
    assert "2 frozen parameters, 72 elements" in closed(model, caplog, weights=values.__getitem__)[-1]
