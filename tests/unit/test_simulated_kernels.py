"""Kernels of a dry run: they take the time of their memory traffic, and compute nothing."""

import pytest
from cpp_backend_cases import ADAM
from kernel_cases import Lists
from simulated_machines import DESKTOP

from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulated_kernels import SimulatedKernels, span_bytes
from patrickstar._kernels.eager_backend import EagerBackend


def test_an_update_on_the_device_takes_the_time_of_its_traffic(monkeypatch):
    monkeypatch.setattr(EagerBackend, "update", lambda *_: pytest.fail("operators of the update ran"))
    hardware = SimulatedHardware(DESKTOP, TensorMeter())
    span = Lists.drawn(ADAM, 1 << 20).copy("meta").span()
    SimulatedKernels(hardware).update([span], ())
    hardware.clock.wait_for_device()
    assert not hardware.on_host(span.master)
    assert hardware.computed_s == pytest.approx(span_bytes(span) / DESKTOP.gpu.memory_bandwidth)
