"""Compare published figures of Angel-PTM and ZeRO-Offload with estimates and dry runs on their machines.

python benchmarks/papers.py
Nothing is fitted and nothing is measured: machine specs give the rates. The dry runs take about eight minutes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from dry_runs import builder_of, dry_run, without_disk
from report import filled, publish, read, shown
from torch import nn
from transformers import T5ForConditionalGeneration

from patrickstar._models.presets import PRESETS, T5_PRESETS
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import best_estimate, estimate, fits
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import Workload, gpt_workload, t5_workload
from patrickstar.errors import BudgetError

SERVER, DGX2 = "8xA100-40GB-11TB", "DGX-2"
PEAK_TFLOPS = 312
"""Data sheet of the A100, in 16 bits."""
PCIE = 32e9
"""Bytes per second that Angel-PTM's paper gives; the machine spec has the measured rate."""
LENGTHS = (512, 1024)
"""Tokens per sequence; the paper does not give the number."""
MOST_LAYERS = 4096
"""More layers than any of these machines holds."""
ONE_GPU = Mesh()
SMALL_BATCH = 8
"""Largest batch of the rows of `delayed-cpu.md` that are compared with the speedups of delayed updates."""


@dataclass(frozen=True)
class Throughput:
    """Published samples per second of a server, with samples per GPU and step."""

    preset: str
    batch: int
    samples_per_s: float


# Angel-PTM (arXiv 2303.02868).
THROUGHPUTS = (
    Throughput("gpt-28b", 38, 10.99),
    Throughput("gpt-55b", 10, 3.34),
    Throughput("t5-27b", 50, 14.38),
    Throughput("t5-58b", 4, 3.37),
)


@dataclass(frozen=True)
class Largest:
    """Published largest models of one server, in billions of parameters, by system."""

    machine: str
    gpus: int
    shape: Gpt | T5
    published: dict[str, float]


# ZeRO-Offload's two figures are in its abstract, for GPTs whose width it does not name.
LARGEST = (
    Largest(SERVER, 8, replace(PRESETS["gpt-28b"], sequence=LENGTHS[0]), {"DeepSpeed": 28, "Angel-PTM": 55}),
    Largest(SERVER, 8, replace(T5_PRESETS["t5-27b"], sequence=LENGTHS[0]), {"DeepSpeed": 27, "Angel-PTM": 58}),
    Largest(DGX2, 1, PRESETS["gpt-10b"], {"ZeRO-Offload": 13}),
    Largest(DGX2, 16, replace(PRESETS["gpt-28b"], sequence=1024), {"ZeRO-Offload": 70}),
)
TFLOPS_OF_10B = 40
"""TFLOPS of ZeRO-Offload with 10B on one V100 (its abstract)."""


def workload(shape: Gpt | T5, batch: int, checkpointing: bool = True, mesh: Mesh = ONE_GPU) -> Workload:
    if isinstance(shape, T5):
        return t5_workload(shape, batch, checkpointing, mesh)
    return gpt_workload(shape, batch, checkpointing, mesh)


def all_gpus_as_one(machine: Machine) -> Machine:
    """Return a machine on which one process transfers and updates as fast as all GPUs together, but computes as one.

    A dry run simulates one process. Here it manages the whole model: the host's memory and rates are those of all
    processes, and a chunk crosses the links of all GPUs, in equal parts, and then the connections between GPUs.
    """
    gpu, links = machine.gpu, machine.links
    assert gpu is not None and links is not None and links.gpu_gpu is not None
    between_s = (gpu.count - 1) / gpu.count / links.gpu_gpu
    h2d, d2h = (1 / (1 / (gpu.count * rate) + between_s) for rate in machine.transfer_rates(gpu.count))
    return machine.model_copy(
        update={
            "gpu": gpu.model_copy(update={"count": 1}),
            "host": machine.host.model_copy(update={"sockets": 1}),
            "links": links.model_copy(update={"h2d": h2d, "d2h": d2h, "shared_by": 1}),
        }
    )


def build(preset: str) -> Callable[[], nn.Module]:
    if preset in PRESETS:
        return builder_of(preset)

    def build_t5() -> nn.Module:
        config = T5_PRESETS[preset].config()
        config.use_cache = False
        model = T5ForConditionalGeneration(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return build_t5


def dry_run_s(preset: str, batch: int, sequence: int, machine: Machine) -> float:
    """Return the seconds of a dry-run step, with gradients clipped."""
    return dry_run(build(preset), machine, batch, sequence).seconds


def error(ours: float, published: float) -> str:
    return f"{100 * (ours / published - 1):+.0f} %"


def largest_billions(case: Largest, machine: Machine) -> float:
    """Return the parameters, in billions, of the deepest model of a shape that fits with one sequence per GPU."""

    def too_deep(layers: int) -> bool:
        return not fits(workload(replace(case.shape, layers=layers), 1), machine, Mesh(gpus=case.gpus))

    layers = bisect_left(range(1, MOST_LAYERS), True, key=too_deep)
    assert 0 < layers < MOST_LAYERS - 1
    return replace(case.shape, layers=layers).numel / 1e9


def largest_rows() -> Iterator[list[str]]:
    for case in LARGEST:
        machine = find_machine(case.machine)
        family = "T5" if isinstance(case.shape, T5) else "GPT"
        gpus = f"{case.machine}, {case.gpus} GPU{'s' if case.gpus > 1 else ''}"
        ours = largest_billions(case, without_disk(case.machine))
        for system, published in case.published.items():
            figure = f"largest {family}, hidden {case.shape.hidden}, {system}"
            cells = [figure, gpus, f"1 x {case.shape.sequence}", f"{published:g}B", ""]
            yield [*cells, f"{ours:.0f}B", error(ours, published), "", ""]
        if machine.disk is not None:
            ours = largest_billions(case, machine)
            cells[1] = f"{gpus}, with disk"
            yield [*cells, f"{ours:.0f}B", error(ours, published), "", ""]


def throughput_row(case: Throughput, sequence: int) -> list[str]:
    machine = without_disk(SERVER)
    assert machine.gpu is not None
    gpus = machine.gpu.count
    work = workload(replace((PRESETS | T5_PRESETS)[case.preset], sequence=sequence), case.batch)
    needed = work.operations * case.samples_per_s / (case.batch * gpus) / 1e12
    cells = [
        f"samples/s, {case.preset}, Angel-PTM",
        SERVER,
        f"{case.batch} x {sequence}",
        f"{case.samples_per_s:g}",
        f"{needed:.0f}{' (impossible)' if needed > PEAK_TFLOPS else ''}",
    ]
    try:
        estimated = case.batch * gpus / estimate(work, machine, Mesh(gpus=gpus)).seconds
        simulated = case.batch * gpus / dry_run_s(case.preset, case.batch, sequence, all_gpus_as_one(machine))
    except BudgetError:
        return [*cells, "does not fit", "", "", ""]
    ours = (estimated, simulated)
    return cells + [text for rate in ours for text in (f"{rate:.2f}", error(rate, case.samples_per_s))]


def v100_row() -> list[str]:
    """Compare the throughput of 10B on one V100 at the batch that the estimate prefers."""
    machine, preset = find_machine(DGX2), "gpt-10b"
    best = best_estimate(partial(workload, PRESETS[preset]), machine, Mesh(), checkpointing=(True,))
    batch, sequence = best.workload.batch, PRESETS[preset].sequence
    simulated = best.workload.operations / dry_run_s(preset, batch, sequence, machine) / 1e12
    cells = [f"TFLOPS, {preset}, ZeRO-Offload", f"{DGX2}, 1 GPU", f"{batch} x {sequence}", f"{TFLOPS_OF_10B}", ""]
    return cells + [text for rate in (best.tflops, simulated) for text in (f"{rate:.1f}", error(rate, TFLOPS_OF_10B))]


def delayed_row() -> list[str]:
    """Return the speedups of delayed updates in `delayed-cpu.md`, of models that have an update on the host."""
    speedups = [
        float(row["no overlap / delayed"])
        for row in read("delayed-cpu")[1]
        if int(row["batch"].split()[0]) <= SMALL_BATCH and row["update"] != "0.00 s"
    ]
    low, high, published = min(speedups), max(speedups), (1.12, 1.59)
    return [
        "speedup by delayed updates (DPU), ZeRO-Offload",
        "8xV100-32GB, 1 GPU",
        f"1 to {SMALL_BATCH} x 1024",
        f"{published[0]} to {published[1]}",
        "",
        "",
        "",
        f"{low:.2f} to {high:.2f} ([delayed](delayed-cpu.md))",
        f"{error(low, published[0])}, {error(high, published[1])}",
    ]


def effect_of_pcie() -> float:
    """Return the largest relative change of an estimated throughput if PCIe has the rate of Angel-PTM's paper."""
    machine = without_disk(SERVER)
    assert machine.gpu is not None and machine.links is not None
    nominal = machine.model_copy(update={"links": machine.links.model_copy(update={"h2d": PCIE, "d2h": PCIE})})
    works = [
        workload(replace((PRESETS | T5_PRESETS)[case.preset], sequence=LENGTHS[0]), case.batch) for case in THROUGHPUTS
    ]
    mesh = Mesh(gpus=machine.gpu.count)
    seconds = [[estimate(work, each, mesh).seconds for each in (machine, nominal)] for work in works]
    return max(before / after - 1 for before, after in seconds)


def intro() -> str:
    machine = find_machine(SERVER)
    assert machine.gpu is not None
    sizes = [14 * PRESETS[name].numel / 1e9 for name in ("gpt-28b", "gpt-55b")]
    return filled(
        "papers",
        peak=PEAK_TFLOPS,
        small=sizes[0],
        large=sizes[1],
        total=(machine.host.memory + machine.gpu.count * machine.gpu.memory) / 1e12,
        batch=SMALL_BATCH,
        pcie=100 * effect_of_pcie(),
    ).rstrip()


def main() -> None:
    rows = [*largest_rows(), *shown(throughput_row(*case) for case in product(THROUGHPUTS, LENGTHS))]
    rows += [v100_row(), delayed_row()]
    columns = ["figure", "machine", "batch per GPU", "published", "TFLOPS per GPU"]
    publish("papers", intro(), rows, [*columns, "estimate", "error", "dry run", "error"])


if __name__ == "__main__":
    main()
