"""A spec of this machine with fixed rates, in place of the measured one: dry runs then take no time to measure it."""

import os
from pathlib import Path

import pytest
import torch

from patrickstar._perf_model.machine_spec import DiskDrive, Host, Links, Machine
from patrickstar._tiers.hardware import Hardware

MEASURED = (
    "patrickstar._dry_run.machine_profile.profile_machine",
    "patrickstar._dry_run.measured_machine.profile_machine",
)
"""Names by which dry runs and plans measure this machine."""


def profile(device: torch.device, directory: str | Path | None = None) -> Machine:
    """Return a machine of this size with the rates of an ordinary computer."""
    hardware = Hardware(device)
    disk = None
    if directory is not None:
        disk = DiskDrive(capacity=hardware.free_disk_bytes(Path(directory)), read=2e9, write=1e9)
    cores = os.cpu_count() or 1
    host = Host(memory=hardware.host_bytes(), memory_bandwidth=2e10, update_rate=1e10, cores=cores, matmul_tflops=0.1)
    return Machine(name="here", source="fixed", host=host, links=Links(h2d=5e9, d2h=5e9), disk=disk)


@pytest.fixture(autouse=True)
def same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no dry run measure this machine."""
    for name in MEASURED:
        monkeypatch.setattr(name, profile)
