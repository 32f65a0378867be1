"""Several processes refuse a step that does not fit before memory is taken, together, with settings that suffice."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toys import layers, mean_square

import patrickstar as ps
from patrickstar.errors import BudgetError

from . import ranks

WIDTH = 256
BATCH = torch.randn(64, WIDTH)


def build() -> nn.Module:
    return layers(WIDTH, 8, nn.GELU)


def config(device_memory: str) -> ps.Config:
    return ps.Config(device="cpu", device_memory=device_memory, host_memory="64MiB", precision="fp32")


def refused(device_memory: str) -> str:
    built = []

    def noted() -> nn.Module:
        model = build()
        built.append(not next(model.parameters()).is_meta)
        return model

    with pytest.raises(BudgetError) as caught:
        ps.initialize(noted, config(device_memory), sample=BATCH, loss=mean_square)
    assert not any(built), "memory was taken before the refusal"
    return str(caught.value)


@ranks.in_processes(2)
def test_all_are_refused_with_a_setting_that_suffices():
    """Refuse a budget for all processes, and train with the advised one."""
    message = refused("1200KiB")
    advised = re.search(r"device_memory='(\w+)'", message)
    assert advised is not None, message
    engine, optimizer = ps.initialize(build, config(advised[1]), sample=BATCH, loss=mean_square)
    for _ in range(3):
        engine.backward(mean_square(engine(BATCH)))
        optimizer.step()
    engine.close(keep=False)


@ranks.in_processes(2)
def test_one_refusal_is_that_of_all():
    """Refuse the budget of the second process."""
    message = refused("64MiB" if dist.get_rank() == 0 else "1200KiB")
    assert ("rank 1 (process" in message) == (dist.get_rank() == 0)
    assert "this training step does not fit" in message
