"""Angel-PTM (arXiv 2303.02868): its server, shapes, largest models, throughputs, clusters, and models on SSDs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dry_runs import without_disk

from papers.counts import embedding_numel, layer_tensors
from papers.estimates import (
    all_gpus_as_one,
    changed,
    deepest_billions,
    dry_run_s,
    most_samples,
    samples_per_s,
)
from papers.figures import Figure, Section
from patrickstar._models.presets import MOE_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import SAVED_BYTES_PER_HIDDEN, Gpt
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import PARAM_BYTES, STATE_BYTES, shape_workload

SERVER = find_machine("8xA100-40GB-11TB")
IN_MEMORY = without_disk(SERVER.name)
EIGHT = Mesh(gpus=8)
PEAK_TFLOPS = 312
"""Data sheet of the A100, in 16 bits."""
LENGTHS = (512, 1024)
"""Tokens per sequence of Tables 5 and 6, which do not give the number."""
MOE_BATCH = 128
WIDE, GPT_3 = (replace(PRESETS[name], sequence=2048) for name in ("gpt-175b-wide", "gpt-175b"))
"""The length is that of section 2.2."""
T5_MOE = replace(MOE_PRESETS["t5-moe-1.2t"], sequence=LENGTHS[0])

PRINTED: dict[str, tuple[Gpt | T5, float, str]] = {
    "GPT3-1.7B": (PRESETS["gpt-1.7b"], 1.7, ""),
    "GPT3-13B": (Gpt(40, 5140, 40), 13, "printed: an FFN of 20506; can't be built, 40 heads do not divide 5140"),
    "GPT3-28B": (PRESETS["gpt-28b"], 28, "35 layers have 28.2"),
    "GPT3-30B": (Gpt(64, 8192, 36), 30, "37 layers have 29.8; can't be built, 36 heads do not divide 8192"),
    "GPT3-55B": (PRESETS["gpt-55b"], 55, ""),
    "GPT3-120B": (PRESETS["gpt-120b"], 120, ""),
    "GPT3-175B": (WIDE, 175, "GPT-3 itself has 96 layers of 12288"),
    "T5-1.4B": (T5_PRESETS["t5-1.4b"], 1.4, "layers of each stack, as below"),
    "T5-27B": (T5_PRESETS["t5-27b"], 27, "57 layers have 26.8"),
    "T5-58B": (T5_PRESETS["t5-58b"], 58, "123 layers have 57.8"),
    "T5-MoE-1.2T": (T5_MOE, 1200, "assumed: every second layer has experts, top-1 routing"),
}
"""Shapes of Table 4 as printed, the billions of parameters in their names, and remarks."""
OF_NAMED_SIZE = {"GPT3-28B": 35, "T5-27B": 57, "T5-58B": 123}
"""Layers with which the shapes of Table 5 have the sizes in their names, where those printed have not."""
TABLE_5 = (
    *(("Angel-PTM", "GPT3-28B", 38, 10.99), ("Angel-PTM", "GPT3-55B", 1, 0.464), ("Angel-PTM", "GPT3-55B", 10, 3.34)),
    *(("Angel-PTM", "T5-27B", 50, 14.38), ("Angel-PTM", "T5-58B", 1, 0.432), ("Angel-PTM", "T5-58B", 4, 3.37)),
    *(("DeepSpeed", "GPT3-28B", 1, 0.404), ("DeepSpeed", "GPT3-28B", 36, 7.61)),
    *(("DeepSpeed", "T5-27B", 1, 0.317), ("DeepSpeed", "T5-27B", 32, 7.31)),
)
"""System, model, samples per GPU and step, samples per second of the server."""


def server() -> Iterator[Figure]:
    memory, pcie = {"memory": 32 * 2**35, "memory_bandwidth": 0.75 * 16 * 8 * 2.933e9}, {"h2d": 32e9, "d2h": 32e9}
    yield Figure("Table 3", "memory of a GPU, GiB", 40, SERVER.device_memory / 2**30, "8 GPUs")
    yield Figure("Table 3", "cores", 4 * 48, SERVER.host.cores, "an update is bound by the memory, not by the cores")
    note = f"with 1024 GiB at 2933 MHz {effect({'host': memory})}"
    yield Figure("Table 3", "host memory, GB", 1024, SERVER.host.memory / 1e9, note)
    yield Figure("Table 3", "SSD, TB", 11, SERVER.disk.capacity / 1e12)
    yield Figure("section 6.1", "SSD, GB/s", 3.5, SERVER.disk.read / 1e9, "for reading and for writing")
    note = f"measured elsewhere; with 32 {effect({'links': pcie})}"
    yield Figure("section 6.1", "PCIe, GB/s", 32, SERVER.links.h2d / 1e9, note)
    note = "16 adapters of 12.5; what collectives reach of it"
    yield Figure("section 6.1", "network of a server, GB/s", 200, SERVER.network.bandwidth / 1e9, note)


def effect(parts: dict[str, dict[str, float]]) -> str:
    """Describe by how much estimates of Table 5 change at most on a server with other parts."""
    cases = [(of_length(model, LENGTHS[0]), batch) for _, model, batch, _ in TABLE_5]
    rates = [[samples_per_s(*case, where, EIGHT) for where in (changed(IN_MEMORY, parts), IN_MEMORY)] for case in cases]
    return f"Table 5 changes by {100 * max(abs(other / own - 1) for other, own in rates):.1f} %"


def of_length(model: str, sequence: int, layers: int | None = None) -> Gpt | T5:
    """Return a printed shape with a length, or with other layers."""
    shape = PRINTED[model][0]
    return replace(shape, sequence=sequence, layers=layers or shape.layers)


def shapes() -> Iterator[Figure]:
    for model, (shape, billions, note) in PRINTED.items():
        experts = "" if shape.experts is None else f", {shape.experts.count} experts"
        printed = f"{shape.layers} layers, {shape.heads} heads, {shape.hidden} x {shape.feed_forward.ffn}{experts}"
        numel = (shape.numel - embedding_numel(shape)) / 1e9
        yield Figure("Table 4", f"{model}, billions in layers: {printed}", billions, numel, note)
    table, gib, matrices = "Table 1, section 2.2", GPT_3.layers * GPT_3.hidden / 2**30, 12 * GPT_3.hidden
    note = "a gradient takes the place of its parameter"
    yield Figure(table, "GPT-3, parameters and gradients, GB", 648, PARAM_BYTES * matrices * gib, note)
    yield Figure(table, "GPT-3, optimizer states, GB", 1944, STATE_BYTES * matrices * gib, "the paper's GB are GiB")
    note = "1 x 2048, all of them saved; the paper adds a gradient of each"
    yield Figure(table, "GPT-3, activations, GB", 162, SAVED_BYTES_PER_HIDDEN * GPT_3.sequence * gib, note)
    note = "in 16 bits, half of it, the least size of a chunk"
    yield Figure("Table 2", "GPT-3, largest parameter in fp32, MB", 2304, 4 * max(layer_tensors(GPT_3)) / 2**20, note)


def largest_models() -> Iterator[Figure]:
    for family, model, deepspeed, angel_ptm in (("GPT", "GPT3-55B", 28, 55), ("T5", "T5-58B", 27, 58)):
        shape, note = of_length(model, LENGTHS[0]), f"estimate, 1 x {LENGTHS[0]}, any number of layers"
        ours, with_disk = (deepest_billions(shape, machine, EIGHT) for machine in (IN_MEMORY, SERVER))
        yield Figure("Table 5", f"largest {family}, DeepSpeed, billions", deepspeed, ours, note)
        what = f"largest {family}, Angel-PTM, billions"
        yield Figure("Table 5", what, angel_ptm, ours, note)
        yield Figure("Table 5", what, angel_ptm, with_disk, f"{note}, with the SSD, which only section 6.5 uses")


def throughputs() -> Iterator[Figure | None]:
    for system, model, batch, rate in TABLE_5:
        figure = partial(Figure, "Table 5", f"samples/s, {model}, {system}, batch {batch}", rate)
        of_server = partial(samples_per_s, batch=batch, machine=IN_MEMORY, mesh=EIGHT)
        yield from (figure(partial(of_server, of_length(model, length))) for length in LENGTHS)
        named = [of_length(model, length, OF_NAMED_SIZE.get(model)) for length in LENGTHS]
        yield from (figure(partial(of_server, shape)) if model in OF_NAMED_SIZE else None for shape in named)
        runs = system == "Angel-PTM" and batch > 1
        yield from (figure(partial(simulated, model, batch, length)) if runs else None for length in LENGTHS)
        yield from (figure(needed_tflops(of_length(model, length), rate)) for length in LENGTHS)


def simulated(model: str, batch: int, sequence: int) -> float:
    """Return the samples per second of a dry run."""
    samples_per_s(of_length(model, sequence), batch, IN_MEMORY, EIGHT)  # ends here if it does not fit
    preset = model.replace("GPT3", "gpt").lower()
    return batch * EIGHT.gpus / dry_run_s(preset, batch, sequence, all_gpus_as_one(IN_MEMORY))


def needed_tflops(shape: Gpt | T5, rate: float, gpus: int = EIGHT.gpus) -> str:
    """Return the TFLOPS per GPU that a published rate needs with recomputation."""
    tflops = shape_workload(shape, 1).operations * rate / gpus / 1e12
    return f"{tflops:.0f}{' (impossible)' if tflops > PEAK_TFLOPS else ''}"


def moe(per_gpu: int, gpus: int) -> tuple[T5, Mesh]:
    """Return T5-MoE with a number of experts per GPU and layer, divided among all GPUs."""
    return replace(T5_MOE, experts=Experts(per_gpu * gpus, every=2)), Mesh(gpus // 8, 8, ep=gpus)


def clusters() -> Iterator[Figure]:
    def rate(shape: Gpt | T5, mesh: Mesh, batch: int = MOE_BATCH, lock_free: bool = False) -> float:
        return samples_per_s(shape, batch, SERVER, mesh, lock_free)

    small, large = Mesh(32, 8), Mesh(96, 8)
    for mesh, published in ((small, 11.68), (large, 36.46)):
        needed = f"needed: {needed_tflops(WIDE, published, mesh.processes)} TFLOPS per GPU"
        for batch in (1, most_samples(WIDE, SERVER, mesh)):
            what, note = (
                f"samples/s, GPT3-175B, {mesh.processes} GPUs",
                f"estimate, {batch} x {WIDE.sequence}; {needed}",
            )
            yield Figure("Figure 8", what, published, rate(WIDE, mesh, batch), note)
    ours = rate(WIDE, large, 1) / rate(WIDE, small, 1)
    yield Figure("Figure 8", "768 relative to 256 GPUs", 3.12, ours, "estimates, the same batch per GPU")
    note, ours = f"estimates, {MOE_BATCH} x {LENGTHS[0]}", rate(*moe(9, 256)) / rate(*moe(9, 64))
    what = "T5-MoE, 9 experts per GPU, 256 relative to 64 GPUs"
    yield Figure("Figure 9", what, "near-linear", ours, f"{note}; linear: 4; the text has no values")
    table, trillion, ten = "Table 6", moe(29, 64), moe(32, 576)
    for name, (shape, mesh), published, lock_free in (
        *(("1T", trillion, 37.26, False), ("10T", ten, 317.82, False), ("10T, lock-free", ten, 942.31, True)),
    ):
        for batch in (MOE_BATCH, most_samples(shape, SERVER, mesh)):
            what = f"samples/s, T5-MoE-{name}, {mesh.processes} GPUs"
            experts = f"{shape.experts.count // mesh.processes} experts per GPU and layer"
            ours = rate(shape, mesh, batch, lock_free)
            yield Figure(table, what, published, ours, f"estimate, {batch} x {LENGTHS[0]}, {experts}")
    yield Figure(table, "10T relative to 1T, from both rows", 8.53, rate(*ten) / rate(*trillion), note)
    ours = rate(*ten, lock_free=True) / rate(*ten)
    note += "; another model, measured: [lock_free](lock_free-cpu.md)"
    yield Figure(table, "lock-free relative to exact", 2.96, ours, note)


def sections() -> dict[str, Section]:
    """Return the sections of the page."""
    kinds = ("as printed", "of the named size", "dry run", "TFLOPS needed")
    return {
        "angel_ptm_shapes": Section([*server(), *shapes()]),
        "angel_ptm_largest": Section(list(largest_models())),
        "angel_ptm_throughput": Section(list(throughputs()), [f"{kind}, {n}" for kind in kinds for n in LENGTHS]),
        "angel_ptm_clusters": Section(list(clusters())),
    }
