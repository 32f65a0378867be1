"""Run all GPU tests and benchmarks in forty minutes: stages in order of value, each in a separate process.

python benchmarks/gpu.py [STAGE ...] [--device cuda] [--minutes 40] [--output DIRECTORY] [--wheels DIRECTORY]
python benchmarks/gpu.py --list

A stage that fails or reaches its time limit keeps its results so far and reports the reason; then the next one runs.
Each writes `gpu_STAGE-DEVICE.md` into the output directory; `gpu-DEVICE.md` summarizes all stages with such a file.
`--device cpu` is a smoke test: every stage at a small size, in about a minute.

No network is needed. If the package is not installed for the running Python, it is built into `build/gpu-site`,
together with the wheels in `--wheels`, for packages missing on the machine.
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
from patrickstar._memory.machine_name import machine_name
if sys.argv[2] == "complete":
    from patrickstar._kernels.cpp_backend import CppBackend
    CppBackend.load()
print(f"{machine_name(torch.device(sys.argv[1]))}; PyTorch {torch.__version__}; Python {sys.version.split()[0]}")
"""


@dataclass(frozen=True)
class Stage:
    """One stage of the run.

    Args:
        name: Name on the command line.
        minutes: Time limit.
        description: Short description of its results.
        function: Its module in `gpu_stages` and function, as "module:function".
    """

    name: str
    minutes: float
    description: str
    function: str


STAGES = {
    stage.name: stage
    for stage in (
        Stage("versions", 1.5, "machine, packages, memory outside the allocator", "versions:run"),
        Stage("tests", 6.5, "tests/cuda, one file at a time", "tests:run"),
        Stage("sanitizer", 4, "races between streams, out-of-bounds accesses", "sanitizer:run"),
        Stage("bits", 3, "bit-exactness with delayed copies, other alignments, and of the update", "bits:run"),
        Stage("micro", 5, "copies, page-locking of host memory, launches, bookkeeping", "micro:run"),
        Stage("resident", 5, "whole steps if everything fits, against plain PyTorch", "training:resident"),
        Stage("capped", 7, "3 billion parameters within 24 GiB, against FSDP2 and DeepSpeed", "training:capped"),
        Stage("large", 5, "8 billion parameters within 24 GiB", "training:large"),
        Stage("blocking", 3, "tests/cuda with every launch blocking", "tests:run_blocking"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """End of a stage; `problem` is empty if it completed."""

    stage: Stage
    seconds: float
    problem: str
    tail: str


def main() -> int:
    """Run the requested stages; return 1 if a stage or one of its checks failed."""
    options = arguments()
    if options.list:
        for stage in STAGES.values():
            print(f"{stage.name:<10} {stage.minutes:>4g} min  {stage.description}")
        return 0
    if options.child:
        run_child(options)
        return 0
    output = options.output or (RESULTS if options.device != "cpu" else ROOT / "build" / "gpu-smoke-test")
    output.mkdir(parents=True, exist_ok=True)
    environment, machine = prepare(options)
    print(f"Machine: {machine}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    passed = True
    for name in options.stages or STAGES:
        remaining_s = deadline - time.monotonic()
        record = Record(output / f".{name}.jsonl")
        record.path.unlink(missing_ok=True)
        outcome = run_stage(STAGES[name], options, record, environment, remaining_s)
        passed &= write(outcome, record, machine, options, output)
        record.path.unlink(missing_ok=True)
    print(summarize(output, options.device))
    return 0 if passed else 1


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"any of {', '.join(STAGES)}; default: all")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a smoke test")
    parser.add_argument("--minutes", type=float, default=40, help="time limit of all stages together")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results; build/gpu-smoke-test on a CPU")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="wheels of missing packages")
    parser.add_argument("--list", action="store_true", help="list the stages with their time limits")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}: the stages are {', '.join(STAGES)}")
    if options.minutes <= 0:
        parser.error(f"--minutes must be more than 0, not {options.minutes:g}")
    if options.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device must be cuda or cpu, not {options.device!r}")
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
    probed = probe(options.device, environment, complete=True)
    if probed.returncode == 0:
        return environment, probed.stdout.strip()
    wheels = sorted(map(str, options.wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    print(f"building the package into {SITE.relative_to(ROOT)}, with {len(wheels)} wheels", flush=True)
    subprocess.run([*command, "--upgrade", "--target", str(SITE), *wheels, str(ROOT)], check=True)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(SITE)])
    probed = probe(options.device, environment, complete=False)  # The stage `versions` reports a missing kernel.
    if probed.returncode != 0:
        sys.exit(
            f"{sys.executable} cannot use the package: {probed.stderr.strip().splitlines()[-1]}\n"
            f"Put wheels of missing packages into {options.wheels}, or run `make check`, which installs all."
        )
    return environment, probed.stdout.strip()


def probe(device: str, environment: dict[str, str], *, complete: bool) -> subprocess.CompletedProcess[str]:
    """Import the package in a separate process; if `complete`, also load its C++ kernel."""
    command = [sys.executable, "-c", PROBE, device, "complete" if complete else ""]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_stage(
    stage: Stage, options: argparse.Namespace, record: Record, environment: dict[str, str], remaining_s: float
) -> Outcome:
    """Run a stage in a separate process, and kill it with all its children at its time limit."""
    limit_s = min(60 * stage.minutes, remaining_s)
    print(f"\n== {stage.name}: {stage.description} (at most {limit_s:.0f} s)", flush=True)
    if limit_s <= 0:
        return Outcome(stage, 0.0, "no time left", "")
    start = time.monotonic()
    command = [sys.executable, __file__, stage.name, "--device", options.device, "--child", str(record.path)]
    done = run_logged(command, environment, limit_s=limit_s, cwd=str(ROOT))
    tail = "\n".join(done.text.splitlines()[-TAIL_LINES:]) if done.problem else ""
    return Outcome(stage, time.monotonic() - start, done.problem, tail)


def write(outcome: Outcome, record: Record, machine: str, options: argparse.Namespace, output: Path) -> bool:
    """Write the results of a stage; return whether it completed and all checks passed."""
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
        f"{stage.description[:1].upper()}{stage.description[1:]}.",
        f"Machine: {machine}; {date.today()}.",
        RESULT + "; ".join(parts) + ".",
    ]
    if facts:
        lines.append(table(["fact", "value"], [[fact.label, fact.text] for fact in facts]))
    if checks:
        results = [[check.label, "passed" if check.passed else "FAILED", check.note] for check in checks]
        lines.append(table(["check", "result", "note"], results))
    if figures:
        columns = ["figure", "measured", "predicted", "limit", "unit", "note"]
        rows = [
            [f.label, *map(number, (f.measured, f.predicted, f.limit)), f.unit, ("MISS. " if f.misses else "") + f.note]
            for f in figures
        ]
        lines.append(table(columns, rows))
    if outcome.tail:
        lines.append(f"End of its output:\n\n```\n{outcome.tail}\n```")
    (output / f"gpu_{stage.name}-{kind(options.device)}.md").write_text("\n\n".join(lines) + "\n")
    return not outcome.problem and not failed


def summarize(output: Path, device: str) -> str:
    """Write one table with the results of all stages that have a file; return it."""
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
    """Return the type of a device."""
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
    """Format a number with four digits; None as an empty string."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
