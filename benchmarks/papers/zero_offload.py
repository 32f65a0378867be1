"""ZeRO-Offload (arXiv 2101.06840): largest models, throughput, scaling, CPU Adam and delayed updates."""

from collections.abc import Iterator
from functools import partial

from report import read
from scaling import WIRE_SHARE

from papers.estimates import deepest_billions, dry_run_s, most_samples, samples_per_s
from papers.figures import Figure, Section, error
from patrickstar._models.presets import PRESETS
from patrickstar._perf_model.machine_spec import Network, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import best_estimate
from patrickstar._perf_model.workload import Workload, shape_workload

DGX2 = find_machine("DGX-2")
CLUSTER = DGX2.model_copy(update={"network": Network(bandwidth=WIRE_SHARE * 8 * 12.5e9, latency_s=20e-6)})
"""Its data sheet has eight adapters of 100 Gb/s; the share that collectives reach is that of other clusters."""
NARROW, WIDE, PLAIN = PRESETS["gpt-10b"], PRESETS["gpt-28b"], "torch plain / ours"
SMALL_BATCH = 8
"""Largest batch of the rows of `delayed-cpu.md` that are compared with the speedups of delayed updates."""


def simulated_tflops(work: Workload) -> float:
    """Return the TFLOPS of a dry run of 10B on one GPU."""
    return work.operations / dry_run_s("gpt-10b", work.batch, NARROW.sequence, DGX2) / 1e12


def of_cluster(gpus: int) -> float:
    """Return the samples per second of 10B on a number of GPUs, at the largest batch."""
    mesh = Mesh(max(1, gpus // 16), min(gpus, 16))
    return samples_per_s(NARROW, most_samples(NARROW, CLUSTER, mesh), CLUSTER, mesh)


def range_of(name: str, column: str) -> tuple[float, float]:
    """Return the smallest and the largest ratio of a result, of small batches that have an update on the host."""
    rows = [row for row in read(name)[1] if int(row.get("batch", "1").split()[0]) <= SMALL_BATCH]
    ratios = [float(row[column]) for row in rows if row.get("update") != "0.00 s"]
    return min(ratios), max(ratios)


def figures() -> Iterator[Figure]:
    for what, published, shape, mesh, note in (
        ("one V100", 13, NARROW, Mesh(), "width 4096"),
        ("a DGX-2", 70, WIDE, Mesh(gpus=16, tp=16), "width 8192, tensor parallelism for the paper's model parallelism"),
        ("a DGX-2", 70, WIDE, Mesh(gpus=16), "width 8192, data parallelism alone"),
    ):
        what, ours = f"largest model on {what}, billions", deepest_billions(shape, DGX2, mesh)
        yield Figure("abstract; evaluation, model scale", what, published, ours, f"estimate, 1 x 1024, {note}")
    best = best_estimate(partial(shape_workload, NARROW), DGX2, Mesh(), checkpointing=(True,))
    speed, what, note = "abstract; evaluation, throughput", "TFLOPS of 10B on one V100", f"{best.workload.batch} x 1024"
    yield Figure(speed, what, 40, best.tflops, f"estimate, {note}")
    yield Figure(speed, what, 40, partial(simulated_tflops, best.workload), f"dry run, {note}")
    nbytes = sum(load.amount for load in best.channels if load.name in ("host to device", "device to host"))
    what = "bytes between CPU and GPU, per parameter"
    yield Figure("offload strategy", what, 4, nbytes / NARROW.numel, f"estimate, 10B, {note}")
    for size, published in ((8, 128), (11, 176), (17.2, 284)):
        note = "14 bytes per parameter, where the paper has 16 (16.5): a gradient takes the place of its parameter"
        yield Figure("background", f"GB of model data, {size:g}B", published, 14 * size, note)
    note = "estimate, 10B, largest batch; the network, which the machine spec lacks, is that of the data sheet"
    scaled, what = of_cluster(128) / of_cluster(1), "throughput of 128 GPUs relative to one"
    yield Figure("evaluation, scalability", what, "near-linear", scaled, note)
    what, ours = "speedup of the CPU's Adam over PyTorch's", "{:.1f} to {:.1f}".format(*range_of("adam-cpu", PLAIN))
    yield Figure("evaluation, CPU Adam", what, "6", ours, "measured on another CPU ([adam](adam-cpu.md))")
    low, high = range_of("delayed-cpu", "no overlap / delayed")
    ours = f"{low:.2f} to {high:.2f} ({error(low, 1.12)}, {error(high, 1.59)})"
    note = f"dry runs, 8xV100-32GB, 1 to {SMALL_BATCH} x 1024 ([delayed](delayed-cpu.md))"
    yield Figure("evaluation, DPU", "speedup by delayed updates", "1.12 to 1.59", ours, note)


def sections() -> dict[str, Section]:
    """Return the section of the page."""
    return {"zero_offload": Section(list(figures()))}
