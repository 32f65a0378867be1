"""Law 3, bytes: memory use follows from layout and plan by a closed formula, and parameters are aligned."""

import mmap
from functools import partial

import pytest
import simulated_machines
import torch
from sampling import drawn
from seeded import run_step
from torch import nn
from toys import Shape, batches, inputs, layers, mean_square, module, train
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar._dry_run.simulation import simulate
from patrickstar._engine.param_init import make_layout, param_specs
from patrickstar._layout.chunk_mapping import align
from patrickstar._layout.schema import EXP_AVG, EXP_AVG_SQ, GRAD32, PARAM16, PARAM32
from patrickstar._models.presets import PRESETS

from .models import check_alignment, chunk_sizes, config, precisions, shapes

PLENTY = 1 << 24


@drawn(20, shapes, chunk_sizes, precisions)
def test_model_data_per_parameter_and_peaks_when_everything_fits(shape, chunk_size, precision):
    """Warm-up: `param16` on the device, optimizer lists on the host. Then all on the device, without duplicates."""
    engine = ps.Engine(shape.build, config(precision, chunk_size, device_memory=PLENTY), meter=ps.testing.NoMeter())
    per_trained = {"bf16": 14, "fp16": 14, "fp32": 16}[precision]
    per_frozen = {"bf16": 2, "fp16": 2, "fp32": 4}[precision]
    expected = sum(p.numel() * (per_trained if p.requires_grad else per_frozen) for p in engine.module.parameters())
    layout, held = engine.layout, engine.inspect()
    assert layout.model_data_bytes - layout.padding_bytes == expected
    assert (held.device.chunk_bytes, held.host.chunk_bytes) == (layout.param16_bytes, layout.optimizer_bytes)
    assert held.device.chunk_bytes + held.host.chunk_bytes == layout.model_data_bytes
    if precision == "fp16":
        return  # its first steps overflow
    train(engine, batches(3))
    assert engine.stats.last.device_peak_model_bytes == layout.model_data_bytes
    assert engine.stats.last.host_peak_model_bytes == 0
    assert (engine.stats.last.h2d_bytes, engine.stats.last.d2h_bytes) == (0, 0)
    assert engine.stats.total.h2d_bytes == layout.optimizer_bytes
    assert (engine.stats.total.steps, engine.stats.last.steps, engine.stats.last.loss_scale) == (3, 1, 1.0)


def test_host_memory_of_chunks_that_move_to_the_device_is_released():
    """No chunk is resident twice."""
    width = 512
    options = config("bf16", "2MiB", device_memory=1 << 28, host_memory=1 << 28)
    engine = ps.Engine(partial(layers, width, 8), options, meter=ps.testing.NoMeter())
    train(engine, inputs(3, width, rows=2))
    assert engine.stats.last.device_peak_model_bytes == engine.layout.model_data_bytes, "not all came to the device"
    held = engine.inspect()
    pages = mmap.PAGESIZE * 2 * len(held.chunks)
    assert held.device.resident_bytes + held.host.resident_bytes <= engine.layout.model_data_bytes + pages


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_accumulation_costs_one_gradient_list(accumulation):
    shape = Shape(("mlp", "plain"), tied=True)
    engine = ps.Engine(shape.build, config("bf16", 256, device_memory=PLENTY), meter=ps.testing.NoMeter())
    for _ in range(accumulation):
        engine.backward(engine(torch.zeros(2, 3, dtype=torch.long)))
    numel = sum(chunk.numel for chunk in engine.layout.chunks)
    grad_bytes = sum(chunk.nbytes for chunk in engine.inspect().chunks if chunk.kind == GRAD32)
    assert grad_bytes == (4 * numel if accumulation > 1 else 0)


# Alignment: every parameter starts at a multiple of 256 bytes, in every chunk list and on every tier

WIDTH = 33


def read_all(m, ids):
    hidden = m.words(ids) * m.scale
    for layer in m.layers:
        hidden = layer(hidden).tanh()
    return mean_square(m.head(m.norm(hidden)))


odd_sizes = module(  # mostly without common factors
    read_all,
    words=lambda: nn.Embedding(11, WIDTH),
    scale=lambda: nn.Parameter(torch.ones(1)),
    layers=partial(layers, WIDTH, 3),
    norm=lambda: nn.LayerNorm(WIDTH).requires_grad_(False),
    head=lambda: nn.Linear(WIDTH, 7),
)


@pytest.mark.parametrize("chunk_size", [256, 1000, 4096, "auto"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("room", ["all on the device", "all evicted"])
def test_every_parameter_begins_at_a_multiple_of_256_bytes(precision, chunk_size, room):
    options = config(precision, chunk_size, device_memory=1 << 24, host_memory=1 << 24)
    engine = ps.Engine(odd_sizes, options, meter=ps.testing.NoMeter(), evict_everything=room == "all evicted")
    checked = set()
    for step in range(3):
        loss = engine(torch.full((2, 3), step))
        for act in (lambda: None, lambda loss=loss: engine.backward(loss), engine.optimizer.step):
            act()
            checked |= check_alignment(engine)
    tier = "device" if room == "all on the device" else "host"
    assert {(kind, tier) for kind in (PARAM16, PARAM32, EXP_AVG, EXP_AVG_SQ)} <= checked


@pytest.mark.parametrize("preset", ["gpt-10m", "gpt2-124m"])
def test_alignment_adds_at_most_a_thousandth_of_model_data(preset):
    with torch.device("meta"):
        model = GPT2LMHeadModel(PRESETS[preset].config())
    options = config("bf16", "auto")
    params = param_specs(model, model, options)
    layout = make_layout(params, options, 8 << 30)
    added = sum((align(param.numel) - param.numel) * param.schema.bytes_per_param for param in params)
    assert layout.numel == PRESETS[preset].numel
    assert added <= layout.padding_bytes, "padding includes the ends of chunks as well"
    assert added <= 0.001 * layout.model_data_bytes


class Head(nn.Module):
    """Output layer of a large vocabulary, and its loss."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.head, self.tiled = nn.Linear(64, 128_256, bias=False), tiled

    def forward(self, hidden, labels):
        if self.tiled:
            return ps.functional.linear_cross_entropy(hidden, self.head.weight, labels)
        return nn.functional.cross_entropy(self.head(hidden).float(), labels)


@pytest.mark.parametrize("tiled", [True, False])
def test_a_tiled_loss_needs_400_mb_where_logits_need_ten_gb(tiled):
    def step(engine):
        hidden = torch.empty(8192, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        run_step(engine, (hidden, torch.zeros(8192, dtype=torch.int64)))

    config = ps.Config(device="cpu", precision="bf16", device_memory="20GiB", host_memory="20GiB")
    report = simulate(ps.Engine, partial(Head, tiled), config, step, simulated_machines.LAPTOP)
    operands = 2 * (128_256 + 8192) * 64 * 2  # weight and hidden, or their gradients, and copies in the right dtype
    peak = report.stats.device_peak_non_model_bytes
    assert peak <= 0.4e9 + operands if tiled else peak >= 10e9
