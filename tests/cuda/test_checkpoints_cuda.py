"""Checkpoints of an engine on a CUDA device, with dropout, and states on the device, the host or the disk."""

from functools import partial

import pytest
import torch
from cuda_cases import DEVICE, budget, inputs, layers, make_engine, marks
from toys import outcome, train

import patrickstar as ps
from patrickstar import testing

pytestmark = marks

build = partial(layers, count=12, dropout=0.1)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, tier, precision, wait):
    """The parameters take 1.5 MiB in 16 bits and the states 9 MiB, so that the smaller budgets hold no states."""
    options = dict(device=str(DEVICE), precision=precision, chunk_size="512KiB")
    small = budget("4MiB", ps.Config(**options).compute_dtype)
    budgets = {
        "device": {"device_memory": "1GiB"},
        "host": {"device_memory": small},
        "disk": {"device_memory": small, "host_memory": "64MiB", "disk": ps.Disk(tmp_path)},
    }[tier]
    engine = make_engine(build, ps.Config(**options, **budgets))
    train(engine, inputs(3, rows=8))
    engine.save(tmp_path / "checkpoint", wait=wait)
    expected = train(engine, inputs(2, rows=8, seed=2)) + outcome(engine)
    engine.close()
    resumed = make_engine(build, ps.Config(**options, device_memory="1GiB"))
    torch.manual_seed(5)
    resumed.load(tmp_path / "checkpoint")
    testing.assert_same_bits(
        expected, train(resumed, inputs(2, rows=8, seed=2)) + outcome(resumed), "results after the resume"
    )
    resumed.close()
