"""Machine, package versions, `patrickstar doctor`, and memory that CUDA uses outside PyTorch's allocator."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from types import SimpleNamespace

import torch

from gpu_stages.record import Record
from patrickstar._cli.doctor import examine
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._tiers.hardware import Hardware

PACKAGES = (
    *("torch", "triton", "numpy", "psutil", "pydantic", "scipy", "xxhash", "transformers", "accelerate", "safetensors"),
    *("typer", "rich", "pytest", "hypothesis", "deepspeed"),
)


def run(record: Record, options: SimpleNamespace) -> None:
    """Record the machine and package versions."""
    device = torch.device(options.device)
    record.fact("Python", f"{platform.python_version()} on {platform.platform()}")
    record.fact("processors", f"{os.cpu_count()}, {torch.get_num_threads()} threads of PyTorch")
    for name in PACKAGES:
        try:
            record.fact(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            record.fact(name, "not installed")
    record.check("the C++ kernel is installed", CppBackend.find() is not None)
    if device.type == "cuda":
        _gpu(record, device)
    for finding in examine(trial_numel=100_000 if options.small else 16_000_000):
        advice = f" -> {finding.advice}" if finding.advice else ""
        record.fact(f"doctor: {finding.name}", finding.text + advice)


def _gpu(record: Record, device: torch.device) -> None:
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"]
        done = subprocess.run([*query, "--format=csv,noheader"], stdout=subprocess.PIPE, text=True, timeout=60)
        record.fact("nvidia-smi", done.stdout.strip())
    record.fact("CUDA", f"{torch.version.cuda}, capability {torch.cuda.get_device_capability(device)}")
    before, total = torch.cuda.mem_get_info(device)
    record.figure("device memory", total / 2**30, "GiB")
    record.figure("context", (total - before) / 2**20, "MiB", note="before the first allocation, all processes")
    Hardware(device).library_bytes(torch.bfloat16)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info(device)
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    record.figure("workspaces", held / 2**20, "MiB", note="in the allocator, after a linear forward and backward")
    outside = before - after - reserved
    record.figure("libraries", outside / 2**20, "MiB", note="handles and kernels outside the allocator")
