"""What a rehearsal says is what a run does: the same accesses, the same bytes on every tier and lane."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import testing
from patrickstar.engine.engine import Engine
from patrickstar.engine.rehearsal import rehearse
from patrickstar.layout.lists import PARAM16
from patrickstar.schedule.machine import DiskDrive, Host, Machine

from . import models
from .models import batches, config, precisions, shapes, smallest_device_bytes
from .tiers import WIDTH, on_disk, options, rooms

LAPTOP = Machine(
    name="laptop",
    source="made up",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.2),
    disk=DiskDrive(capacity="100GB", read="1GB", write="1GB"),
)
COUNTED = ("device_peak_model_bytes", "host_peak_model_bytes", "host_peak_non_model_bytes", "disk_bytes", "evictions")
MOVED = ("h2d_bytes", "d2h_bytes", "disk_read_bytes", "disk_write_bytes")


def step(engine, batch):
    engine.backward(engine(*batch))
    engine.optimizer.step()
    engine._complete()


def train(build, options, count, **hooks):
    engine = Engine(build, options, meter=testing.NoMeter(), **hooks)
    for batch in batches(count):
        step(engine, batch)
    return engine


def compare(build, options, **hooks):
    """The third step, and the trace it follows."""
    engine = train(build, options, 3, **hooks)
    meta = [tuple(value.to("meta") for value in batch) for batch in batches(1)]
    forecast = rehearse(build, options, lambda rehearsed: step(rehearsed, meta[0]), LAPTOP, meter=testing.NoMeter(), **hooks)
    assert [moment.chunks for moment in forecast.trace.moments] == [m.chunks for m in engine._clock.trace.moments]
    for name in (*COUNTED, *MOVED):
        assert getattr(forecast.stats, name) == getattr(engine.stats.last, name), name
    kinds = sum(1 for kind, _ in engine._manager.chunks if kind == PARAM16)
    engine.close()
    return forecast, kinds


@settings(max_examples=10, deadline=None, print_blob=True)
@given(shapes, st.sampled_from([1000, 9000, "auto"]), precisions, st.integers(0, 4000))
def test_in_memory_it_is_the_run_to_the_byte(shape, chunk_size, precision, spare_bytes):
    device = smallest_device_bytes(shape, chunk_size, precision) + spare_bytes
    compare(shape.build, config(precision, chunk_size, device_memory=device, host_memory=1 << 30))


@settings(max_examples=8, deadline=None, print_blob=True)
@given(shapes, st.sampled_from([1000, 9000, 40000]), rooms)
def test_with_a_disk_it_is_the_run_to_the_byte(tmp_path_factory, shape, chunk_size, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "WIDTH", WIDTH)
        folder = tmp_path_factory.mktemp("disk")
        options_ = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
        compare(shape.build, options_, page_bytes=4096)


def test_it_takes_no_memory_for_weights():
    def build():
        return torch.nn.Sequential(*(torch.nn.Linear(20_000, 20_000) for _ in range(4)))

    # 22 GB of model data, and only shapes of it are made.
    options_ = config("bf16", "auto", device_memory=8 << 30, host_memory=40 << 30)
    forecast = rehearse(
        build,
        options_,
        lambda engine: (engine.backward(engine(torch.empty(8, 20_000, device="meta")).float().mean()), engine.optimizer.step()),
        LAPTOP,
    )
    assert forecast.stats.host_peak_model_bytes > 18 << 30
    assert forecast.seconds >= forecast.bound_s > 0


def test_time_is_what_the_slowest_lane_needs_at_least():
    slow = LAPTOP.model_copy(
        update={"host": LAPTOP.host.model_copy(update={"memory_bandwidth": 1e9})}
    )

    def build():
        return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))

    options_ = config("bf16", "auto", device_memory=1 << 20, host_memory=1 << 30)

    def once(engine):
        engine.backward(engine(torch.empty(8, 256, device="meta")).float().mean())
        engine.optimizer.step()

    fast, other = (rehearse(build, options_, once, machine) for machine in (LAPTOP, slow))
    assert other.seconds > fast.seconds
    for forecast in (fast, other):
        assert forecast.seconds >= forecast.bound_s
        assert forecast.stats.h2d_bytes > 0
