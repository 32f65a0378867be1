"""The command ``patrickstar doctor``: capabilities of the machine and the installation, with advice."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

import patrickstar
from patrickstar._cli.console import print_row
from patrickstar._dry_run.machine_profile import ROUNDS, benchmark_span, elapsed_s, measure_disk, profile_machine
from patrickstar._dry_run.precision_choice import SLOW_RATIO
from patrickstar._dry_run.product_rates import TYPICAL_WIDTH, product_rate
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.compute_device import UNSUPPORTED
from patrickstar._hardware.drive_flush import flush_seconds, write_cache
from patrickstar._hardware.machine_name import machine_name, usable_cores
from patrickstar._hardware.memory_meter import host_meter, library_resident_bytes
from patrickstar._hardware.ram import measure_ram
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.dispatch import Backend
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.packed_page import CODEC_RATE
from patrickstar._perf_model.cpu_precision import faster_on_cpu, gflops
from patrickstar._perf_model.machine_spec import DiskDrive, write_machine
from patrickstar._perf_model.margins import COLLECTIVE_BYTES, OUTSIDE_BYTES, device_budget
from patrickstar._perf_model.workload import STATE_BYTES, UPDATE_BYTES
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.page_codec import PageCodec
from patrickstar.config import Config

TRIAL_NUMEL = 16_000_000
"""Parameters of the trial update: 224 MB, more than caches hold, and fast to update."""


@dataclass(frozen=True)
class Finding:
    """Line of the report, with advice if something can be improved."""

    name: str
    text: str
    advice: str | None = None


def examine(trial_numel: int = TRIAL_NUMEL, disk: Path | None = None, machine: Path | None = None) -> list[Finding]:
    """Examine everything that training depends on.

    Args:
        trial_numel: Parameters of the trial update.
        disk: Directory of a disk tier, to be measured too.
        machine: File for sizes and rates, to be measured too.

    Raises:
        ConfigError: The file cannot be written.
        DiskError: The directory cannot be used.
    """
    kernel, backend = _kernel()
    return [
        Finding("patrickstar", f"{patrickstar.__version__}, PyTorch {torch.__version__}"),
        Finding("processor", f"{machine_name(torch.device('cpu'))}, {torch.get_num_threads()} threads in use"),
        _memory(),
        *_gpus(),
        Finding("non-model data", f"measured by: {host_meter().source}"),
        Finding("libraries", f"{format_size(library_resident_bytes(0))} of this process's memory, beside all budgets"),
        kernel,
        _triton(),
        *_speed(backend, trial_numel),
        _products(),
        *(_disk(disk, backend) if disk is not None else []),
        *(_machine(machine, disk) if machine is not None else []),
    ]


def _disk(directory: Path, backend: Backend) -> list[Finding]:
    drive = measure_disk(directory)
    state_bytes = 10**9 * STATE_BYTES
    return [
        Finding(
            "disk",
            f"{directory}: {format_size(drive.capacity)} free, reads {drive.read / 1e9:.2f} GB/s, writes "
            f"{drive.write / 1e9:.2f} GB/s at the same time, with checksums, until a cache is full; per step, the "
            f"optimizer states of 10^9 parameters take {state_bytes / drive.read:.0f} s to read and "
            f"{state_bytes / drive.write:.0f} s to write",
        ),
        *([_packed(directory, drive, backend.codec)] if isinstance(backend, CppBackend) else []),
        _flush(directory),
    ]


def _flush(directory: Path) -> Finding:
    """Say what a power cut leaves: a checkpoint is complete once the drive has flushed it."""
    cache = write_cache(directory)
    meaning = {
        "write back": "the kernel flushes the drive's cache, so a checkpoint survives a power cut if the drive obeys",
        "write through": "the kernel takes the drive's writes for permanent and flushes nothing: right if it has no "
        "volatile cache, or one with protection against power loss",
        None: "the kernel does not say whether the drive has a cache",
    }
    said = meaning.get(cache, f"the kernel calls its cache {cache!r}")
    seconds = flush_seconds(directory)
    return Finding("flush", f"takes {1000 * seconds:.2f} ms after a write of 4 KiB; {said}")


def _packed(directory: Path, drive: DiskDrive, codec: PageCodec) -> Finding:
    """Compare the drive with packed pages with the same without."""
    packed, cores = measure_disk(directory, codec=codec), usable_cores()
    state_bytes = 10**9 * STATE_BYTES
    seconds = [state_bytes / min(each.read, each.write) for each in (drive, packed)]
    return Finding(
        "packed pages",
        f"reads {packed.read / 1e9:.2f} GB/s, writes {packed.write / 1e9:.2f} GB/s of states: with --packed the same "
        f"states take {seconds[1]:.0f} s instead of {seconds[0]:.0f}, and {cores} cores for "
        f"{2 * state_bytes / CODEC_RATE / cores:.0f} s, which a CPU that trains lacks",
    )


def _machine(path: Path, disk: Path | None) -> list[Finding]:
    """Measure this machine, and write it to a file."""
    device = Config().find_device()
    found = profile_machine(device, disk)
    name = f"{machine_name(device)} with {found.host.memory / 1e9:.1f} GB of RAM for training"
    write_machine(found.model_copy(update={"name": name}), path)
    without = "" if disk is not None else "; add --disk DIRECTORY for a drive"
    return [Finding("machine file", f"{path}: `patrickstar plan --machine {path}` plans for this machine{without}")]


def print_findings(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        print_row(console, finding.name, finding.text, finding.advice)


def _gpus() -> list[Finding]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return [Finding("gpu", "none that PyTorch can use; training runs on the CPU, under a budget in RAM")]
    if found.type in UNSUPPORTED:
        return [Finding("gpu", f"{found.type} is not supported, since {UNSUPPORTED[found.type]}")]
    hardware = (Hardware(torch.device(found.type, index)) for index in range(torch.accelerator.device_count()))
    return [_gpu(each.accelerator, each.free_device_bytes()) for each in hardware if each.accelerator is not None]


def _gpu(accelerator: TorchDevice, free_bytes: int) -> Finding:
    budget = device_budget(free_bytes)
    return Finding(
        f"gpu {accelerator.index}",
        f"{accelerator.name}, {format_size(free_bytes)} free; device_memory is "
        f"{format_size(budget)} ({budget} bytes) unless you set it: all but {format_size(OUTSIDE_BYTES)} of the free "
        f"memory, but at least half, because kernels and handles are loaded later "
        f"({format_size(COLLECTIVE_BYTES)} less with several processes). Of it "
        f"{format_size(accelerator.fragmentation.unplanned_bytes(budget))} are left to fragmentation",
    )


def _memory() -> Finding:
    ram = measure_ram()
    return Finding(
        "memory",
        f"{format_size(ram.available_bytes)} available now; budgets that you leave open take "
        f"{format_size(ram.default_bytes())} of it, on a CPU both together",
    )


def _kernel() -> tuple[Finding, Backend]:
    try:
        backend = CppBackend.load()
    except Unavailable as error:
        text = "not available. Updates on the host use PyTorch's operators, with bit-identical results"
        return Finding("C++ kernel", text, str(error)), EagerBackend()
    return Finding("C++ kernel", f"built for {', '.join(backend.variants())}; the first one is used"), backend


def _triton() -> Finding:
    if not torch.cuda.is_available():
        return Finding("Triton kernel", "not needed without a GPU")
    try:
        TritonBackend.load(torch.device("cuda"))
    except Unavailable as error:
        text = "not available. Updates on the GPU use PyTorch's operators, with bit-identical results"
        return Finding("Triton kernel", text, str(error))
    return Finding("Triton kernel", "available, tested on the first GPU")


def _products() -> Finding:
    """Compare the precisions by the products of a linear layer on one core."""
    names = ("fp32", "bf16", "fp16")
    rates = {name: product_rate(name, TYPICAL_WIDTH, TYPICAL_WIDTH) for name in names}
    text = ", ".join(f"{name} at {gflops(rates[name])}" for name in names)
    faster = faster_on_cpu(rates["bf16"], rates["fp32"])
    slow = [name for name in names if rates["fp32"] >= SLOW_RATIO * rates[name]]
    advice = f"train in {faster} on this CPU, as precision='auto' does for a model of these widths"
    if slow:
        advice += f"; {' and '.join(slow)} would take {SLOW_RATIO} times as long as fp32, or longer"
    return Finding("products", f"a core computes a layer of {TYPICAL_WIDTH:,} to {TYPICAL_WIDTH:,} in {text}", advice)


def _speed(backend: Backend, numel: int) -> list[Finding]:
    """Time an update and a copy on the host, and report which share of the memory bandwidth the update reaches."""
    cpu = torch.device("cpu")
    span, target = benchmark_span(numel), torch.zeros(numel, device=cpu)
    copy_s, update_s = [], []
    for _ in range(ROUNDS):
        copy_s.append(elapsed_s(lambda: target.copy_(span.master), cpu))
        update_s.append(elapsed_s(lambda: backend.update([span], ()), cpu))
    copy, update = 8 * numel / median(copy_s) / 1e9, UPDATE_BYTES * numel / median(update_s) / 1e9
    return [
        Finding("memory speed", f"{copy:.1f} GB/s for a copy (bytes read and written)"),
        Finding(
            "update speed",
            f"{update:.1f} GB/s, {update / copy:.2f} of the copy speed, by {backend.name}: "
            f"{update / UPDATE_BYTES:.2f} billion parameters per second with Adam, {UPDATE_BYTES} bytes each",
        ),
    ]
