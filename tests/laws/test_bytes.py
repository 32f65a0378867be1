"""Law 3, bytes: memory use follows from layout and plan by a closed formula."""

import mmap
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from toys import Shape, batches, inputs, layers, train

from patrickstar._engine.engine import Engine
from patrickstar._layout.schema import GRAD32
from patrickstar.testing import NoMeter

from .models import chunk_sizes, config, precisions, shapes

PLENTY = 1 << 24


@settings(max_examples=draws(15), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, precisions)
def test_model_data_per_parameter(shape, chunk_size, precision):
    engine = Engine(shape.build, config(precision, chunk_size, device_memory=PLENTY), meter=NoMeter())
    per_trained = {"bf16": 14, "fp16": 14, "fp32": 16}[precision]
    per_frozen = {"bf16": 2, "fp16": 2, "fp32": 4}[precision]
    expected = sum(p.numel() * (per_trained if p.requires_grad else per_frozen) for p in engine.module.parameters())
    assert engine.layout.model_data_bytes - engine.layout.padding_bytes == expected
    held = engine.inspect()
    assert held.device.chunk_bytes + held.host.chunk_bytes == engine.layout.model_data_bytes
    engine.close()


@settings(max_examples=draws(15), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, st.sampled_from(["bf16", "fp32"]))
def test_peaks_when_everything_fits(shape, chunk_size, precision):
    """Warm-up: `param16` on the device, optimizer lists on the host. Then all on the device, without duplicates."""
    engine = Engine(shape.build, config(precision, chunk_size, device_memory=PLENTY), meter=NoMeter())
    layout, held = engine.layout, engine.inspect()
    assert (held.device.chunk_bytes, held.host.chunk_bytes) == (layout.param16_bytes, layout.optimizer_bytes)
    train(engine, batches(3))
    assert engine.stats.last.device_peak_model_bytes == layout.model_data_bytes
    assert engine.stats.last.host_peak_model_bytes == 0
    assert (engine.stats.last.h2d_bytes, engine.stats.last.d2h_bytes) == (0, 0)
    assert engine.stats.total.h2d_bytes == layout.optimizer_bytes
    engine.close()


def test_host_memory_of_chunks_that_move_to_the_device_is_released():
    """No chunk is resident twice."""
    width = 512
    options = config("bf16", "2MiB", device_memory=1 << 28, host_memory=1 << 28)
    engine = Engine(partial(layers, width, 8), options, meter=NoMeter())
    train(engine, inputs(3, width, rows=2))
    assert engine.stats.last.device_peak_model_bytes == engine.layout.model_data_bytes, "not all came to the device"
    held = engine.inspect()
    pages = mmap.PAGESIZE * 2 * len(held.chunks)
    assert held.device.resident_bytes + held.host.resident_bytes <= engine.layout.model_data_bytes + pages
    engine.close()


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_accumulation_costs_one_gradient_list(accumulation):
    shape = Shape(("mlp", "plain"), tied=True)
    engine = Engine(shape.build, config("bf16", 256, device_memory=PLENTY), meter=NoMeter())
    for _ in range(accumulation):
        engine.backward(engine(torch.zeros(2, 3, dtype=torch.long)))
    numel = sum(chunk.numel for chunk in engine.layout.chunks)
    grad_bytes = sum(chunk.nbytes for chunk in engine.inspect().chunks if chunk.kind == GRAD32)
    assert grad_bytes == (4 * numel if accumulation > 1 else 0)
    engine.close()
