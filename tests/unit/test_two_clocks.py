"""The clocks of a dry run: the host launches ahead of the device, and a step takes the longer of both."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_dry_run import CONFIG, DESKTOP, LAPTOP
from torch import nn

from patrickstar import Engine
from patrickstar._dry_run import host_time
from patrickstar._dry_run.host_time import HostClock, HostCosts
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import OpCost, TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulation import simulate

operators = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20)
"""Seconds of operators: on the host, on the device."""


def run(machine, operators):
    hardware = SimulatedHardware(machine, TensorMeter())
    for launch_s, seconds in operators:
        hardware.launch(launch_s)
        hardware.compute(seconds)
    return hardware


@pytest.mark.parametrize(
    ("launch_s", "seconds", "waits"),
    [(2.0, 1.0, [2.0, 1.0, 1.0]), (1.0, 2.0, [1.0])],
    ids=["the host is slower", "the device is slower"],
)
def test_the_device_waits_for_launches(launch_s, seconds, waits):
    hardware = run(DESKTOP, 3 * [(launch_s, seconds)])
    assert hardware.clock.now == 7.0
    assert [wait.seconds for wait in hardware.clock.waits] == waits
    assert {wait.channel for wait in hardware.clock.waits} == {"host"}
    assert (hardware.launched_s, hardware.computed_s) == (3 * launch_s, 3 * seconds)


@given(operators)
def test_a_step_takes_the_longer_of_both_and_no_more_than_their_sum(operators):
    hardware = run(DESKTOP, operators)
    host_s, device_s = (sum(seconds) for seconds in zip((0.0, 0.0), *operators, strict=True))
    hardware.clock.wait_for_host()
    assert max(host_s, device_s) <= hardware.clock.now * (1 + 1e-9)
    assert hardware.clock.now <= (host_s + device_s) * (1 + 1e-9)


@given(operators)
def test_without_a_gpu_the_host_computes(operators):
    hardware = run(LAPTOP, operators)
    assert hardware.clock.now == pytest.approx(sum(map(sum, operators)))
    assert hardware.computed_s == pytest.approx(hardware.clock.now) and hardware.launched_s == 0


def test_a_host_that_waits_for_the_device_is_not_ahead_of_it():
    hardware = run(DESKTOP, [(1.0, 5.0)])
    hardware.up.begin(0, "a copy").wait()
    assert hardware.clock.host == 1.0, "the device waits for a copy, not the host"
    hardware.read.begin(int(1e9), "a page").wait()
    assert hardware.clock.host == hardware.clock.now == 7.0
    hardware.launch(2.0)
    hardware.compute(1.0)
    assert hardware.clock.now == 10.0


def step(engine):
    engine.backward(engine(torch.empty(4, 8, device="meta")).float().mean())
    engine.optimizer.step()


@pytest.mark.parametrize("meter_s", [0.0, 100.0])
def test_a_dry_run_says_that_launches_take_the_longest(meter_s):
    report = simulate(Engine, lambda: nn.Linear(8, 8), CONFIG, step, DESKTOP, host=HostCosts(0.0, 0.0, meter_s))
    assert report.host_s >= meter_s
    rounding_s = 1e-12 * report.seconds  # both are sums, of the same times in another order
    assert report.seconds + rounding_s >= report.bound_s >= report.host_s - rounding_s
    assert report.compute_s + sum(wait.seconds for wait in report.waits) == pytest.approx(report.seconds)
    assert next(lane for lane in report.lanes if lane.name == "host").busy_s == pytest.approx(report.host_s)
    assert "Python and launches take the longest" in str(report)


def test_launches_of_measured_operators_count():
    def costs(func, args, kwargs, out):
        return OpCost(1.0, launch_s=50.0)

    report = simulate(Engine, lambda: nn.Linear(8, 8), CONFIG, step, DESKTOP, costs, host=HostCosts(0.0, 0.0, 0.0))
    assert report.host_s >= 50 * report.compute_s * 0.9
    hidden = simulate(Engine, lambda: nn.Linear(8, 8), CONFIG, step, DESKTOP, costs)
    assert hidden.host_s == 0 and hidden.seconds < report.seconds


def test_the_way_to_the_tracer_does_not_count(monkeypatch):
    """The clock counts the code between operators: 5 s, 1 s and 4 s, of which 2 s each are the way to the tracer."""
    now_s = [0.0]
    monkeypatch.setattr(host_time.time, "thread_time", lambda: now_s[0])
    clock = HostClock(HostCosts(2.0, 0.0, 0.0))
    clock.start()
    taken = []
    for between_s in (5.0, 1.0, 4.0):
        now_s[0] += between_s
        clock.enter()
        taken.append(clock.take())
        now_s[0] += 100.0  # within the tracer
        clock.leave()
    now_s[0] += 0.5
    clock.end()
    assert [*taken, clock.take()] == [3.0, 0.0, 1.0, 0.5]
    assert clock.operators == 3


def test_a_measured_operator_of_a_cpu_is_not_launched():
    bench = OpBenchmark(torch.device("cpu"), 1e12, lambda func, args, kwargs, out: OpCost(9.0))
    meta = torch.zeros(64, device="meta")
    cost = bench(torch.ops.aten.exp.default, (meta,), {}, meta)
    assert cost.launch_s == 0.0 and cost.seconds > 0
