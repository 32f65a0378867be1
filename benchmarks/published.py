"""The paper's points: the throughput that the original PatrickStar reached, and what it could train, by simulation.

python benchmarks/published.py

Nothing is measured, so the result is the same on every machine; it is written to results/published.md. The published
figures are in reference/patrickstar_published.csv; the policy is patrickstar_v043/simulation.py, the machines are the
files in _perf_model/machines/.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from patrickstar_v043.simulation import best_step

from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.perf_model import best_estimate
from patrickstar._perf_model.workload import gpt_workload
from patrickstar.errors import BudgetError

REFERENCE = Path(__file__).parent / "reference" / "patrickstar_published.csv"
RESULT = Path(__file__).parent / "results" / "published.md"
NODE, HALF_NODE, PC, SUPERPOD = "8xV100-32GB", "8xV100-32GB-120GB", "700-dollar-pc", "8xA100-40GB"

# The original's benchmark trains a BERT classifier of a GPT's shape, embeddings for BERT's vocabulary and no head: its
# examples/model_builder.py. Its log in issue 67 counts 0.7294e9 parameters for the 0.7B.
VOCAB = 30_522

SMALL = {"0.7B": Gpt(24, 1536, 16, VOCAB, head=False)}
BEYOND = {"20B": Gpt(25, 8192, 16, VOCAB, head=False)}
"""The family's next larger shape, in the same file of the original's."""
LAYERS_OF_8192 = {"25B": 31, "30B": 37, "40B": 50}
FURTHER = {name: Gpt(layers, 8192, 16, VOCAB, head=False) for name, layers in LAYERS_OF_8192.items()}
"""The same with more layers, for what holds more."""

PAPER = {(NODE, 1): "12B", (NODE, 8): "18B", (PC, 1): "0.7B"}
"""The largest models: of the published figures the largest per number of GPUs, and the paper's $700 PC."""

FITTED = (("host", "core_bandwidth"), ("host", "memory_bandwidth"), ("host", "page_lock"))
CONSTANTS = (
    *FITTED,
    ("gpu", "matmul_tflops"),
    ("gpu", "half_rate_size"),
    ("gpu", "memory_bandwidth"),
    ("links", "h2d"),
    ("links", "d2h"),
    ("links", "gpu_gpu"),
)
"""The machine's rates, those that were fitted first."""

Fits = Callable[[Gpt, Machine, int], bool]
"""Whether a policy can train a model on so many GPUs of a machine."""


@dataclass(frozen=True)
class Point:
    """One published figure: 10^12 operations per second, of all GPUs."""

    model: str
    gpt: Gpt
    gpus: int
    tflops: float


@dataclass(frozen=True)
class Elsewhere:
    """One run on a machine that nothing was fitted to, with the one batch that its log was made with."""

    what: str
    machine: str
    gpt: Gpt
    batch: int
    tflops: float


# Issue 67 and pull request 269 (before its change) of Tencent/PatrickStar. The first names its batch; that of the
# second follows from its seconds and TFLOPS.
ELSEWHERE = (
    Elsewhere("0.7B on the $700 PC, sequence 128", PC, replace(SMALL["0.7B"], sequence=128), 128, 18.46),
    Elsewhere("20B on one A100-40GB", SUPERPOD, BEYOND["20B"], 16, 88.75),
)


def points() -> list[Point]:
    """The published figures."""
    lines = [line for line in REFERENCE.read_text().splitlines() if not line.startswith("#")]
    return [
        Point(row["model"], gpt_of(row), int(row["gpus"]), float(row["tflops_total"])) for row in csv.DictReader(lines)
    ]


def gpt_of(row: dict[str, str]) -> Gpt:
    return Gpt(int(row["layers"]), int(row["hidden"]), 16, VOCAB, head=False)


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def errors_of(machine: Machine) -> list[float]:
    """How much more than what was published the simulation says, for each point, as a part of it."""
    return [best_step(point.gpt, machine, point.gpus).tflops / point.tflops - 1 for point in points()]


def within(errors: list[float], percent: int) -> int:
    return sum(abs(error) <= percent / 100 for error in errors)


def rms_percent(errors: list[float]) -> float:
    return 100 * (sum(error**2 for error in errors) / len(errors)) ** 0.5


def published_table(machine: Machine) -> str:
    rows = []
    errors = errors_of(machine)
    for point, error in zip(points(), errors, strict=True):
        step = best_step(point.gpt, machine, point.gpus)
        channels, placement = step.channels, step.placement
        seconds = (channels.compute_s, channels.h2d_s, channels.d2h_s, channels.collectives_s, channels.update_s)
        rows.append(
            [
                point.model,
                str(point.gpus),
                f"{point.tflops:g}",
                f"{step.tflops:.1f}",
                f"{100 * error:+.1f} %",
                str(step.batch),
                f"{placement.chunk_numel >> 20}",
                f"{placement.in_margin} of {placement.chunks}",
                f"{channels.total_s:.1f}",
                *(f"{100 * part / channels.total_s:.0f} %" for part in seconds),
            ]
        )
    columns = ["model", "GPUs", "published", "simulated", "error", "batch", "chunk, Mi", "in margin", "step, s"]
    columns += ["computing", "H2D", "D2H", "collectives", "update"]
    return (
        table(columns, rows)
        + f"\nWithin 10 %: {within(errors, 10)} of {len(errors)}. Within 20 %: {within(errors, 20)} of {len(errors)}. "
        + f"Root mean square: {rms_percent(errors):.1f} %.\n"
    )


def sensitivity_table(machine: Machine) -> str:
    """What the errors are with one constant a fifth lower or higher."""
    rows = []
    for part, field in CONSTANTS:
        whole = getattr(machine, part)
        row = [f"`{part}.{field}`"]
        for percent in (80, 100, 120):
            value = getattr(whole, field)
            other = whole.model_copy(update={field: type(value)(value * percent / 100)})
            errors = errors_of(machine.model_copy(update={part: other}))
            row.append(f"{rms_percent(errors):.1f} %, {within(errors, 10)} of {len(errors)}")
        rows.append(row)
    return table(["constant", "a fifth less", "as it is", "a fifth more"], rows)


def elsewhere_table() -> str:
    rows = []
    for run in ELSEWHERE:
        step = best_step(run.gpt, find_machine(run.machine), 1, batches=(run.batch,))
        error = step.tflops / run.tflops - 1
        rows.append([run.what, str(run.batch), f"{run.tflops:g}", f"{step.tflops:.1f}", f"{100 * error:+.1f} %"])
    return table(["run", "batch", "told", "simulated", "error"], rows)


def original_fits(gpt: Gpt, machine: Machine, gpus: int) -> bool:
    try:
        best_step(gpt, machine, gpus)
    except BudgetError:
        return False
    return True


def largest(family: dict[str, Gpt], machine: Machine, gpus: int, fits: Fits) -> str:
    """The name of the largest model that fits, with a mark if it is the family's last."""
    found = [name for name, gpt in family.items() if fits(gpt, machine, gpus)]
    return (found[-1] + (" or more" if found[-1] == list(family)[-1] else "")) if found else "none"


def claims() -> Iterator[tuple[Machine, int, dict[str, Gpt]]]:
    """The paper's questions: a machine, how many of its GPUs, and the models in question."""
    family = {point.model: point.gpt for point in points()} | BEYOND | FURTHER
    for name in (NODE, HALF_NODE):
        for gpus in (1, 2, 4, 8):
            yield find_machine(name), gpus, family
    short = {name: replace(gpt, sequence=128) for name, gpt in (SMALL | family).items()}
    yield find_machine(PC), 1, short


def claims_table(own: Fits | None = None) -> str:
    """Largest models: the paper's, the original policy's, and those of the own policy, if it is given."""
    rows = []
    for machine, gpus, family in claims():
        simulated = largest(family, machine, gpus, original_fits)
        ours = "" if own is None else largest(family, machine, gpus, own)
        rows.append([machine.name, str(gpus), PAPER.get((machine.name, gpus), ""), simulated, ours])
    return table(["machine", "GPUs", "paper", "simulated, original policy", "simulated, own policy"], rows)


def own_fits(gpt: Gpt, machine: Machine, gpus: int) -> bool:
    """This package's policy: shares of the model data, everything overlapped (`perf_model.py`)."""
    try:
        best_estimate(partial(gpt_workload, gpt), machine, gpus, checkpointing=(True,))
    except BudgetError:
        return False
    return True


def main(own: Fits = own_fits) -> None:
    node = find_machine(NODE)
    gpu, host, links = node.gpu, node.host, node.links
    assert gpu and links and links.gpu_gpu and host.core_bandwidth and host.page_lock
    text = f"""# published

What the original PatrickStar (v0.4.3) reached on 1 and 8 V100 (arXiv 2108.05818), and what the simulation of its policy
(`patrickstar_v043/simulation.py`) says: 14 bytes per parameter, its margins, its movement without overlap, the best
batch of 4, 8, 16, 32 and 64 sequences per GPU. TFLOPS of all GPUs, 8 operations per parameter and token. Published
values are read from charts, to about 1 %. *In margin*: chunks per process whose optimizer states are on the GPU.

{published_table(node)}
One set of constants serves all points; `_perf_model/machines/{NODE}.toml` says where each comes from. Three are
fitted to the 16 figures, all at once:

- a core streams {host.core_bandwidth / 1e9:g} GB/s in an update,
- all together {host.memory_bandwidth / 1e9:g} GB/s, half of it for one process, whose memory is on one of two sockets,
- a process evicts {host.page_lock / 1e9:g} GB/s into memory that is page-locked for each chunk anew.

The rest are measurements by others, or data sheets:

- matrix products of size n run at {gpu.matmul_tflops:g} n / (n + {gpu.half_rate_size}) TFLOPS,
- GPU memory at {gpu.memory_bandwidth / 1e9:g} GB/s,
- PCIe at {links.h2d / 1e9:g} GB/s up and {links.d2h / 1e9:g} down, shared by {links.shared_by} GPUs,
- collectives at {links.gpu_gpu / 1e9:g} GB/s per GPU.

The root mean square of the errors, and how many are within 10 %, if one constant were another:

{sensitivity_table(node)}
What decides: on one GPU, 12B runs at half the batch of 10B, since the checkpoints of 32 sequences leave no room for
chunks in the 80 % of the GPU that may be used. One process has one socket's memory; eight have both, but one thread
each, and four of twelve cores idle. At the best batch, the margins of eight GPUs hold optimizer states of all models
but 10B, that of one GPU those of 1B alone.

## Not fitted

Two runs of the original on other machines, from logs that its authors published, with the same policy and the machines'
own files:

{elsewhere_table()}
The second machine's rate of eviction is read from the same profiles as its throughput; nothing else is.

## Largest models

The family is the published figures' models, then {", ".join(BEYOND)}, the next shape that the original's scripts name,
then {", ".join(FURTHER)}, the same with more layers. On the PC 0.7B comes first, and a sequence has 128 tokens. An
empty field: no figure in the sources at hand. The own policy is `perf_model.py`; it has trained on one device
only so far.

{claims_table(own)}
On the PC the policy's own rule, four fifths of the memory for chunks, admits 1B. Its log has 0.7B at 97 % of the
memory: what lies beside chunks, which the rule doesn't count, is more than a fifth of 16 GB.
"""
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
