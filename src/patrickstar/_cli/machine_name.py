"""The name of the machine, for figures that mean nothing without it."""

import os
import platform
from pathlib import Path

import torch


def machine_name(device: torch.device) -> str:
    """The processor and how many of its cores this process may use; for a CUDA device the GPU before them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = f"{_cpu_model()}, {cores} {'core' if cores == 1 else 'cores'}"
    return f"{torch.cuda.get_device_name(device)}, {cpu}" if device.type == "cuda" else cpu


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    # Elsewhere than on Linux, or on a processor that the table gives no name.
    return platform.processor() or platform.machine() or "unknown processor"
