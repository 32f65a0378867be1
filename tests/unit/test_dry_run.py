"""Dry runs: errors, values of integer tensors, and dry runs of an existing engine."""

from functools import partial
from itertools import groupby, pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import layers

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import copy_to_meta, simulate
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar.errors import BudgetError, ModelError

LAPTOP = Machine(
    name="laptop",
    source="made up",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.2),
)
CONFIG = ps.Config(device="cpu", device_memory="64MiB", host_memory="1GiB")
DESKTOP = Machine(
    name="desktop",
    source="made up",
    gpu=Gpu(count=1, memory="1GiB", matmul_tflops=10, memory_bandwidth="1TB"),
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2),
    links=Links(h2d="1GB", d2h="1GB"),
    disk=DiskDrive(capacity="100GB", read="1GB", write="1GB"),
)


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


def once(engine):
    x, positions = torch.empty(4, 8, device="meta"), torch.arange(4)
    engine.backward(engine(x, positions).float().mean())
    engine.optimizer.step()


def test_integer_values_are_computed():
    def build() -> nn.Module:
        return nn.Sequential(Branching("integers")).get_submodule("0")

    assert simulate(Engine, build, CONFIG, once, LAPTOP).seconds > 0


def test_reading_a_float_value_raises_and_names_the_module():
    with pytest.raises(ModelError, match=r"module 'inner' \(Branching\) cannot run on meta tensors.*without a dry run"):

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Branching("numbers")

            def forward(self, *args):
                return self.inner(*args)

        simulate(Engine, Outer, CONFIG, once, LAPTOP)


def test_a_model_that_does_not_fit_raises_the_error_of_a_real_run():
    small = ps.Config(device="cpu", device_memory=64, host_memory=64)
    with pytest.raises(BudgetError, match="does not fit") as caught:
        simulate(Engine, lambda: Branching("integers"), small, once, LAPTOP)
    with pytest.raises(BudgetError) as run:
        ps.initialize(lambda: Branching("integers"), small)
    assert caught.value.short_bytes == run.value.short_bytes


def simulated_layers(host_memory: int, disk: ps.Disk | None) -> DryRunReport:
    """Simulate 8 layers of 128 KiB on DESKTOP, with room for three of them beside the activations."""

    def step(engine):
        engine.backward(engine(torch.empty(64, 256, device="meta")).float().mean())
        engine.optimizer.step()

    options = ps.Config(
        device="cpu", device_memory=1 << 20, host_memory=host_memory, disk=disk, chunk_size=1 << 16, precision="bf16"
    )
    return simulate(Engine, partial(layers, 256, 8, bias=False), options, step, DESKTOP, page_bytes=1 << 16)


@pytest.mark.parametrize(("host_memory", "on_disk"), [(1 << 30, False), (3 << 20, True)])
def test_computation_and_waits_fill_a_step(tmp_path, host_memory, on_disk):
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


def test_waits_say_for_what_and_in_which_phase():
    report = simulated_layers(1 << 30, None)
    assert {wait.phase for wait in report.waits} <= {"forward", "backward", "step"}
    assert [part.label for part in report.lanes[0].intervals][-1] in ("backward", "step")
    fetches = {(wait.label, wait.parameter) for wait in report.waits if wait.channel == "host to device"}
    assert ("param16[1]", "1.weight") in fetches
    text = str(report)
    assert "exposed: compute waits" in text and "1.weight" in text


def test_a_forward_that_checkpointing_runs_again_is_a_part_of_backward():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False)

    def accumulating_step(engine):
        for _ in range(2):
            engine.backward(engine(torch.empty(4, 8, device="meta")).float().mean())
        engine.optimizer.step()

    report = simulate(Engine, Checkpointed, CONFIG, accumulating_step, DESKTOP)
    phases = [phase for phase, _ in groupby(part.label for part in report.lanes[0].intervals)]
    # What prepares the second batch is outside of both, like the step.
    assert [phase for phase in phases if phase != "step"] == ["forward", "backward", "forward", "backward"]


def test_planning_does_not_change_a_running_engine():
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: Branching("integers"), CONFIG)
    x, positions = torch.randn(4, 8), torch.arange(4)
    before, random = engine.state_dict(), torch.get_rng_state()
    report = engine.plan(x, positions, loss=lambda out: out.float().mean())
    assert report.seconds >= report.bound_s > 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()), "the random state must not change"
    assert report.compute_s + sum(wait.seconds for wait in report.waits) == pytest.approx(report.seconds)
    assert "where the time goes" in str(report) and "nothing was trained" in str(report)
    engine.backward(engine(x, positions).float().mean())
    optimizer.step()
    assert engine.stats.last.device_peak_model_bytes == report.stats.device_peak_model_bytes
    engine.close()


def test_a_meta_copy_keeps_ties_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied["b"].weight is copied["a"].weight and copied["a"].weight.is_meta
    assert not copied["a"].bias.requires_grad and copied["b"].bias.requires_grad
    assert not model["a"].weight.is_meta


def test_memory_is_counted_until_its_last_tensor_is_freed():
    meter = TensorMeter()
    tensor = torch.empty(1000, device="meta")
    meter.track(tensor)
    view = tensor[:10]
    meter.track(view)
    assert meter.now(0) == meter.peak(0) == 4000
    del tensor
    assert meter.now(0) == 4000
    del view
    assert (meter.now(0), meter.peak(0)) == (0, 4000)
    meter.restart()
    assert meter.peak(0) == 0
