"""Times of operators, launches and updates on a device are measured apart: here they are known."""

import time
from dataclasses import replace

import pytest
import strict_device
import torch

from patrickstar._dry_run.device_timer import DeviceTimer
from patrickstar._dry_run.machine_profile import _page_lock_rate, _update_rate
from patrickstar._dry_run.op_benchmark import MIN_RUNS, OpBenchmark
from patrickstar._dry_run.op_tracer import OpCost
from patrickstar._kernels.dispatch import Kernels
from patrickstar._perf_model.workload import UPDATE_BYTES
from patrickstar._step import streamed_update
from patrickstar._tiers.hardware import Hardware

DEVICE = torch.device("strict", 0)
FILL_S = 2.0
"""Longer than the launches of all runs, 80 ms, also on a busy machine: the host stays ahead."""


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


def timer(fill_s: float = FILL_S) -> DeviceTimer:
    memory = torch.zeros(4, device=DEVICE)

    def fill() -> None:
        strict_device.extension.charge(fill_s)
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
    alone = DeviceTimer(strict_device.StrictAccelerator(DEVICE), lambda: None)
    device_s, _ = alone.measure([lambda: operator(value)], runs=4)
    assert device_s >= 0.02


def test_runs_for_which_the_allocator_freed_its_cache_are_repeated():
    accelerator, freed = strict_device.StrictAccelerator(DEVICE), []
    stats = accelerator.allocator_stats
    accelerator.allocator_stats = lambda: replace(stats(), retries=len(freed))
    value = torch.zeros(4, device=DEVICE)

    def operator() -> None:
        strict_device.extension.charge(0.001 if freed else 0.5)
        value.add_(1)
        if not freed:
            freed.append(True)

    timer_of_runs = timer(0.5)  # its launches take no time
    timer_of_runs.accelerator = accelerator
    assert timer_of_runs.measure([operator], runs=2)[0] == pytest.approx(0.001)


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


# The probe of this machine times updates as the engine runs them: in pieces, with copies in both directions


NUMEL = 1 << 16


@pytest.mark.parametrize("slow", ["up", "down"])
def test_an_update_is_no_faster_than_its_copies(slow):
    rates = {"up": 1e9, "down": 1e9, slow: 1e6}
    strict_device.configure(timed=strict_device.Rates(**rates))
    rate = _update_rate(Hardware(torch.device("strict", 0)), NUMEL)
    assert 0 < rate / UPDATE_BYTES * 2 <= 1e6, "two bytes per parameter pass the link"


def test_an_update_reaches_the_kernel_in_the_pieces_of_a_step(monkeypatch):
    strict_device.configure()
    lengths = []
    start = Kernels.start

    def noted(self, spans, scales):
        lengths.extend(span.numel for span in spans)
        return start(self, spans, scales)

    monkeypatch.setattr(Kernels, "start", noted)
    monkeypatch.setattr(streamed_update, "PIECE_NUMEL", NUMEL // 4)
    _update_rate(Hardware(torch.device("strict", 0)), NUMEL)
    assert set(lengths) == {NUMEL // 4}


def test_the_rate_of_page_locking_is_that_of_memory_that_is_locked(monkeypatch):
    """And it is unknown where nothing can be locked. No memory stays locked."""
    hardware, made = Hardware(torch.device("strict", 0)), []
    new_arena = hardware.host_arena
    monkeypatch.setattr(hardware, "host_arena", lambda nbytes: made.append(new_arena(nbytes)) or made[-1])
    rate = _page_lock_rate(hardware)
    assert rate is not None and rate > 0 and not made[-1].page_locked
    monkeypatch.setattr(type(hardware.accelerator), "page_lock", lambda *_: None)
    assert _page_lock_rate(hardware) is None
