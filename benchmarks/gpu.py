"""All that is to be learnt from a GPU, in forty minutes: stages, most valuable first, each in a process of its own.

python benchmarks/gpu.py [STAGE ...] [--device cuda] [--minutes 40] [--output DIRECTORY] [--wheels DIRECTORY]
python benchmarks/gpu.py --list

A stage that fails, or runs into its time limit, leaves what it had found and says why; the next one runs. Each writes
`gpu_STAGE-DEVICE.md` into the output directory, and `gpu-DEVICE.md` there sums up all stages that have left a file.
`--device cpu` is the rehearsal: every stage in miniature, in a minute or so.

Nothing is fetched from a network. Where the package is not installed for the Python that runs this, it is built into
`build/gpu-site`, together with the wheels that lie in `--wheels`: for packages that the machine lacks.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path

from gpu_stages.logged import run_logged
from gpu_stages.record import Check, Fact, Figure, Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SITE = ROOT / "build" / "gpu-site"
TAIL_LINES = 40
RESULT = "Result: "

PROBE = """
import sys, torch
from patrickstar._cli.machine_name import machine_name
if sys.argv[2] == "complete":
    from patrickstar._kernels.cpp_backend import CppBackend
    CppBackend.load()
print(f"{machine_name(torch.device(sys.argv[1]))}; PyTorch {torch.__version__}; Python {sys.version.split()[0]}")
"""


@dataclass(frozen=True)
class Stage:
    """One part of the run.

    Args:
        name: its name on the command line.
        minutes: its time limit.
        what: what it finds out.
        function: where it is: a module of `gpu_stages`, and a function there.
    """

    name: str
    minutes: float
    what: str
    function: str


STAGES = {
    stage.name: stage
    for stage in (
        Stage("versions", 1.5, "machine, packages, memory outside of the allocator", "versions:run"),
        Stage("tests", 6.5, "tests/cuda, file by file", "tests:run"),
        Stage("sanitizer", 4, "races between streams, accesses out of bounds", "sanitizer:run"),
        Stage("bits", 3, "bits under delayed copies, at other alignments, of the update", "bits:run"),
        Stage("micro", 5, "copies, locking of host memory, launches, bookkeeping", "micro:run"),
        Stage("resident", 5, "whole steps where everything fits, beside plain PyTorch", "training:resident"),
        Stage("capped", 7, "3 billion parameters within 24 GiB, beside FSDP2 and DeepSpeed", "training:capped"),
        Stage("large", 5, "8 billion parameters within 24 GiB", "training:large"),
        Stage("blocking", 3, "tests/cuda with every launch blocking", "tests:run_blocking"),
    )
}


@dataclass(frozen=True)
class Agreement:
    """The end of a stage: `problem` is empty if it ran to its end."""

    stage: Stage
    seconds: float
    problem: str
    tail: str


def main() -> int:
    """Run the stages asked for; return 1 if one of them failed or found that something does not hold."""
    options = arguments()
    if options.list:
        for stage in STAGES.values():
            print(f"{stage.name:<10} {stage.minutes:>4g} min  {stage.what}")
        return 0
    if options.child:
        run_child(options)
        return 0
    output = options.output or (RESULTS if options.device != "cpu" else ROOT / "build" / "gpu-rehearsal")
    output.mkdir(parents=True, exist_ok=True)
    environment, machine = prepare(options)
    print(f"Machine: {machine}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    good = True
    for name in options.stages or STAGES:
        left = deadline - time.monotonic()
        record = Record(output / f".{name}.jsonl")
        record.path.unlink(missing_ok=True)
        outcome = run_stage(STAGES[name], options, record, environment, left)
        good &= write(outcome, record, machine, options, output)
        record.path.unlink(missing_ok=True)
    print(summarize(output, options.device))
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; by default all")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the rehearsal")
    parser.add_argument("--minutes", type=float, default=40, help="for all stages together")
    parser.add_argument("--output", type=Path, help="by default benchmarks/results; build/gpu-rehearsal on a CPU")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="of packages that the machine lacks")
    parser.add_argument("--list", action="store_true", help="list the stages with their time limits")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}: the stages are {', '.join(STAGES)}")
    if options.minutes <= 0:
        parser.error(f"--minutes has to be more than 0, not {options.minutes:g}")
    if options.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device is cuda or cpu, not {options.device!r}")
    options.small = options.device == "cpu"
    return options


def run_child(options: argparse.Namespace) -> None:
    """Run one stage in this process."""
    (name,) = options.stages
    module, function = STAGES[name].function.split(":")
    getattr(import_module(f"gpu_stages.{module}"), function)(
        Record(options.child, predicting=not options.small), options
    )


def prepare(options: argparse.Namespace) -> tuple[dict[str, str], str]:
    """Make the package importable; return the environment of the stages, and the machine's name."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    found = probe(options.device, environment, complete=True)
    if found.returncode == 0:
        return environment, found.stdout.strip()
    wheels = sorted(map(str, options.wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    print(f"building the package into {SITE.relative_to(ROOT)}, with {len(wheels)} wheels", flush=True)
    subprocess.run([*command, "--upgrade", "--target", str(SITE), *wheels, str(ROOT)], check=True)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(SITE)])
    found = probe(options.device, environment, complete=False)  # The stage `versions` tells of a missing kernel.
    if found.returncode != 0:
        sys.exit(
            f"the package can't be used by {sys.executable}: {found.stderr.strip().splitlines()[-1]}\n"
            f"Put wheels of missing packages into {options.wheels}, or run `make check`, which installs all."
        )
    return environment, found.stdout.strip()


def probe(device: str, environment: dict[str, str], *, complete: bool) -> subprocess.CompletedProcess[str]:
    """Try the package in a process of its own; `complete` with its C++ kernel."""
    command = [sys.executable, "-c", PROBE, device, "complete" if complete else ""]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_stage(
    stage: Stage, options: argparse.Namespace, record: Record, environment: dict[str, str], left_s: float
) -> Agreement:
    """Run a stage in a process of its own, and end it, with all its children, at its limit."""
    limit_s = min(60 * stage.minutes, left_s)
    print(f"\n== {stage.name}: {stage.what} (at most {limit_s:.0f} s)", flush=True)
    if limit_s <= 0:
        return Agreement(stage, 0.0, "no time was left for it", "")
    start = time.monotonic()
    command = [sys.executable, __file__, stage.name, "--device", options.device, "--child", str(record.path)]
    done = run_logged(command, environment, limit_s=limit_s, cwd=str(ROOT))
    tail = "\n".join(done.text.splitlines()[-TAIL_LINES:]) if done.problem else ""
    return Agreement(stage, time.monotonic() - start, done.problem, tail)


def write(outcome: Agreement, record: Record, machine: str, options: argparse.Namespace, output: Path) -> bool:
    """Write what a stage has found; return whether it ran to its end and everything holds."""
    entries = record.read()
    figures = [entry for entry in entries if isinstance(entry, Figure)]
    checks = [entry for entry in entries if isinstance(entry, Check)]
    facts = [entry for entry in entries if isinstance(entry, Fact)]
    failed = [check for check in checks if not check.passed]
    missed = [figure for figure in figures if figure.misses]
    stage = outcome.stage
    parts = [
        f"{'FAILED: ' + outcome.problem if outcome.problem else 'ran'} in {outcome.seconds:.0f} s",
        f"{len(checks) - len(failed)} checks passed and {len(failed)} failed",
        f"{len(figures)} figures, of which {len(missed)} miss their prediction by more than half",
    ]
    lines = [
        f"# gpu: {stage.name}",
        f"{stage.what[:1].upper()}{stage.what[1:]}.",
        f"Machine: {machine}; {date.today()}.",
        RESULT + "; ".join(parts) + ".",
    ]
    if facts:
        lines.append(table(["what", ""], [[fact.what, fact.text] for fact in facts]))
    if checks:
        lines.append(table(["check", "", ""], [[c.what, "passed" if c.passed else "FAILED", c.note] for c in checks]))
    if figures:
        columns = ["figure", "measured", "predicted", "limit", "unit", "note"]
        rows = [
            [f.what, *map(number, (f.measured, f.predicted, f.limit)), f.unit, ("MISS. " if f.misses else "") + f.note]
            for f in figures
        ]
        lines.append(table(columns, rows))
    if outcome.tail:
        lines.append(f"The end of what it printed:\n\n```\n{outcome.tail}\n```")
    (output / f"gpu_{stage.name}-{kind(options.device)}.md").write_text("\n\n".join(lines) + "\n")
    return not outcome.problem and not failed


def summarize(output: Path, device: str) -> str:
    """Write one table over the results of all stages that are there; return it."""
    rows, machines = [], set()
    for name in STAGES:
        path = output / f"gpu_{name}-{kind(device)}.md"
        lines = path.read_text().splitlines() if path.exists() else []
        machines.update(line for line in lines if line.startswith("Machine: "))
        rows.append([name, next((line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)), "not run")])
    text = "\n\n".join(["# gpu", *sorted(machines), table(["stage", "result"], rows)]) + "\n"
    (output / f"gpu-{kind(device)}.md").write_text(text)
    return text


def kind(device: str) -> str:
    """Return a device's type."""
    return device.split(":")[0]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    cells = [
        columns,
        ["---"] * len(columns),
        *([cell.replace("|", "/").replace("\n", " ") for cell in r] for r in rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def number(value: float | None) -> str:
    """Return a number with four digits, or nothing."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
