"""Simulate the original PatrickStar's published throughput, to which three rates are fitted.

python benchmarks/published.py

Nothing is measured, so the result is the same on every machine. The published figures are in
reference/patrickstar_published.csv, the policy in patrickstar_v043/simulation.py, the machine specs in
_perf_model/machines/. `papers` compares the figures of the paper's editions.
"""

from dataclasses import dataclass, replace

from patrickstar_v043.simulation import best_step
from report import publish_text, reference, table

from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine

NODE, HALF_NODE, PC, SUPERPOD = "8xV100-32GB", "8xV100-32GB-120GB", "700-dollar-pc", "8xA100-40GB"

# The original's benchmark trains a BERT classifier with the shape of a GPT, the vocabulary of BERT and no head
# (examples/model_builder.py). Its log in issue 67 counts 0.7294e9 parameters for the 0.7B model.
VOCAB = 30_522

SMALL = {"0.7B": Gpt(24, 1536, 16, VOCAB, head=False)}
BEYOND = {"20B": Gpt(25, 8192, 16, VOCAB, head=False)}
"""Next larger shape in the original's examples/model_builder.py."""

CONSTANTS = (
    *(("host", "core_bandwidth"), ("host", "memory_bandwidth"), ("host", "page_lock")),
    ("gpu", "matmul_tflops"),
    ("gpu", "half_rate_size"),
    ("gpu", "memory_bandwidth"),
    ("links", "h2d"),
    ("links", "d2h"),
    ("links", "gpu_gpu"),
)
"""Rates in the machine specs; the fitted ones first."""


@dataclass(frozen=True)
class Point:
    """One published throughput in TFLOPS of all GPUs."""

    model: str
    gpt: Gpt
    gpus: int
    tflops: float


@dataclass(frozen=True)
class HeldOutRun:
    """One run on a machine to which nothing was fitted, with the batch of its log."""

    label: str
    machine: str
    gpt: Gpt
    batch: int
    tflops: float


# Issue 67 and pull request 269 (before its change) of Tencent/PatrickStar. The batch of the first is in its log; that
# of the second follows from its seconds and TFLOPS.
HELD_OUT_RUNS = (
    HeldOutRun("0.7B on the $700 PC, sequence 128", PC, replace(SMALL["0.7B"], sequence=128), 128, 18.46),
    HeldOutRun("20B on one A100-40GB", SUPERPOD, BEYOND["20B"], 16, 88.75),
)


def points() -> list[Point]:
    """Return the published figures."""
    found = []
    for row in reference("patrickstar_published"):
        gpt = Gpt(int(row["layers"]), int(row["hidden"]), 16, VOCAB, head=False)
        found.append(Point(row["model"], gpt, int(row["gpus"]), float(row["tflops_total"])))
    return found


def errors_of(machine: Machine) -> list[float]:
    """Return the relative error of the simulation for each published point."""
    return [best_step(point.gpt, machine, point.gpus).tflops / point.tflops - 1 for point in points()]


def within(errors: list[float], percent: int) -> int:
    return sum(abs(error) <= percent / 100 for error in errors)


def rms_percent(errors: list[float]) -> float:
    return 100 * (sum(error**2 for error in errors) / len(errors)) ** 0.5


def published_table(machine: Machine) -> str:
    rows, errors = [], []
    for point in points():
        step = best_step(point.gpt, machine, point.gpus)
        errors.append(step.tflops / point.tflops - 1)
        channels, placement = step.channels, step.placement
        seconds = (channels.compute_s, channels.h2d_s, channels.d2h_s, channels.collectives_s, channels.update_s)
        shares = [f"{100 * part / channels.total_s:.0f} %" for part in seconds]
        rows.append(
            {
                "model": point.model,
                "GPUs": str(point.gpus),
                "published": f"{point.tflops:g}",
                "simulated": f"{step.tflops:.1f}",
                "error": f"{100 * errors[-1]:+.1f} %",
                "batch": str(step.batch),
                "chunk, Mi": f"{placement.chunk_numel >> 20}",
                "in margin": f"{placement.in_margin} of {placement.chunks}",
                "step, s": f"{channels.total_s:.1f}",
                **dict(zip(("compute", "H2D", "D2H", "collectives", "update"), shares, strict=True)),
            }
        )
    shares = " ".join(f"Within {most} %: {within(errors, most)} of {len(errors)}." for most in (10, 20))
    return f"{table(rows)}\n\n{shares} Root mean square: {rms_percent(errors):.1f} %.\n"


def sensitivity_table(machine: Machine) -> str:
    """Format the errors with each constant 20 % lower and higher."""
    rows = []
    for part, field in CONSTANTS:
        original = getattr(machine, part)
        row = [f"`{part}.{field}`"]
        for percent in (80, 100, 120):
            value = getattr(original, field)
            changed = original.model_copy(update={field: type(value)(value * percent / 100)})
            errors = errors_of(machine.model_copy(update={part: changed}))
            row.append(f"{rms_percent(errors):.1f} %, {within(errors, 10)} of {len(errors)}")
        rows.append(row)
    return table(rows, ["constant", "20 % lower", "unchanged", "20 % higher"])


def main() -> None:
    node = find_machine(NODE)
    gpu, host, links = node.gpu, node.host, node.links
    assert gpu and links and links.gpu_gpu and host.core_bandwidth and host.page_lock
    publish_text(
        "published",
        published=published_table(node),
        node=NODE,
        core=host.core_bandwidth / 1e9,
        memory=host.memory_bandwidth / 1e9,
        page_lock=host.page_lock / 1e9,
        gpu=gpu,
        gpu_memory=gpu.memory_bandwidth / 1e9,
        links=links,
        h2d=links.h2d / 1e9,
        d2h=links.d2h / 1e9,
        gpu_gpu=links.gpu_gpu / 1e9,
        sensitivity=sensitivity_table(node),
    )


if __name__ == "__main__":
    main()
