"""Name of this machine, for results and logs."""

import os
import platform
from pathlib import Path

import torch


def machine_name(device: torch.device) -> str:
    """Return the processor and the number of usable cores; for an accelerator, its name first."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = f"{_cpu_model()}, {cores} {'core' if cores == 1 else 'cores'}"
    return cpu if device.type == "cpu" else f"{torch.get_device_module(device).get_device_name(device)}, {cpu}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    # Not on Linux, or the table has no processor name.
    return platform.processor() or platform.machine() or "unknown processor"
