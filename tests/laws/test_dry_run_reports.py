"""Reports of dry runs: errors, values of integer tensors, lanes and waits, launches, dry runs of a running engine."""

from functools import partial
from itertools import groupby, pairwise

import pytest
import torch
from seeded import run_step
from simulated_machines import DESKTOP, LAPTOP
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import layers

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.host_time import HostCosts
from patrickstar._dry_run.op_tracer import OpCost
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import simulate
from patrickstar.errors import BudgetError, ModelError

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


def test_integer_values_are_computed():
    assert simulate(Engine, lambda: Branching("integers"), CONFIG, once, LAPTOP).seconds > 0


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
    options = ps.Config(
        device="cpu", device_memory=1 << 20, host_memory=host_memory, disk=disk, chunk_size=1 << 16, precision="bf16"
    )
    step = partial(run_step, batch=(torch.empty(64, 256, device="meta"),))
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


linear_step = partial(run_step, batch=(torch.empty(4, 8, device="meta"),))


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
    def costs(func, args, kwargs, out):
        return OpCost(1.0, launch_s=50.0)

    run = partial(simulate, Engine, partial(nn.Linear, 8, 8), CONFIG, linear_step, DESKTOP, costs)
    report, hidden = run(host=HostCosts(0.0, 0.0, 0.0)), run()
    assert report.host_s >= 50 * report.compute_s * 0.9
    assert hidden.host_s == 0 and hidden.seconds < report.seconds
