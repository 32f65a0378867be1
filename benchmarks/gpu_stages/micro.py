"""Microbenchmarks: copies, page-locking of host memory, kernel launches, bookkeeping of the engine."""

import argparse
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import patrickstar as ps
from gpu_stages.record import Record
from gpu_stages.timing import once, seconds
from patrickstar._dry_run.machine_profile import benchmark_span
from patrickstar._engine.engine import Engine
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.cuda_accelerator import CudaAccelerator
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import HostArena
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.transfer import Transfer
from patrickstar.errors import BudgetError
from patrickstar.testing import NoMeter

MIB, GIB = 1 << 20, 1 << 30
PCIE_GB_PER_S = 63.0
"""PCIe 5.0 x16, one direction, without packet headers."""


def run(record: Record, options: argparse.Namespace) -> None:
    """Run all measurements."""
    device = torch.device(options.device)
    bare_copies(record, device, options.small)
    engine_copies(record, device, options.small)
    bookkeeping(record, device, options.small)
    updates(record, device, options.small)
    registration(record, device, options.small)


def bare_copies(record: Record, device: torch.device, small: bool) -> None:
    """Measure PyTorch's copies between host and device, with page-locked and pageable memory."""
    cuda = device.type == "cuda"
    for nbytes in (MIB // 4,) if small else (4 * MIB, 8 * MIB, 64 * MIB):
        on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for kind, page_locked, predicted in (("page-locked", cuda, 52.0), ("pageable", False, 8.0)):
            on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=page_locked) for _ in range(2)]
            pairs = {"host to device": (on_device[0], on_host[0]), "device to host": (on_host[1], on_device[1])}
            for name, (target, source) in pairs.items():
                copy = partial(target.copy_, source, non_blocking=True)
                rate = nbytes / seconds(copy, device, inner=20) / 1e9
                record.figure(
                    f"copy {name}, {kind}, {nbytes / MIB:g} MiB",
                    rate,
                    "GB/s",
                    predicted=predicted,
                    limit=PCIE_GB_PER_S,
                )
        if cuda:
            _both_ways(record, device, nbytes)


def _both_ways(record: Record, device: torch.device, nbytes: int) -> None:
    on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy_both_ways() -> None:
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            on_host[1].copy_(on_device[1], non_blocking=True)

    rate = 2 * nbytes / seconds(copy_both_ways, device, inner=20) / 1e9
    record.figure(
        f"concurrent copies in both directions, page-locked, {nbytes / MIB:g} MiB",
        rate,
        "GB/s",
        predicted=90,
        limit=2 * PCIE_GB_PER_S,
    )


def engine_copies(record: Record, device: torch.device, small: bool) -> None:
    """Measure the engine's copies of a chunk, and the fraction hidden by a matrix product."""
    nbytes = MIB if small else 64 * MIB
    hardware = Hardware(device)
    host, copies = HostTier(2 * nbytes, 2 * nbytes, hardware.host_arena, poison=False), hardware.copies()
    up, down = (Chunk("param16", index, nbytes // 2, "bfloat16", device) for index in range(2))
    for chunk in (up, down):
        host.allocate(chunk).zero_()
        chunk.allocate_device()
    size = 128 if small else 8192
    matrix = torch.randn(size, size, device=device).bfloat16()
    peak_tflops = 2 * size**3 / seconds(lambda: torch.mm(matrix, matrix), device, inner=4) / 1e12
    record.figure(f"matrix product of {size}, bf16", peak_tflops, "TFLOP/s", predicted=700, limit=989)

    def compute() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def copy_both(during=None) -> None:
        transfers: list[Transfer] = [copies.up(up), copies.down(down)]
        if during is not None:
            during()
        for transfer in transfers:
            transfer.wait()

    alone = {
        "H2D": seconds(lambda: copies.up(up).wait(), device),
        "D2H": seconds(lambda: copies.down(down).wait(), device),
    }
    for name, duration_s in alone.items():
        record.figure(
            f"engine: chunk copy {name}, {nbytes / MIB:g} MiB",
            nbytes / duration_s / 1e9,
            "GB/s",
            predicted=50,
            limit=PCIE_GB_PER_S,
        )
    copy_s, compute_s, both_s = (
        seconds(copy_both, device),
        seconds(compute, device),
        seconds(lambda: copy_both(compute), device),
    )
    hidden = (compute_s + copy_s - both_s) / min(copy_s, compute_s)
    record.figure("copies hidden by a matrix product", hidden, "of 1", predicted=0.95, limit=1.0)
    for chunk in (up, down):
        chunk.free_device(poison=False)
        host.free(chunk)
        chunk.memory.close()
    copies.close()
    host.close()


def bookkeeping(record: Record, device: torch.device, small: bool) -> None:
    """Measure the engine's Python overhead per parameter, and one read of its memory meter."""
    meter = Hardware(device).meter()
    record.figure(
        "one read of non-model data", 1e6 * seconds(lambda: meter.now(0), device, inner=50), "us", predicted=10
    )
    if device.type == "cuda":
        duration_s = seconds(lambda: torch.cuda.memory_allocated(device), device, inner=50)
        record.figure("torch.cuda.memory_allocated", 1e6 * duration_s, "us", predicted=60)
    layers, width = (4, 32) if small else (64, 64)
    x = torch.randn(8, width, device=device).bfloat16()

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    torch.manual_seed(0)
    plain = build().to(device, torch.bfloat16)
    steps: dict[str, object] = {"plain PyTorch": lambda: plain(x).float().pow(2).mean().backward()}
    engines = []
    all_bytes = 16 * layers * (width + 1) * width + 32 * MIB
    for name, budget, chunk_bytes in (
        ("engine, everything on the device", all_bytes, "auto"),
        ("engine, every layer transferred", MIB, 2 * width * (width + 2)),
    ):
        config = ps.Config(device=str(device), device_memory=budget, chunk_size=chunk_bytes)
        # NoMeter: workspaces alone exceed the second budget, and are not measured here.
        engine = Engine(build, config, meter=NoMeter())
        engines.append(engine)

        def step(engine: Engine = engine) -> None:
            engine.backward(engine(x).float().pow(2).mean())
            engine.optimizer.zero_grad()

        for _ in range(2):  # the two traced iterations
            step()
            engine.optimizer.step()
        steps[name] = step
    predicted = {"plain PyTorch": 30, "engine, everything on the device": 60, "engine, every layer transferred": 250}
    for name, action in steps.items():
        duration_us = 1e6 * seconds(action, device, rounds=5, inner=2) / layers
        record.figure(f"forward and backward of a small linear, {name}", duration_us, "us", predicted=predicted[name])
    for engine in engines:
        engine.close()
    weight = torch.randn(width, width, device=device).bfloat16()
    duration_us = 1e6 * seconds(lambda: F.linear(x, weight), device, inner=100)
    record.figure("F.linear alone, without grad", duration_us, "us", predicted=8)


def updates(record: Record, device: torch.device, small: bool) -> None:
    """Measure Adam on host and device: launch time of a small parameter, bandwidth of a large one."""
    host = Kernels.best(torch.device("cpu"))
    numel = 100_000 if small else 64_000_000
    span = benchmark_span(numel)
    rate = 28 * numel / seconds(lambda: host.update([span], ()), torch.device("cpu")) / 1e9
    target, source = torch.zeros(numel), torch.zeros(numel)
    copy = 8 * numel / seconds(lambda: target.copy_(source), torch.device("cpu")) / 1e9
    record.figure(
        "update on the host, 28 bytes per parameter", rate, "GB/s", predicted=100, limit=copy, note="limit: copies"
    )
    kernels = Kernels.best(device)
    for label, numel in (
        ("launch of an update of 4096 elements", 4096),
        ("update on the device", 1 << 20 if small else 1 << 28),
    ):
        param, master, *moments = (
            torch.zeros(numel, dtype=dtype, device=device) for dtype in (torch.bfloat16, *3 * (torch.float32,))
        )
        rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=1)
        span = Span(param, Gradient(param), master, tuple(moments), rule)
        duration_s = seconds(lambda span=span: kernels.update([span], ()), device, inner=20 if numel == 4096 else 1)
        if numel == 4096:
            record.figure(label, 1e6 * duration_s, "us", predicted=40)
        else:
            record.figure(label, 28 * numel / duration_s / 1e9, "GB/s", predicted=2600, limit=3350)


def registration(record: Record, device: torch.device, small: bool) -> None:
    """Measure page-locking of host memory: alone, with and without touching it first, and the engine's host arena."""
    import psutil

    available = psutil.virtual_memory().available
    sizes = (
        (16 * MIB,) if small else tuple(size for size in (GIB, 8 * GIB, 32 * GIB, 96 * GIB) if size < 0.8 * available)
    )
    for nbytes in sizes:
        name = f"{nbytes / GIB:g} GiB"
        if device.type == "cuda":
            for touched in (False, True):
                _register(record, name, nbytes, touched)
        arenas: list[HostArena] = []
        try:
            duration_s = once(
                lambda arenas=arenas, nbytes=nbytes: arenas.append(Hardware(device).host_arena(nbytes)), device
            )
        except BudgetError as error:
            record.figure(f"engine: host arena of {name}", None, "s", note=str(error)[:300])
            continue
        record.figure(f"engine: host arena of {name}", duration_s, "s", predicted=0.1 * nbytes / GIB)
        arenas.pop().close()


def _register(record: Record, name: str, nbytes: int, touched: bool) -> None:
    memory = torch.empty(nbytes, dtype=torch.uint8)
    device = torch.device("cpu")
    if touched:
        duration_s = once(memory.zero_, device)
        record.figure(f"first touch of {name}", duration_s, "s", predicted=0.05 * nbytes / GIB)
    label = f"cudaHostRegister of {name}, {'touched before' if touched else 'not touched before'}"
    cuda, locked = CudaAccelerator(torch.device("cuda")), []
    try:
        duration_s = once(lambda: locked.extend(cuda.page_lock(memory.data_ptr(), nbytes)), device)
    except BudgetError as error:
        record.figure(label, None, "s", note=str(error)[:300])
        return
    record.figure(label, duration_s, "s", predicted=(0.03 if touched else 0.1) * nbytes / GIB)
    cuda.page_unlock(locked)
