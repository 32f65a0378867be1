"""Dry runs equal real runs: same accesses, same bytes on every tier and channel, same memory at each moment."""

import gc
from functools import partial

import pytest
import simulated_machines
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import complete_updates
from sampling import draws
from seeded import run_step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toys import Shape, batches, layers

import patrickstar as ps
from patrickstar import testing
from patrickstar._dry_run.simulation import simulate, simulate_on_this_machine
from patrickstar._engine.engine import Engine
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar._perf_model.perf_model import min_transfer_bytes
from patrickstar._perf_model.workload import Workload

from .models import config, shapes, smallest_device_bytes
from .test_three_tiers_traffic import speculative_bytes, transferred
from .tiers import on_disk, options, rooms, wide_shapes

LAPTOP = simulated_machines.LAPTOP.model_copy(update={"disk": simulated_machines.DESKTOP.disk})
ROUNDING = 1e-9
"""Seconds are differences of a clock, and bounds are sums."""
PEAKS = ("device_peak_model_bytes", "host_peak_model_bytes", "host_peak_non_model_bytes", "disk_bytes", "evictions")
"""Equal in a dry run and a run. With a disk, the first one also depends on when writes complete: evicted chunks keep
their memory until then, within the budget."""


def on_meta(rows, width):
    """Return a step of layers on the meta device."""
    return lambda engine: run_step(engine, (torch.empty(rows, width, device="meta"),))


def compare(build, options, **hooks):
    """Compare the transfers of three steps, the peaks of the last one, and its trace."""
    hooks |= {"meter": testing.NoMeter(), "speculates": False}  # what is speculated depends on the speed of threads
    with Engine(build, options, **hooks) as engine:
        expected = steps(engine, 3)
        trace, last = engine.inspect().trace, engine.stats.last
    actual = []
    report = simulate(Engine, build, options, lambda other: actual.extend(steps(other, 1)), LAPTOP, steps=3, **hooks)
    assert actual == expected
    assert [moment.chunks for moment in report.trace.moments] == [moment.chunks for moment in trace]
    for name in PEAKS if options.disk is None else PEAKS[1:]:
        assert getattr(report.stats, name) == getattr(last, name), name
    if options.disk is not None:
        assert max(report.stats.device_peak_model_bytes, last.device_peak_model_bytes) <= options.device_memory


def steps(engine, count):
    """Return the bytes that each step transfers, including its update and without reads for the next step."""
    transfers = []
    for batch in batches(count):
        before, ahead = engine.inspect(), speculative_bytes(engine)
        run_step(engine, batch)
        complete_updates(engine)
        h2d, d2h, read, written = transferred(before, engine.inspect())
        transfers.append((h2d, d2h, read + ahead - speculative_bytes(engine), written))
    return transfers


@settings(max_examples=draws(10), deadline=None, print_blob=True)
@given(shapes, st.sampled_from([1000, 9000, "auto"]), st.sampled_from(["bf16", "fp32"]), st.integers(0, 4000))
def test_without_a_disk_bytes_equal_those_of_a_run(shape, chunk_size, precision, spare_bytes):
    """fp16 is excluded: its first steps overflow and update nothing."""
    device = smallest_device_bytes(shape, chunk_size, precision) + spare_bytes
    compare(shape.build, config(precision, chunk_size, device_memory=device, host_memory=1 << 30))


@settings(max_examples=draws(8), deadline=None, print_blob=True)
@given(wide_shapes, st.sampled_from([1000, 9000, 40000]), rooms)
def test_with_a_disk_bytes_equal_those_of_a_run(tmp_path_factory, shape, chunk_size, room):
    options_ = on_disk(shape.build, options("bf16", chunk_size), tmp_path_factory.mktemp("disk"), batches(1)[0], room)
    compare(shape.build, options_, page_bytes=4096)


@settings(max_examples=draws(10), deadline=None, print_blob=True)
@given(shapes, st.sampled_from([1000, 9000, "auto"]), st.integers(32_000, 100_000))
def test_tiers_stay_within_budget_and_channel_bytes_match_the_stats(shape, chunk_size, spare_bytes):
    def step(engine):
        steps(engine, 1)

    wide = simulate(
        Engine, shape.build, config("bf16", chunk_size, device_memory=1 << 30, host_memory=1 << 30), step, LAPTOP
    )
    non_model = wide.stats.device_peak_non_model_bytes
    device = smallest_device_bytes(shape, chunk_size, "bf16") + non_model + spare_bytes
    options_ = config("bf16", chunk_size, device_memory=device, host_memory=wide.stats.device_peak_model_bytes * 8)
    report = simulate(Engine, shape.build, options_, step, LAPTOP)
    assert report.timeline
    for sample in report.timeline:
        assert sample.device_bytes <= device and sample.host_bytes <= options_.host_memory
        assert 0 <= sample.at_s <= report.seconds
    channels = {channel.name: channel for channel in report.channels}
    # Embedding rows looked up on the host are copied by operators, not on a channel.
    assert channels["host to device"].nbytes <= report.stats.h2d_bytes
    assert channels["device to host"].nbytes <= report.stats.d2h_bytes
    assert all(channel.busy_s <= report.seconds * (1 + 1e-9) for channel in report.channels)
    assert report.compute_s <= report.seconds * (1 + 1e-9)


@settings(max_examples=draws(15), deadline=None, print_blob=True)
@given(st.integers(4, 12), st.floats(0.5, 1.5), st.floats(1.0, 2.0), st.booleans())
def test_no_plan_transfers_less_than_the_lower_bound(count, device, host, in_backward):
    """Run a chain of layers on a simulated GPU, with and without updates in backward."""
    width = 256

    def step(engine):
        engine.backward(engine(torch.empty(8, width, device="meta")).float().mean(), update=in_backward)
        engine.optimizer.step()

    params = count * width * width
    gpu = Gpu(count=1, memory=int(4 * params * device) + (1 << 20), matmul_tflops=10, memory_bandwidth="1TB")
    machine = Machine(
        name="small GPU",
        source="a test",
        gpu=gpu,
        host=Host(memory=int(14 * params * host) + (1 << 20), memory_bandwidth="20GB", cores=2),
        links=Links(h2d="1GB", d2h="1GB"),
    )
    report = simulate(Engine, partial(layers, width, count, bias=False), config("bf16", width * width), step, machine)
    work = Workload(params, 8, 8, False, 6.0 * params * 8, width, 0, 0)
    fewest, _ = min_transfer_bytes(work, machine)
    assert report.stats.h2d_bytes + report.stats.d2h_bytes >= fewest * (1 - 1e-6)
    assert report.seconds >= report.bound_s


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_a_dry_run_allocates_no_memory_for_weights(count):
    """Model data of 3 GB, and of 25, is all on the meta device."""
    width = 5000
    options_ = config("fp32", "auto", device_memory=count << 27, host_memory=5 * count << 27)
    report = simulate(Engine, partial(layers, width, count), options_, on_meta(8, width), LAPTOP)
    assert 8 <= report.stats.host_peak_model_bytes / (count * width * width) < 12.1, "states of the matrices"
    assert report.seconds >= (1 - ROUNDING) * report.bound_s > 0


def test_the_busiest_channel_is_a_lower_bound_of_the_time():
    build = partial(layers, 256, 8)
    slow = LAPTOP.model_copy(update={"host": LAPTOP.host.model_copy(update={"memory_bandwidth": 1e9})})

    options_ = config("bf16", "auto", device_memory=1 << 20, host_memory=1 << 30)
    fast, other = (simulate(Engine, build, options_, on_meta(8, 256), machine) for machine in (LAPTOP, slow))
    assert other.seconds > fast.seconds
    for report in (fast, other):
        assert report.seconds >= report.bound_s
        assert report.stats.h2d_bytes > 0


# The memory of tensors at each moment of a step, to the byte


class Text(nn.Module):
    """Model of token ids: masks of integers, attention, checkpointed blocks with saved random states, dropout."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.positions = nn.Embedding(512, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 512)

    def forward(self, ids, labels):
        hidden = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = ids.eq(0)
        for block in self.blocks:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, None, mask, use_reentrant=False)
            else:
                hidden = block(hidden, None, mask)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), labels.flatten())


def ids_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, 512, (count, 24))
    return ids, ids


CASES = {
    "text": (lambda: Text(False), lambda: ids_of(4)),
    "checkpointed text": (lambda: Text(True), lambda: ids_of(3)),
    "small": (Shape(("mlp", "attention", "plain")).build, lambda: batches(1)[0]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room", ["all", "half", "disk"])
@pytest.mark.parametrize("case", CASES)
def test_predicted_memory_is_measured_memory(case, room, precision, tmp_path):
    build, inputs = CASES[case]
    numel = sum(param.numel() for param in build().parameters())
    more = {}
    if room != "all":
        more["device_memory"] = (1 << 22) + 2 * numel
    if room == "disk":
        more |= {"host_memory": (1 << 20) + 9 * numel, "disk": tmp_path}
    config = ps.Config(device="cpu", precision=precision, chunk_size=32768, **more)
    gc.collect()  # an engine of another test that is released during a step would allocate tensors
    with Engine(build, config) as engine:
        batch = inputs()
        for _ in range(3):
            run_step(engine, batch)
        trace, measured = engine.inspect().trace, engine.stats.last
    del engine, batch
    batch = inputs()
    report = simulate_on_this_machine(
        Engine, build, config, lambda other: run_step(other, batch), torch.device("cpu"), LAPTOP
    )
    predicted = [moment.non_model_bytes for moment in report.trace.moments]
    assert predicted == [moment.non_model_bytes for moment in trace]
    for name in ("device_peak_non_model_bytes", "device_peak_model_bytes", "host_peak_model_bytes", "disk_bytes"):
        assert getattr(report.stats, name) == getattr(measured, name), name
