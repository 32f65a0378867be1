"""Estimate GPT-175B and T5-MoE-1.2T from 8 to 768 GPUs, and compare clusters with published figures.

python benchmarks/scaling.py
Nothing is fitted, and only the duration of planning is measured. Draws docs/scaling.svg, which needs matplotlib.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from report import RESULTS

from patrickstar._cli.presets import MOE_PRESETS, PRESETS
from patrickstar._dry_run.machine_profile import machine_name
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, Network, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import BATCHES, Estimate, best_estimate, estimate
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import Workload, gpt_workload, t5_workload
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
        per_gpu: TFLOPS per GPU.
        samples_per_s: Of all GPUs, where TFLOPS are not published.
    """

    system: str
    shape: Gpt
    machine: Machine
    gpus: int
    batch: int | None
    per_gpu: float | None = None
    samples_per_s: float | None = None


def _gpt(layers: int, hidden: int, heads: int, sequence: int, experts: Experts | None = None) -> Gpt:
    return Gpt(layers, hidden, heads, vocab=51_200, sequence=sequence, experts=experts)


ZERO_3, FSDP, DEEPSPEED = "ZeRO-3 (Megatron-LM, table 2)", "FSDP (PyTorch, 2022)", "DeepSpeed-MoE (table 3)"
_175B, _530B = _gpt(96, 12_288, 96, 2048), _gpt(105, 20_480, 128, 2048)
_1T, _6_7B = _gpt(128, 25_600, 160, 2048), _gpt(32, 4096, 32, 2048)
_52B = _gpt(24, 2048, 16, 2048, Experts(128, every=2))
PUBLISHED = (
    Published(ZERO_3, _175B, SELENE, 384, 4, 144),
    Published(ZERO_3, _175B, SELENE, 768, 2, 88),
    Published(ZERO_3, _175B, SELENE, 1536, 1, 44),
    Published(ZERO_3, _530B, SELENE, 640, 4, 138),
    Published(ZERO_3, _530B, SELENE, 1120, 2, 98),
    Published(ZERO_3, _530B, SELENE, 2240, 1, 48),
    Published(FSDP, replace(_175B, sequence=512), AWS, 128, 20, 159),
    Published(FSDP, _1T, AWS, 128, 4, 84),
    Published(FSDP, _1T, AWS, 512, 4, 81),
    Published(DEEPSPEED, _6_7B, SERVER, 128, None, samples_per_s=70),
    Published(DEEPSPEED, _52B, SERVER, 128, None, samples_per_s=372),
)


def workload(shape: Gpt | T5, batch: int, checkpointing: bool, mesh: Mesh) -> Workload:
    if isinstance(shape, T5):
        return t5_workload(shape, batch, checkpointing, mesh)
    return gpt_workload(shape, batch, checkpointing, mesh)


def step(shape: Gpt | T5, batch: int, mesh: Mesh, machine: Machine = SERVER) -> Estimate | None:
    """Return the estimate with recomputation; None if the model does not fit."""
    try:
        return estimate(workload(shape, batch, True, mesh), machine, mesh)
    except BudgetError:
        return None


def curve(shape: Gpt | T5, batch: int) -> dict[int, Estimate | None]:
    """Return the estimates over numbers of GPUs; experts are divided over all processes."""
    return {
        gpus: step(shape, batch, Mesh(gpus // PER_NODE, PER_NODE, ep=gpus if shape.experts is not None else 1))
        for gpus in GPUS
    }


def cells(found: Estimate, sequence: int) -> list[str]:
    """Return step, its limit, speed of a GPU, samples per second and model data."""
    samples = found.tokens_per_s / sequence
    return [
        f"{found.seconds:.2f} s",
        f"{found.bound_s:.2f} s: {found.busiest.name}",
        f"{found.tflops:.1f}",
        f"{found.workload.all_operations / found.bound_s / 1e12:.1f}",
        f"{samples:,.2f}",
        f"{samples / found.processes:.4f}",
        format_size(found.model_data_bytes),
    ]


CELLS = ["step", "limit", "TFLOPS per GPU", "limit", "samples/s", "samples/s per GPU", "model data per process"]


def curve_rows(points: dict[int, Estimate | None], sequence: int) -> Iterator[list[str]]:
    for gpus, found in points.items():
        yield [str(gpus), *(cells(found, sequence) if found is not None else ["does not fit", *[""] * 6])]


def mesh_rows() -> Iterator[list[str]]:
    """Compare ways to divide both models over 768 GPUs, each at the batch with the most tokens per second."""
    nodes = GPUS[-1] // PER_NODE
    capped = replace(T5_MOE, experts=replace(T5_MOE.experts, capacity_factor=1.25)) if T5_MOE.experts else T5_MOE
    choices: list[tuple[str, Gpt | T5, Mesh]] = [
        *(("GPT-175B", GPT_175B, Mesh(nodes, PER_NODE, tp)) for tp in (1, 2, 4, 8)),
        *(("T5-MoE-1.2T", T5_MOE, Mesh(nodes, PER_NODE, 1, ep)) for ep in (16, 64, 256, 768)),
        ("T5-MoE-1.2T", T5_MOE, Mesh(nodes, PER_NODE, 2, 768)),
        ("T5-MoE-1.2T, capacity factor 1.25", capped, Mesh(nodes, PER_NODE, 1, 768)),
    ]
    for name, shape, mesh in choices:
        found = best(shape, SERVER, mesh)
        if found is None:
            yield [name, str(mesh.tp), str(mesh.ep), "does not fit", *[""] * 8]
            continue
        experts = found.workload.experts
        compute = next(channel for channel in found.channels if channel.name == "compute")
        waits, busiest = f"{compute.blocking_s:.2f} s", f"{experts.imbalance:.3f}" if experts is not None else ""
        yield [name, str(mesh.tp), str(mesh.ep), str(found.workload.batch), waits, busiest, *cells(found, shape.sequence)]


def best(shape: Gpt | T5, machine: Machine, mesh: Mesh) -> Estimate | None:
    """Return the estimate with recomputation at the batch with the most tokens per second."""
    try:
        return best_estimate(lambda batch, recompute: workload(shape, batch, recompute, mesh), machine, mesh, (True,))
    except BudgetError:
        return None


def published_rows() -> Iterator[list[str]]:
    for case in PUBLISHED:
        mesh = Mesh(case.gpus // PER_NODE, PER_NODE, ep=128 if case.shape.experts is not None else 1)
        if case.batch is None:
            found, batch = best(case.shape, case.machine, mesh), "best"
        else:
            found, batch = step(case.shape, case.batch, mesh, case.machine), str(case.batch)
        row = [case.system, f"{case.shape.numel / 1e9:.1f}B", case.machine.name, str(case.gpus)]
        row.append(f"{batch} x {case.shape.sequence}")
        if found is None:
            yield [*row, "", "does not fit", "", "", ""]
            continue
        samples = case.gpus * found.workload.batch / found.seconds
        published, unit, ours = (
            (case.per_gpu, "TFLOPS", found.tflops)
            if case.per_gpu is not None
            else (case.samples_per_s, "samples/s", samples)
        )
        limit = ours * found.seconds / found.bound_s
        assert published is not None
        error = f"{100 * (ours / published - 1):+.0f} %"
        yield [*row, f"{published:g} {unit}", f"{ours:.1f}", f"{limit:.1f}: {found.busiest.name}", error]


def planning_rows() -> Iterator[list[str]]:
    for model, *options in PLANS:
        command = ["plan", "--machine", SERVER.name, "--model", model, *options]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "patrickstar", *command], check=True, capture_output=True)
        yield [f"`patrickstar {' '.join(command)}`", f"{time.perf_counter() - start:.1f} s"]


def draw(gpt: dict[int, Estimate | None], moe: dict[int, Estimate | None]) -> None:
    """Draw TFLOPS per GPU against the number of GPUs, with limits and published figures."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "scaling"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, name, points in ((axes[0], "GPT-175B, 4 x 2048", gpt), (axes[1], "T5-MoE-1.2T, 16 x 512", moe)):
        fitting = {gpus: found for gpus, found in points.items() if found is not None}
        axis.plot(list(fitting), [found.tflops for found in fitting.values()], "o-", label="estimate", markersize=3)
        limits = [found.workload.all_operations / found.bound_s / 1e12 for found in fitting.values()]
        axis.plot(list(fitting), limits, "--", color="gray", label="busiest resource alone", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS], rotation=45)
        axis.set(title=name, xlabel="GPUs", ylabel="TFLOPS per GPU", ylim=(0, None))
    for system, marker in ((ZERO_3, "s"), (FSDP, "^")):
        cases = [case for case in PUBLISHED if case.system == system and case.shape.layers == 96 and case.gpus <= 768]
        axes[0].plot([case.gpus for case in cases], [case.per_gpu for case in cases], marker, label=system, markersize=5)
    axes[0].legend(fontsize="small")
    axes[1].legend(fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


TEXT = """\
# scaling

Estimates of `patrickstar plan` for clusters: steps with recomputation and full overlap, by a linear program per mesh
([how](../../docs/planning.md#clusters)). Nothing is fitted. The machine specs cite the source of each rate. Every figure
has its limit beside it: what the busiest resource alone would take or allow.

## From 8 to 768 GPUs

The cluster is of Angel-PTM's servers (`8xA100-40GB-11TB`), whose paper gives 16 adapters of 12.5 GB/s per server. Its
abstract says that experiments with GPT3-175B and T5-MoE-1.2T on hundreds of GPUs verify strong scalability. We do not
have the figures of these experiments, nor the batch, the length and the shape of the T5, so there is no error to state.
The shape of T5-MoE-1.2T is assumed (`_cli/presets.py`).

GPT-175B, {gpt_batch} x {gpt_sequence} tokens per GPU:

{gpt}

On 8 GPUs the states of the optimizer are on disk. From {in_memory} GPUs on, all states are in memory, so a GPU trains
{faster:.1f} times as fast: more than linear scaling, as the paper reports.

T5-MoE-1.2T, {t5_batch} x {t5_sequence} tokens per GPU and stack, experts over all processes:

{moe}

## 768 GPUs, divided in different ways

Each at the batch per GPU, or per tensor-parallel group, with the most tokens per second. *Waits* is the part of the
computation in collectives inside operators, *busiest* the load of the busiest process relative to the mean.

{meshes}

Experts in fewer processes have their gradients and parameters exchanged between nodes, which then is the limit, and
their states take as much memory as before, but each node also has a copy of the parameters of its experts.

## Against published figures

{published}

What is not comparable:

- The estimate is a bound: it assumes that all transfers overlap with computation, and that products of a GPT run at the
  rate of large ones (225 TFLOPS on an A100 at hidden 8192). Where it says that computation is the limit, the error is the
  time that a system waits for anything else, and slower products.
- ZeRO-3 gathers over all processes and holds no copy of the parameters per node; both move six bytes per parameter into
  each node. The published rates fall with the batch per GPU: {zero_s} s per step for each of the batches 2 and 1 on
  twice the GPUs. So ZeRO-3 was limited by communication, which took about {slower:.0f} times as long as the network of
  the specification needs for these bytes. The estimate for batch 1 is limited by {network}.
- FSDP was measured with SGD, which has no states, and offloads parameters and checkpoints. Its machine is our
  `8xA100-40GB` with 400 Gb/s per node, of which we assume that collectives reach the same part as elsewhere, {wire:.0%}.
- DeepSpeed-MoE's note names neither the batch nor the parallelism of the dense model, nor the machine except for 128 A100.
  Ours are at the fastest batch on Angel-PTM's servers, whose network is as fast as the usual eight adapters of 200 Gb/s.

## Duration of planning

{planning}

Machine: {machine}.
"""


def main() -> None:
    gpt, moe = curve(GPT_175B, GPT_BATCH), curve(T5_MOE, T5_BATCH)
    draw(gpt, moe)
    in_memory = next(gpus for gpus, found in gpt.items() if found is not None and not found.disk_bytes)
    first, last = gpt[8], gpt[in_memory]
    assert first is not None and last is not None
    slow = [step(case.shape, case.batch or 1, Mesh(case.gpus // 8, 8), SELENE) for case in PUBLISHED[1:3]]
    took_s = [case.per_gpu and found and found.seconds * found.tflops / case.per_gpu for case, found in zip(PUBLISHED[1:3], slow, strict=True)]
    assert slow[1] is not None and took_s[1]
    network = next(channel for channel in slow[1].channels if channel.name == "between nodes")
    text = TEXT.format(
        gpt_batch=GPT_BATCH,
        gpt_sequence=GPT_SEQUENCE,
        t5_batch=T5_BATCH,
        t5_sequence=T5_SEQUENCE,
        gpt=table(["GPUs", *CELLS], list(curve_rows(gpt, GPT_SEQUENCE))),
        moe=table(["GPUs", *CELLS], list(curve_rows(moe, T5_SEQUENCE))),
        in_memory=in_memory,
        faster=first.seconds / last.seconds,
        meshes=table(["model", "tp", "ep", "batch", "waits", "busiest", *CELLS], list(mesh_rows())),
        published=table(
            ["system", "model", "machine", "GPUs", "batch per GPU", "published", "estimate", "limit", "error"],
            list(published_rows()),
        ),
        zero_s=" and ".join(f"{seconds:.0f}" for seconds in took_s if seconds),
        slower=took_s[1] / network.seconds,
        network=slow[1].busiest.name,
        wire=WIRE_SHARE,
        planning=table(["command", "duration"], list(planning_rows())),
        machine=machine_name(torch.device("cpu")),
    )
    assert BATCHES
    print(text)
    (RESULTS / "scaling.md").write_text(text)


if __name__ == "__main__":
    main()
