"""This machine as dry runs know it: its rates, and the costs of operators and of the host, each measured once."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from patrickstar._dry_run.host_costs import measure_host
from patrickstar._dry_run.host_time import HostCosts
from patrickstar._dry_run.machine_profile import profile_machine
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.simulated_kernels import roofline
from patrickstar._perf_model.machine_spec import Machine


@dataclass(frozen=True)
class MeasuredMachine:
    """Measurements of this machine, for any number of dry runs.

    Attributes:
        device: Compute device.
        machine: Rates, as of `profile_machine`.
    """

    device: torch.device
    machine: Machine

    @classmethod
    def of(cls, device: torch.device, directory: str | Path | None = None) -> "MeasuredMachine":
        """Measure the rates of this machine, and of the disk of a directory. Raises DiskError if it cannot be used."""
        return cls(device, profile_machine(device, directory))

    @cached_property
    def operators(self) -> OpBenchmark:
        """Costs of operators, each measured when it is first asked for."""
        bandwidth = (self.machine.gpu or self.machine.host).memory_bandwidth
        return OpBenchmark(self.device, bandwidth, roofline(self.machine))

    @cached_property
    def host(self) -> HostCosts:
        """Costs of the host, measured beside operators that run for the second time."""
        return measure_host(self.operators)
