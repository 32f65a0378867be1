"""Kernels of a dry run: they take the time of their memory traffic, and compute nothing."""

import pytest
import torch
from simulated_machines import DESKTOP

from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulated_kernels import SimulatedKernels, span_bytes
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.update_rule import Gradient, Span


def test_an_update_on_the_device_takes_the_time_of_its_traffic(monkeypatch):
    monkeypatch.setattr(EagerBackend, "update", lambda *_: pytest.fail("operators of the update ran"))
    hardware = SimulatedHardware(DESKTOP, TensorMeter())
    param = torch.zeros(1 << 20, dtype=torch.bfloat16, device="meta")
    master, *states = (torch.zeros(1 << 20, device="meta") for _ in range(3))
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled=True, step=1)
    span = Span(param, Gradient(param), master, tuple(states), rule)
    SimulatedKernels(hardware).update([span], ())
    hardware.clock.wait_for_device()
    on_device = not hardware.on_host(master)
    assert on_device and hardware.computed_s == pytest.approx(span_bytes(span) / DESKTOP.gpu.memory_bandwidth)
