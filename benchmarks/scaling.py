"""Estimate GPT-175B and T5-MoE-1.2T from 8 to 768 GPUs, and compare clusters with published figures.

python benchmarks/scaling.py
Nothing is fitted, and only the duration of planning is measured. Draws docs/scaling.svg, which needs matplotlib.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from papers.estimates import replicated
from report import publish_text, table

from patrickstar._hardware.machine_name import machine_name
from patrickstar._layout.byte_size import format_size
from patrickstar._models.presets import MOE_PRESETS, PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, Network, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import Estimate, best_estimate, estimate
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import shape_workload
from patrickstar.errors import BudgetError

PICTURE = Path(__file__).parents[1] / "docs" / "scaling.svg"
GPUS = (8, 16, 32, 64, 128, 192, 256, 384, 768)
PER_NODE = 8
SERVER = find_machine("8xA100-40GB-11TB")
SELENE = find_machine("DGX-A100-80GB")
WIRE_SHARE = SELENE.network.bandwidth / (8 * 25e9) if SELENE.network is not None else 0
"""Part of the adapters' rate that collectives reach."""
EFA = Network(bandwidth=WIRE_SHARE * 50e9, latency_s=20e-6)
"""400 Gb/s per node."""
AWS = find_machine("8xA100-40GB").model_copy(update={"name": "8xA100-40GB, 400 Gb/s", "network": EFA})
GPT_SEQUENCE, GPT_BATCH = 2048, 4
T5_SEQUENCE, T5_BATCH = 512, 16
GPT_175B = replace(PRESETS["gpt-175b"], sequence=GPT_SEQUENCE)
T5_MOE = replace(MOE_PRESETS["t5-moe-1.2t"], sequence=T5_SEQUENCE)
PLANS = (
    ("gpt-175b", "--nodes", "96", "--sequence", "2048"),
    ("gpt-175b", "--nodes", "96", "--tp", "2", "--sequence", "2048"),
    ("t5-moe-1.2t", "--nodes", "96", "--tp", "2", "--ep", "768", "--sequence", "512"),
)
"""Options of `patrickstar plan` whose duration is measured."""


@dataclass(frozen=True)
class Published:
    """Published throughput of a cluster.

    Attributes:
        batch: Sequences per GPU; None if it is not published.
        value: TFLOPS per GPU, or samples per second of all GPUs.
    """

    system: str
    shape: Gpt
    machine: Machine
    gpus: int
    batch: int | None
    value: float
    unit: str = "TFLOPS"


def _gpt(layers: int, hidden: int, heads: int, sequence: int = 2048, experts: Experts | None = None) -> Gpt:
    return Gpt(layers, hidden, heads, vocab=51_200, sequence=sequence, experts=experts)


ZERO_3, FSDP, DEEPSPEED = "ZeRO-3 (Megatron-LM)", "FSDP (PyTorch)", "DeepSpeed-MoE"
_175B, _530B, _1T, _6_7B = _gpt(96, 12_288, 96), _gpt(105, 20_480, 128), _gpt(128, 25_600, 160), _gpt(32, 4096, 32)
PUBLISHED = (
    # Narayanan et al. 2021 (arXiv 2104.04473), table 2, on Selene.
    Published(ZERO_3, _175B, SELENE, 384, 4, 144),
    Published(ZERO_3, _175B, SELENE, 768, 2, 88),
    Published(ZERO_3, _175B, SELENE, 1536, 1, 44),
    Published(ZERO_3, _530B, SELENE, 640, 4, 138),
    Published(ZERO_3, _530B, SELENE, 1120, 2, 98),
    Published(ZERO_3, _530B, SELENE, 2240, 1, 48),
    # "Training a 1 Trillion Parameter Model With PyTorch Fully Sharded Data Parallel on AWS", PyTorch's blog, 2022.
    Published(FSDP, replace(_175B, sequence=512), AWS, 128, 20, 159),
    Published(FSDP, _1T, AWS, 128, 4, 84),
    Published(FSDP, _1T, AWS, 512, 4, 81),
    # Rajbhandari et al. 2022 (arXiv 2201.05596), table 3: 6.7B, and 1.3B with 128 experts.
    Published(DEEPSPEED, _6_7B, SERVER, 128, None, 70, "samples/s"),
    Published(DEEPSPEED, _gpt(24, 2048, 16, experts=Experts(128, every=2)), SERVER, 128, None, 372, "samples/s"),
)


def step(shape: Gpt | T5, batch: int, mesh: Mesh, machine: Machine = SERVER) -> Estimate | None:
    """Return the estimate with recomputation; None if the model does not fit."""
    mesh = replicated(shape, batch, mesh, machine)
    try:
        return estimate(shape_workload(shape, batch, True, mesh), machine, mesh)
    except BudgetError:
        return None


def best(shape: Gpt | T5, mesh: Mesh, machine: Machine = SERVER) -> Estimate:
    """Return the estimate at the batch with the most tokens per second, with recomputation or without."""
    mesh = replicated(shape, 1, mesh, machine)
    return best_estimate(partial(shape_workload, shape), machine, mesh)


def curve(shape: Gpt | T5, batch: int) -> dict[int, Estimate | None]:
    """Return the estimates over numbers of GPUs; experts are divided over all processes."""
    return {
        gpus: step(shape, batch, Mesh(gpus // PER_NODE, PER_NODE, ep=gpus if shape.experts is not None else 1))
        for gpus in GPUS
    }


def cells(found: Estimate, sequence: int) -> list[str]:
    samples = found.tokens_per_s / sequence
    return [
        str(found.mesh.replica_nodes),
        f"{found.seconds:.2f} s",
        f"{found.bound_s:.2f} s: {found.busiest.name}",
        f"{found.tflops:.3g}",
        f"{limit_tflops(found):.3g}",
        f"{samples:,.2f}",
        f"{samples / found.processes:.4f}",
        format_size(found.model_data_bytes),
    ]


CELLS = ["nodes per replica", "step", "limit", "TFLOPS per GPU", "limit"]
CELLS += ["samples/s", "samples/s per GPU", "model data per process"]


def limit_tflops(found: Estimate) -> float:
    """Return the TFLOPS per GPU if a step took as long as its busiest resource alone."""
    return found.workload.all_operations / found.bound_s / 1e12


def curve_rows(points: dict[int, Estimate | None], sequence: int) -> Iterator[list[str]]:
    for gpus, found in points.items():
        yield [str(gpus), *(cells(found, sequence) if found is not None else ["", "does not fit", *[""] * 6])]


def mesh_rows() -> Iterator[list[str]]:
    """Compare ways to divide both models over 768 GPUs."""
    nodes = GPUS[-1] // PER_NODE
    assert T5_MOE.experts is not None
    capped = replace(T5_MOE, experts=replace(T5_MOE.experts, capacity_factor=1.25))
    choices: list[tuple[str, Gpt | T5, Mesh]] = [
        *(("GPT-175B", GPT_175B, Mesh(nodes, PER_NODE, tp)) for tp in (1, 2, 4, 8)),
        *(("T5-MoE-1.2T", T5_MOE, Mesh(nodes, PER_NODE, 1, ep)) for ep in (8, 64, 256, 768)),
        ("T5-MoE-1.2T", T5_MOE, Mesh(nodes, PER_NODE, 2, 768)),
        ("T5-MoE-1.2T, capacity factor 1.25", capped, Mesh(nodes, PER_NODE, 1, 768)),
    ]
    for name, shape, mesh in choices:
        found = best(shape, mesh)
        experts = found.workload.experts
        compute = next(channel for channel in found.channels if channel.name == "compute")
        waits, busiest = f"{compute.blocking_s:.2f} s", f"{experts.imbalance:.3f}" if experts is not None else ""
        recompute = "yes" if found.workload.checkpointing else "no"
        row = [name, str(mesh.tp), str(mesh.ep), str(found.workload.batch), recompute, waits, busiest]
        yield [*row, *cells(found, shape.sequence)]


def published_estimate(case: Published) -> Estimate | None:
    mesh = Mesh(case.gpus // PER_NODE, PER_NODE, ep=128 if case.shape.experts is not None else 1)
    if case.batch is None:
        return best(case.shape, mesh, case.machine)
    return step(case.shape, case.batch, mesh, case.machine)


def published_rows() -> Iterator[dict[str, str]]:
    for case in PUBLISHED:
        found = published_estimate(case)
        row = {
            "system": case.system,
            "model": f"{case.shape.numel / 1e9:.1f}B",
            "machine": case.machine.name,
            "GPUs": str(case.gpus),
            "batch per GPU": f"{'fastest' if case.batch is None else case.batch} x {case.shape.sequence}",
            "published": f"{case.value:g} {case.unit}",
        }
        if found is None:
            yield row | {"estimate": "does not fit", "limit": "", "error": ""}
            continue
        ours = found.tflops if case.unit == "TFLOPS" else found.tokens_per_s / case.shape.sequence
        limit = f"{ours * found.seconds / found.bound_s:.1f}: {found.busiest.name}"
        error = f"{100 * (ours / case.value - 1):+.0f} %"
        yield row | {"estimate": f"{ours:.1f}", "limit": limit, "error": error}


def planning_rows() -> Iterator[dict[str, str]]:
    for model, *options in PLANS:
        command = ["plan", "--machine", SERVER.name, "--model", model, *options]
        start, used_s = time.perf_counter(), _children_s()
        subprocess.run([sys.executable, "-m", "patrickstar", *command], check=True, capture_output=True)
        duration_s, used_s = time.perf_counter() - start, _children_s() - used_s
        row = {"command": f"`patrickstar {' '.join(command)}`", "duration": f"{duration_s:.1f} s"}
        yield row | {"processor time": f"{used_s:.1f} s"}


def _children_s() -> float:
    """Return the processor time of all processes that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def draw(gpt: dict[int, Estimate | None], moe: dict[int, Estimate | None]) -> None:
    """Draw TFLOPS per GPU against the number of GPUs, with limits and published figures."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "scaling"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, name, points in ((axes[0], "GPT-175B, 4 x 2048", gpt), (axes[1], "T5-MoE-1.2T, 16 x 512", moe)):
        fitting = {gpus: found for gpus, found in points.items() if found is not None}
        axis.plot(list(fitting), [found.tflops for found in fitting.values()], "o-", label="estimate", markersize=3)
        limits = [limit_tflops(found) for found in fitting.values()]
        axis.plot(list(fitting), limits, "--", color="gray", label="busiest resource alone", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS], rotation=45)
        axis.set(title=name, xlabel="GPUs", ylabel="TFLOPS per GPU", ylim=(0, None))
    for system, marker in ((ZERO_3, "s"), (FSDP, "^")):
        cases = [case for case in PUBLISHED if case.system == system and case.shape.layers == 96 and case.gpus <= 768]
        axes[0].plot([case.gpus for case in cases], [case.value for case in cases], marker, label=system, markersize=5)
    axes[0].legend(fontsize="small")
    axes[1].legend(fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    load = os.getloadavg()[0]
    gpt, moe = curve(GPT_175B, GPT_BATCH), curve(T5_MOE, T5_BATCH)
    draw(gpt, moe)
    on_disk, in_memory = gpt[GPUS[0]], [found for found in gpt.values() if found is not None and not found.disk_bytes]
    per_gpu = [found.tokens_per_s / found.processes for found in in_memory]
    assert on_disk is not None
    slow = [(case, published_estimate(case)) for case in PUBLISHED[1:3]]
    took_s = [found.workload.all_operations / case.value / 1e12 for case, found in slow if found is not None]
    network_s = 6 * _175B.numel / SELENE.network.bandwidth if SELENE.network is not None else 0
    publish_text(
        "scaling",
        gpt_batch=GPT_BATCH,
        gpt_sequence=GPT_SEQUENCE,
        t5_batch=T5_BATCH,
        t5_sequence=T5_SEQUENCE,
        gpt=table(list(curve_rows(gpt, GPT_SEQUENCE)), ["GPUs", *CELLS]),
        moe=table(list(curve_rows(moe, T5_SEQUENCE)), ["GPUs", *CELLS]),
        in_memory=in_memory[0].processes,
        faster=per_gpu[0] / (on_disk.tokens_per_s / on_disk.processes),
        change=max(per_gpu) / min(per_gpu) - 1,
        meshes=table(list(mesh_rows()), ["model", "tp", "ep", "batch", "recomputation", "waits", "busiest", *CELLS]),
        published=table(list(published_rows())),
        zero_s=" and ".join(f"{seconds:.0f} s" for seconds in took_s),
        slower=took_s[-1] / network_s,
        network=network_s,
        wire=WIRE_SHARE,
        checkpoints=_1T.checkpoint_bytes(4) / 1e9,
        planning=table(list(planning_rows())),
        load=load,
        cores=os.cpu_count(),
        machine=machine_name(torch.device("cpu")),
    )


if __name__ == "__main__":
    main()
