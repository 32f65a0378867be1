"""Alignment: every parameter starts at a multiple of 256 bytes, in every chunk list and on every tier."""

import pytest
import torch
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar._engine.param_init import make_layout, param_specs
from patrickstar._layout.chunk_mapping import align
from patrickstar._layout.schema import EXP_AVG, EXP_AVG_SQ, PARAM16, PARAM32
from patrickstar._models.presets import PRESETS
from patrickstar.testing import NoMeter

from .models import check_alignment, config

WIDTH = 33


class OddSizes(nn.Module):
    """Model whose parameters mostly have sizes without common factors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the head's output."""
        hidden = self.words(ids) * self.scale
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(self.norm(hidden)).float().square().mean()


@pytest.mark.parametrize("chunk_size", [256, 1000, 4096, "auto"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("room", ["all on the device", "all evicted"])
def test_every_parameter_begins_at_a_multiple_of_256_bytes(precision, chunk_size, room):
    options = config(precision, chunk_size, device_memory=1 << 24, host_memory=1 << 24)
    engine = Engine(OddSizes, options, meter=NoMeter(), evict_everything=room == "all evicted")
    checked = set()
    for step in range(3):
        loss = engine(torch.full((2, 3), step))
        checked |= check_alignment(engine)
        engine.backward(loss)
        checked |= check_alignment(engine)
        engine.optimizer.step()
        checked |= check_alignment(engine)
    tier = "device" if room == "all on the device" else "host"
    assert {(kind, tier) for kind in (PARAM16, PARAM32, EXP_AVG, EXP_AVG_SQ)} <= checked
    engine.close()


@pytest.mark.parametrize("preset", ["gpt-10m", "gpt2-124m"])
def test_alignment_adds_at_most_a_thousandth_of_model_data(preset):
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(PRESETS[preset].config())
    options = config("bf16", "auto")
    params = param_specs(model, model, options)
    layout = make_layout(params, options, 8 << 30)
    added = sum((align(param.numel) - param.numel) * param.schema.bytes_per_param for param in params)
    assert layout.numel == PRESETS[preset].numel
    assert added <= layout.padding_bytes, "padding includes the ends of chunks as well"
    assert added <= 0.001 * layout.model_data_bytes
