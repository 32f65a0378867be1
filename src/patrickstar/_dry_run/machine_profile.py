"""This machine as estimates see it: its memory, and rates that a short probe measures."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from patrickstar._dry_run.disk_benchmark import measure
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._layout.schema import PARAM16
from patrickstar._memory.copy_streams import CopyStreams
from patrickstar._memory.device_tier import DeviceTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_tier import HostTier
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar._perf_model.workload import UPDATE_BYTES

ROUNDS = 5
CHUNK_BYTES = 1 << 26
COPIED_BYTES = 1 << 29
UPDATED = 64_000_000
"""What is copied, and the parameters that are updated: more than caches hold."""
SMALLEST_MATRIX, LARGEST_MATRIX = 256, 8192
"""Rows and columns of the matrices that are multiplied: twice as many until a product takes `LEAST_PRODUCT_S`."""
LEAST_PRODUCT_S = 0.005
"""Many times what launching a product and waiting for it takes. Processors without bf16 take seconds for large ones."""


def profile_machine(device: torch.device, directory: str | Path | None = None) -> Machine:
    """Measure this machine: about three seconds, and one more for the disk under `directory`.

    Raises DiskError if that can't be used.
    """
    hardware = Hardware(device)
    hardware.start()
    disk = None
    if directory is not None:
        rates = measure(directory)
        disk = DiskDrive(capacity=hardware.free_disk_bytes(Path(directory)), read=rates.read, write=rates.write)
    up, down = _copy_rates(hardware)
    gpu = None
    if device.type == "cuda":
        gpu = Gpu(
            count=1,
            memory=hardware.device_bytes(),
            matmul_tflops=_matmul_tflops(device),
            memory_bandwidth=_copy_bandwidth(device),
        )
    cpu = torch.device("cpu")
    return Machine(
        name="here",
        source="measured by a short probe",
        gpu=gpu,
        host=Host(
            memory=hardware.host_bytes(),
            memory_bandwidth=_copy_bandwidth(cpu),
            update_rate=_update_rate(),
            cores=os.cpu_count() or 1,
            matmul_tflops=_matmul_tflops(cpu),
        ),
        links=Links(h2d=up, d2h=down),
        disk=disk,
    )


def elapsed_s(act: Callable[[], object], device: torch.device) -> float:
    """What an act takes until the device has done it."""
    start = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """The middle one of some runs, after one that does not count."""
    return median([elapsed_s(act, device) for _ in range(ROUNDS + 1)][1:])


def _matmul_tflops(device: torch.device) -> float:
    size = SMALLEST_MATRIX
    while True:
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        took = _seconds(partial(torch.mm, a, b), device)
        if took >= LEAST_PRODUCT_S or size >= LARGEST_MATRIX:
            return 2 * size**3 / took / 1e12
        size *= 2


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device)


def benchmark_span(numel: int) -> Span:
    """So many parameters on the host, for Adam in mixed precision to update."""
    param = torch.zeros(numel, dtype=torch.bfloat16, device="cpu")
    master, first, second = (torch.zeros(numel, device="cpu") for _ in range(3))
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=1)
    return Span(param, Gradient(param), master, (first, second), rule)


def _update_rate() -> float:
    span = benchmark_span(UPDATED)
    kernels = Kernels.best(torch.device("cpu"))
    return UPDATE_BYTES * UPDATED / _seconds(lambda: kernels.update([span], ()), torch.device("cpu"))


def _copy_rates(hardware: Hardware) -> tuple[float, float]:
    """Chunks that come to the device's memory, and go, by the very path that chunks take."""
    compute = DeviceTier(hardware, CHUNK_BYTES, poison=False)
    host, copies = HostTier(CHUNK_BYTES, CHUNK_BYTES, hardware.host_arena, poison=False), CopyStreams(hardware.device)
    chunk = compute.new(PARAM16, 0, CHUNK_BYTES // 2, "bfloat16")
    host.allocate(chunk).zero_()

    def come() -> None:
        compute.allocate(chunk)
        copies.up_now(chunk)

    ups, downs = [], []
    for _ in range(ROUNDS + 1):
        ups.append(elapsed_s(come, hardware.device))
        downs.append(elapsed_s(lambda: copies.down_now(chunk), hardware.device))
        compute.free(chunk)
    host.free(chunk)
    chunk.memory.close()
    copies.close()
    host.close()
    return CHUNK_BYTES / median(ups[1:]), CHUNK_BYTES / median(downs[1:])
