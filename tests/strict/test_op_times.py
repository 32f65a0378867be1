"""Times of operators on a device and of their launches are measured apart: here both are known."""

import time

import pytest
import strict_device
import torch

from patrickstar._dry_run.device_timer import DeviceTimer
from patrickstar._dry_run.op_benchmark import MIN_RUNS, OpBenchmark
from patrickstar._dry_run.op_tracer import OpCost

DEVICE = torch.device("strict", 0)
FILL_S = 0.5
"""Longer than the launches of all runs: the host stays ahead."""


@pytest.fixture(autouse=True)
def _timed():
    strict_device.configure(timed=strict_device.Rates(up=1e9, down=1e9))


class Operator:
    """Operator that takes known times on the host and on the device."""

    def __init__(self, device_s: float, launch_s: float) -> None:
        self.device_s, self.launch_s = device_s, launch_s
        self.addresses: list[int] = []

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.addresses.append(value.data_ptr())
        time.sleep(self.launch_s)
        strict_device.extension.charge(self.device_s)
        return value.add_(1)


def timer() -> DeviceTimer:
    memory = torch.zeros(4, device=DEVICE)

    def fill() -> None:
        strict_device.extension.charge(FILL_S)
        memory.zero_()

    return DeviceTimer(strict_device.StrictAccelerator(DEVICE), fill)


@pytest.mark.parametrize(("device_s", "launch_s"), [(0.02, 0.0), (0.001, 0.02)])
def test_the_device_and_the_host_are_timed_apart(device_s, launch_s):
    operator, value = Operator(device_s, launch_s), torch.zeros(4, device=DEVICE)
    measured = timer().measure([lambda: operator(value)], runs=4)
    assert measured[0] == pytest.approx(device_s)
    assert measured[1] >= launch_s


def test_without_work_before_them_launches_count_for_the_device():
    operator, value = Operator(0.001, 0.02), torch.zeros(4, device=DEVICE)
    device_s, _ = DeviceTimer(strict_device.StrictAccelerator(DEVICE), lambda: None).measure(
        [lambda: operator(value)], 4
    )
    assert device_s >= 0.02


def test_a_measured_cost_has_both_times_and_every_run_its_own_operands():
    bench = OpBenchmark(DEVICE, 1e12, lambda func, args, kwargs, out: OpCost(9.0))
    bench.timer = timer()
    operator, meta = Operator(0.001, 0.02), torch.zeros(64, device="meta")
    cost = bench(operator, (meta,), {}, meta)
    assert not bench.estimated
    assert cost.seconds == pytest.approx(0.001) and cost.launch_s >= 0.02
    assert len(set(operator.addresses[-MIN_RUNS:])) == MIN_RUNS


def test_memory_traffic_bounds_the_time_on_the_device():
    bench = OpBenchmark(DEVICE, 1e6, lambda func, args, kwargs, out: OpCost(9.0))
    bench.timer = timer()
    meta = torch.zeros(25_000, device="meta")
    assert bench(Operator(0.0, 0.0), (meta,), {}, meta).seconds == pytest.approx(0.2)  # read and written, by 1 MB/s
