"""The clocks of a dry run: the host launches ahead of the device, and a step takes the longer of both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_machines import DESKTOP, LAPTOP

from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware

operators = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20)
"""Seconds of operators: on the host, on the device."""


def run(machine, operators):
    hardware = SimulatedHardware(machine, TensorMeter())
    for launch_s, seconds in operators:
        hardware.launch(launch_s)
        hardware.compute(seconds)
    return hardware


@pytest.mark.parametrize(("launch_s", "seconds", "waits"), [(2.0, 1.0, [2.0, 1.0, 1.0]), (1.0, 2.0, [1.0])])
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
