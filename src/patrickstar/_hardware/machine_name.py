"""Name of this machine, for results and logs."""

import os
import platform
from pathlib import Path

import torch

INSTRUCTION_SETS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}
"""Instruction sets by the kernel's name of each, the fastest first: generations of a processor share a model name."""


def machine_name(device: torch.device) -> str:
    """Return the processor, the number of usable cores and its instruction set; for an accelerator, its name first."""
    cores = usable_cores()
    cpu = ", ".join([_cpu_model(), f"{cores} {'core' if cores == 1 else 'cores'}", *_instruction_set()])
    return cpu if device.type == "cpu" else f"{torch.get_device_module(device).get_device_name(device)}, {cpu}"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    # Not on Linux, or the table has no processor name: what Python knows.
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown processor"


def _instruction_set() -> list[str]:
    """Return the name of the fastest instruction set; nothing where the system does not tell."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()  # x86, Arm
    return [name for flag, name in INSTRUCTION_SETS.items() if flag in flags][:1]


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor in Linux's table; empty without one."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines() if table.is_file() else []
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == field), ""
    )
