"""PatrickStar (arXiv 2108.05818): the figures of two editions of the paper, and the chart to which rates are fitted."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from patrickstar_v043.simulation import BATCHES, OriginalStep, best_step
from published import BEYOND, HALF_NODE, HELD_OUT_RUNS, NODE, PC, SMALL, VOCAB, points

from papers.counts import PAPER_OPERATIONS
from papers.figures import Figure, Section
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import Estimate, best_estimate
from patrickstar._perf_model.workload import shape_workload
from patrickstar.errors import BudgetError

CHART = "chart of v0.4.3"
SHAPES = {point.model: point.gpt for point in points()}
MODELS = [model for model in SHAPES if float(model[:-1]) <= 12]
"""Models that both editions have; the chart has larger ones."""
LAYERS_OF_8192 = {"25B": 31, "30B": 37, "40B": 50}
FAMILY = SHAPES | BEYOND | {name: Gpt(layers, 8192, 16, VOCAB, head=False) for name, layers in LAYERS_OF_8192.items()}
BAR_TFLOPS = 30
"""TFLOPS per GPU that edition 2 demands of the largest models."""
THROUGHPUTS = (
    ("edition 1, section 9.2.2", 1, {"1B": 51, "6B": 40, "8B": 34, "10B": 32, "12B": 23}),
    ("edition 2, section 9.2.2", 1, {"6B": 56, "8B": 40, "10B": 44, "12B": 34}),
    ("edition 2, section 9.2.3", 8, {"1B": 434, "12B": 377}),
    *((CHART, gpus, {point.model: point.tflops for point in points() if point.gpus == gpus}) for gpus in (1, 8)),
)
"""Source, GPUs, TFLOPS of all GPUs."""
SPEEDUPS = (
    ("edition 1, Table 3", 2, (2.04, 1.91, 1.83, 2.49, 1.91, 2.54, 1.87)),
    ("edition 1, Table 3", 4, (4.25, 4.74, 4.58, 6.33, 4.81, 6.13, 4.96)),
    ("edition 1, Table 3", 8, (8.40, 9.39, 9.02, 13.36, 9.77, 10.10, 10.37)),
    ("edition 2, Table 4", 2, (2.04, 1.81, 1.81, 1.52, 1.77, 1.68, 2.24)),
    ("edition 2, Table 4", 4, (4.09, 4.16, 3.97, 3.37, 4.02, 4.01, 5.55)),
    ("edition 2, Table 4", 8, (8.18, 8.40, 8.32, 7.74, 8.94, 8.90, 11.18)),
)
"""Source, GPUs, throughput relative to one GPU for each of `MODELS`."""


def original(model: str, gpus: int, machine: str = NODE) -> OriginalStep:
    return best_step(SHAPES[model], find_machine(machine), gpus)


def own_step(gpt: Gpt, machine: Machine, gpus: int) -> Estimate:
    """Return the estimate of this engine at its best batch, with recomputation."""
    mesh = Mesh(gpus=gpus)
    return best_estimate(partial(shape_workload, gpt), machine, mesh, (True,))


def grid() -> Iterator[Figure | None]:
    for source, gpus, published in THROUGHPUTS:
        what = f"TFLOPS, {gpus} GPU{'s' if gpus > 1 else ''}"
        for model in MODELS:
            yield Figure(source, what, published[model], original(model, gpus).tflops) if model in published else None
        for model in MODELS if source == CHART else ():
            speed = own_step(SHAPES[model], find_machine(NODE), gpus).tokens_per_s
            ours = PAPER_OPERATIONS * SHAPES[model].numel * speed / 1e12
            yield Figure(source, f"{what}, estimate", published[model], ours)
    for source, gpus, values in SPEEDUPS:
        for model, value in zip(MODELS, values, strict=True):
            ours = original(model, gpus).tflops / original(model, 1).tflops
            yield Figure(source, f"speedup, {gpus} GPUs", value, ours)


def attempt(gpt: Gpt, machine: str, gpus: int, own: bool = False, **more: Any) -> OriginalStep | Estimate | None:
    """Return a step by the original's policy, or the estimate of this engine; None if the model does not fit."""
    try:
        return (own_step if own else best_step)(gpt, find_machine(machine), gpus, **more)
    except BudgetError:
        return None


def largest(machine: str, gpus: int, own: bool, bar_tflops: float = BAR_TFLOPS, sequence: int = 1024) -> float:
    """Return the billions of the largest model that trains, by the original's policy at a rate per GPU or more."""
    family = (SMALL if machine == PC else {}) | FAMILY
    steps = {name: attempt(replace(gpt, sequence=sequence), machine, gpus, own) for name, gpt in family.items()}
    return max(float(name[:-1]) for name, step in steps.items() if step and (own or step.tflops >= bar_tflops * gpus))


def sizes() -> Iterator[Figure]:
    tables, policy = "edition 1, Table 2; edition 2, Table 3", "original policy"
    bar = f"{policy}, from {BAR_TFLOPS} TFLOPS per GPU on"
    for gpus in (1, 2, 4, 8):
        what = f"largest model, GPUs: {gpus}, billions"
        yield Figure(tables, what, 12, largest(NODE, gpus, False), bar)
        yield Figure(tables, what, 12, largest(NODE, gpus, True), "estimate, at any speed")
    yield Figure(CHART, what, 18, largest(NODE, 8, False), bar)
    for gpus in (1, 2, 4, 8):
        batch = max(batch for batch in BATCHES if attempt(SHAPES["12B"], NODE, gpus, batches=(batch,)))
        yield Figure("edition 1, Table 2", f"largest batch of 12B, GPUs: {gpus}", 16, batch, policy)
    for model, layers in (*((model, SHAPES[model].layers) for model in MODELS), ("12B", 65)):
        what, note = f"{model}, billions in {layers} layers", "both 60 and 65 are printed" if model == "12B" else ""
        numel = layers * SHAPES[model].layer_numel / 1e9
        yield Figure("edition 1, Table 1; edition 2, Table 2", what, float(model[:-1]), numel, note)
    for source, gpus, published in (("edition 1, Figure 13", 4, 48.28), ("edition 2, Figure 15", 8, 48.78)):
        ours = original("8B", gpus, HALF_NODE).tflops / gpus
        yield Figure(source, f"120 GB, {gpus} GPUs, TFLOPS of 8B", published, ours, f"{policy}, per GPU")
        yield Figure(source, f"120 GB, {gpus} GPUs, largest, billions", 8, largest(HALF_NODE, gpus, False), bar)
    margin = best_step(SHAPES["4B"], find_machine(NODE), 1, batches=(16,)).placement
    ours = 100 * 3 * margin.in_margin / (4 * margin.chunks)
    note = f"{policy}: {3 * margin.in_margin} of {4 * margin.chunks} chunks, twice as large; the paper: 12 of 96"
    yield Figure("section 9.2.2", "4B, batch 16, chunks in the GPU's margin, %", 12.5, ours, note)
    sources = ("section 9.2.4", "from its log"), ("pull request 269", "rate of evictions from its own profile")
    for run, (source, note) in zip(HELD_OUT_RUNS, sources, strict=True):
        ours = best_step(run.gpt, find_machine(run.machine), 1, batches=(run.batch,)).tflops
        yield Figure(source, f"TFLOPS, {run.label}", run.tflops, ours, f"{policy}, batch {run.batch}, {note}")
    for own, note in ((False, policy), (True, "estimate")):
        what, ours = "largest model on the $700 PC, billions", largest(PC, 1, own, 0, sequence=128)
        yield Figure("section 9.2.4", what, 0.7, ours, f"{note}, 128 tokens")
    yield Figure("section 7", "bytes that a process sends, M (p-1)/p", 6, 6, "counted in `tests/distributed`")


def sections() -> dict[str, Section]:
    """Return the sections of the page."""
    return {"patrickstar_throughput": Section(list(grid()), MODELS), "patrickstar_sizes": Section(list(sizes()))}
