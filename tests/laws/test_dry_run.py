"""Dry runs equal real runs in accesses, bytes and memory at each moment; what their reports say."""

import gc
import math
from functools import partial
from itertools import groupby, pairwise
from unittest.mock import Mock

import fixed_machine
import pytest
import simulated_machines
import torch
from hypothesis import strategies as st
from sampling import drawn
from seeded import engine_of, run_step
from simulated_machines import DESKTOP
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import Shape, batches, layers, module
from transfer_bounds import min_transfer_bytes

import patrickstar as ps
from patrickstar import functional
from patrickstar._dry_run.host_time import HostCosts
from patrickstar._dry_run.measured_machine import MeasuredMachine
from patrickstar._dry_run.op_tracer import OpCost
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import forward_backward_step, simulate, simulate_on_this_machine
from patrickstar._engine.engine import Engine
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar._perf_model.workload import Workload
from patrickstar.errors import BudgetError, ModelError

from .models import LAYERS, config, llama, shapes, smallest_device_bytes
from .test_three_tiers_traffic import steps
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
    hooks |= {"meter": ps.testing.NoMeter(), "speculates": False}  # what is speculated depends on the speed of threads
    with Engine(build, options, **hooks) as engine:
        expected, _ = steps(engine, 3)
        trace, last = engine.inspect().trace, engine.stats.last
    actual = []
    report = simulate(Engine, build, options, lambda other: actual.extend(steps(other, 1)[0]), LAPTOP, steps=3, **hooks)
    assert actual == expected
    assert [moment.chunks for moment in report.trace.moments] == [moment.chunks for moment in trace]
    for name in PEAKS if options.disk is None else PEAKS[1:]:
        assert getattr(report.stats, name) == getattr(last, name), name
    if options.disk is not None:
        assert max(report.stats.device_peak_model_bytes, last.device_peak_model_bytes) <= options.device_memory


@drawn(10, shapes, st.sampled_from([1000, 9000, "auto"]), st.sampled_from(["bf16", "fp32"]), st.integers(0, 4000))
def test_without_a_disk_bytes_equal_those_of_a_run(shape, chunk_size, precision, spare_bytes):
    """fp16 is excluded: its first steps overflow and update nothing."""
    device = smallest_device_bytes(shape, chunk_size, precision) + spare_bytes
    compare(shape.build, config(precision, chunk_size, device_memory=device, host_memory=1 << 30))


@drawn(8, wide_shapes, st.sampled_from([1000, 9000, 40000]), rooms)
def test_with_a_disk_bytes_equal_those_of_a_run(tmp_path_factory, shape, chunk_size, room):
    options_ = on_disk(shape.build, options("bf16", chunk_size), tmp_path_factory.mktemp("disk"), batches(1)[0], room)
    compare(shape.build, options_, page_bytes=4096)


@drawn(10, shapes, st.sampled_from([1000, 9000, "auto"]), st.integers(32_000, 100_000))
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


@drawn(15, st.integers(4, 12), st.floats(0.5, 1.5), st.floats(1.0, 2.0), st.booleans())
def test_no_plan_transfers_less_than_the_lower_bound(count, device, host, in_backward):
    """Run a chain of layers on a simulated GPU, with and without updates in backward."""
    width = 256

    step = partial(run_step, batch=(torch.empty(8, width, device="meta"),), update=in_backward)
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


@pytest.mark.parametrize("clips", [(), (1.0,), (0.5,)], ids=["not clipped", "without effect", "clipped"])
def test_updates_that_outlast_a_step_are_not_left_to_the_next_one(clips):
    slow = DESKTOP.model_copy(update={"host": DESKTOP.host.model_copy(update={"memory_bandwidth": 1e9})})
    step = forward_backward_step(torch.sum, (torch.empty(64, 256),), {}, clips)
    options_ = config("bf16", "auto", device_memory=3 << 20, host_memory=1 << 30)
    report = simulate(Engine, partial(layers, 256, 16), options_, step, slow)
    update_s = next(used.busy_s for used in report.channels if used.name == "update on the host")
    assert update_s == report.bound_s > report.compute_s > 0
    assert report.seconds >= (1 - ROUNDING) * update_s
    # Updates of clipped gradients begin after all of backward.
    assert (report.stats.speculation_hits == 0) == (clips == (0.5,))


# The memory of tensors at each moment of a step, to the byte


class Text(nn.Module):
    """Model of token ids: masks of integers, attention, checkpointed blocks with saved random states, dropout."""

    def __init__(self, checkpointed: bool, tiled: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.tiled = checkpointed, tiled
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
        if self.tiled:
            return ps.functional.linear_cross_entropy(self.norm(hidden), self.head.weight, labels, self.head.bias)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), labels.flatten())


def ids_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, 512, (count, 24))
    return ids, ids


CASES = {
    "text": (lambda: Text(False), lambda: ids_of(4)),
    "checkpointed text": (lambda: Text(True), lambda: ids_of(3)),
    "tiled text": (lambda: Text(False, tiled=True), lambda: ids_of(8)),
    **{case: (llama, lambda: ids_of(4)) for case in LAYERS},
    "small": (Shape(("mlp", "attention", "plain")).build, lambda: batches(1)[0]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room", ["all", "half", "disk"])
@pytest.mark.parametrize("case", CASES)
def test_predicted_memory_is_measured_memory(case, room, precision, tmp_path, monkeypatch):
    monkeypatch.setattr(functional, "TILE_BYTES", 128 * 512 * 2)  # several tiles
    build, inputs = CASES[case]
    numel = sum(param.numel() for param in build().parameters())
    more = dict(LAYERS.get(case, {}))
    if room != "all":
        more["device_memory"] = (1 << 22) + 2 * numel
    if room == "disk":
        activations = 4 << 20 if "activation_offload" in more else 0
        more |= {"host_memory": (1 << 20) + 9 * numel + activations, "disk": tmp_path}
    config = ps.Config(device="cpu", precision=precision, chunk_size=32768, **more)
    # How many updates from disk begin early depends on the speed of threads.
    make = partial(Engine, speculates=room != "disk")
    gc.collect()  # an engine of another test that is released during a step would allocate tensors
    with make(build, config) as engine:
        batch = inputs()
        for _ in range(3):
            run_step(engine, batch)
        trace, measured = engine.inspect().trace, engine.stats.last
    del engine, batch
    batch, cpu = inputs(), torch.device("cpu")
    report = simulate_on_this_machine(
        make, build, config, lambda other: run_step(other, batch), cpu, MeasuredMachine(cpu, LAPTOP)
    )
    predicted = [moment.non_model_bytes for moment in report.trace.moments]
    assert predicted == [moment.non_model_bytes for moment in trace]
    for name in ("device_peak_non_model_bytes", "device_peak_model_bytes", "host_peak_model_bytes", "disk_bytes"):
        assert getattr(report.stats, name) == getattr(measured, name), name
    if room != "disk":  # whose pages in flight are no chunks either
        assert report.stats.host_peak_non_model_bytes == measured.host_peak_non_model_bytes


CONFIG = ps.Config(device="cpu", device_memory="64MiB", host_memory="1GiB")


class Branching(nn.Module):
    """Module that branches on the value of a tensor."""

    def __init__(self, about: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.about = about

    def forward(self, x, positions):
        y = self.linear(self.linear(x))  # the second saves the weight for the gradient of its input
        if self.about == "integers" and (positions.diff() == 1).all():
            return y * 2
        if self.about == "numbers" and y.sum() > 0:
            return y * 2
        return y


once = partial(run_step, batch=(torch.empty(4, 8, device="meta"), torch.arange(4)))


def test_reading_a_float_value_raises_and_names_the_module():
    outer = module(lambda m, *args: m.inner(*args), inner=lambda: Branching("numbers"))
    with pytest.raises(ModelError, match=r"module 'inner' \(Branching\) cannot run on meta tensors.*without a dry run"):
        simulate(Engine, outer, CONFIG, once, LAPTOP)


def test_a_model_that_does_not_fit_raises_the_error_of_a_real_run():
    small = ps.Config(device="cpu", device_memory=64, host_memory=64)
    with pytest.raises(BudgetError, match="does not fit") as caught:
        simulate(Engine, lambda: Branching("integers"), small, once, LAPTOP)
    with pytest.raises(BudgetError) as run:
        ps.initialize(lambda: Branching("integers"), small)
    assert caught.value.short_bytes == run.value.short_bytes


def simulated_layers(host_memory: int, disk: ps.Disk | None) -> DryRunReport:
    """Simulate 8 layers of 128 KiB on DESKTOP, with room for three of them beside the activations."""
    options = ps.Config(
        device="cpu", device_memory=1 << 20, host_memory=host_memory, disk=disk, chunk_size=1 << 16, precision="bf16"
    )
    step = partial(run_step, batch=(torch.empty(64, 256, device="meta"),))
    return simulate(Engine, partial(layers, 256, 8, bias=False), options, step, DESKTOP, page_bytes=1 << 16)


@pytest.mark.parametrize(("host_memory", "on_disk"), [(1 << 30, False), (3 << 20, True)])
def test_computation_and_waits_fill_a_step_and_waits_say_for_what(tmp_path, host_memory, on_disk):
    report = simulated_layers(host_memory, ps.Disk(tmp_path) if on_disk else None)
    assert report.compute_s + sum(wait.seconds for wait in report.waits) == pytest.approx(report.seconds)
    compute, *channels = report.lanes
    assert compute.name == "compute" and compute.busy_s == pytest.approx(report.compute_s)
    # They follow one another without a gap.
    spans = sorted((part.start_s, part.end_s) for part in (*compute.intervals, *report.waits))
    assert spans[0][0] == pytest.approx(0.0) and spans[-1][1] == pytest.approx(report.seconds)
    assert all(end_s == pytest.approx(start_s) for (_, end_s), (start_s, _) in pairwise(spans))

    used = {use.name for use in report.channels if use.nbytes}
    assert {lane.name for lane in channels if lane.intervals} == used
    assert ("disk read" in used) == on_disk
    for lane in channels:
        assert all(0 <= part.start_s < part.end_s <= report.seconds for part in lane.intervals)
        assert all(former.end_s <= latter.start_s for former, latter in pairwise(lane.intervals))
        for wait in report.waits:  # a channel is busy while it is waited for
            if wait.channel == lane.name:
                overlaps = (min(part.end_s, wait.end_s) - max(part.start_s, wait.start_s) for part in lane.intervals)
                assert sum(max(0.0, overlap_s) for overlap_s in overlaps) == pytest.approx(wait.seconds)
    assert {wait.phase for wait in report.waits} <= {"forward", "backward", "step"}
    assert [part.label for part in compute.intervals][-1] in ("backward", "step")
    if not on_disk:
        fetches = {(wait.label, wait.parameter) for wait in report.waits if wait.channel == "host to device"}
        assert ("param16[1]", "1.weight") in fetches
        assert "exposed: compute waits" in str(report) and "1.weight" in str(report)


def test_a_forward_that_checkpointing_runs_again_is_a_part_of_backward():
    checkpointed = module(lambda m, x: checkpoint(m.linear, x, use_reentrant=False), linear=lambda: nn.Linear(8, 8))

    def accumulating_step(engine):
        for _ in range(2):
            engine.backward(engine(torch.empty(4, 8, device="meta")).float().mean())
        engine.optimizer.step()

    report = simulate(Engine, checkpointed, CONFIG, accumulating_step, DESKTOP)
    phases = [phase for phase, _ in groupby(part.label for part in report.lanes[0].intervals)]
    # What prepares the second batch is outside of both, like the step.
    assert [phase for phase in phases if phase != "step"] == ["forward", "backward", "forward", "backward"]


def test_planning_does_not_change_a_running_engine(monkeypatch):
    monkeypatch.setattr(fixed_machine.MEASURED[1], fixed_machine.profile)
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: Branching("integers"), CONFIG)
    x, positions = torch.randn(4, 8), torch.arange(4)
    before, random = engine.state_dict(), torch.get_rng_state()
    report = engine.plan(x, positions, loss=lambda out: out.float().mean())
    assert report.seconds >= report.bound_s > 0, "values of integers are computed"
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()), "the random state must not change"
    assert report.compute_s + sum(wait.seconds for wait in report.waits) == pytest.approx(report.seconds)
    assert "where the time goes" in str(report) and "nothing was trained" in str(report)
    engine.backward(engine(x, positions).float().mean())
    optimizer.step()
    assert engine.stats.last.device_peak_model_bytes == report.stats.device_peak_model_bytes
    engine.close()


@pytest.mark.parametrize(("max_norm", "expected"), [(None, []), (1e9, [math.inf]), (1e-3, [0.0])])
def test_a_plan_clips_as_the_last_step_did(monkeypatch, max_norm, expected):
    with engine_of(lambda: nn.Linear(8, 8), CONFIG) as engine:
        engine.backward(engine(torch.randn(4, 8)).sum())
        if max_norm is not None:
            engine.clip_grad_norm_(max_norm)
        engine.optimizer.step()
        planned = Mock()
        monkeypatch.setattr("patrickstar._engine.engine_plan.dry_run_engine", lambda engine, step: step(planned))
        engine.plan(torch.randn(4, 8), loss=lambda out: out)
    assert [call.args[0] for call in planned.clip_grad_norm_.call_args_list] == expected
    assert planned.optimizer.step.called


linear_step = partial(run_step, batch=(torch.empty(4, 8, device="meta"),))


def test_page_locking_delays_the_first_step_and_no_later_one():
    """All host memory of the engine is locked at the rate of the machine, before the first step."""

    def run(rate):
        host = DESKTOP.host.model_copy(update={"page_lock": rate})
        machine = DESKTOP.model_copy(update={"host": host})
        return simulate(Engine, lambda: nn.Linear(8, 8), CONFIG, linear_step, machine)

    unknown, slow, fast = run(None), run(1e3), run(2e3)
    assert unknown.page_lock_s == 0 and "first step" not in str(unknown)
    assert slow.page_lock_s == 2 * fast.page_lock_s >= slow.stats.host_peak_model_bytes / 1e3
    assert slow.first_step_s - slow.page_lock_s == pytest.approx(unknown.first_step_s, abs=1e-6)
    assert slow.seconds == fast.seconds == unknown.seconds
    assert "first step" in str(slow)


@pytest.mark.parametrize("meter_s", [0.0, 100.0])
def test_a_dry_run_says_that_launches_take_the_longest(meter_s):
    report = simulate(Engine, lambda: nn.Linear(8, 8), CONFIG, linear_step, DESKTOP, host=HostCosts(0.0, 0.0, meter_s))
    assert report.host_s >= meter_s
    rounding_s = 1e-12 * report.seconds  # both are sums, of the same times in another order
    assert report.seconds + rounding_s >= report.bound_s >= report.host_s - rounding_s
    assert report.compute_s + sum(wait.seconds for wait in report.waits) == pytest.approx(report.seconds)
    assert next(lane for lane in report.lanes if lane.name == "host").busy_s == pytest.approx(report.host_s)
    assert "Python and launches take the longest" in str(report)


def test_launches_of_measured_operators_count():
    costs = lambda *_: OpCost(1.0, launch_s=50.0)  # noqa: E731
    run = partial(simulate, Engine, partial(nn.Linear, 8, 8), CONFIG, linear_step, DESKTOP, costs)
    report, hidden = run(host=HostCosts(0.0, 0.0, 0.0)), run()
    assert report.host_s >= 50 * report.compute_s * 0.9
    assert hidden.host_s == 0 and hidden.seconds < report.seconds
