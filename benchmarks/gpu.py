"""Test and measure on a GPU, in three calls of thirteen minutes together.

python benchmarks/gpu.py [CALL ...] [--device cuda] [--minutes M] [--output DIRECTORY] [--wheels DIRECTORY]
python benchmarks/gpu.py --list

A call starts all of its programs at once; each imports what it needs and waits for its turn. One that fails prints its
traceback when it happens, and costs its own time only. Results are written as they come: `gpu-CALL-DEVICE.jsonl`, with
a table of them in `gpu-CALL-DEVICE.md`, and `gpu-steps-RUN.jsonl`, two recorded steps for `patrickstar report`. Called
again with the same output directory, a call runs only the programs that have not passed.

`--device cpu` rehearses all calls at a small size.

No network is needed. If the package is not installed for the running Python, the wheels in `--wheels` are installed
into `build/gpu-site`, with this package if it is not among them; `benchmarks/gpu_wheels.py` collects them.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from gpu_stages.calls import CALLS, turns_of
from gpu_stages.results import Results
from gpu_stages.turns import run_turns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SITE = ROOT / "build" / "gpu-site"

PROBE = """
import sys, torch
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._hardware.machine_name import machine_name
CppBackend.load()
print(f"{machine_name(torch.device(sys.argv[1]))}; PyTorch {torch.__version__}; Python {sys.version.split()[0]}")
"""


def main() -> int:
    """Run the calls; return 1 if a program or one of its checks failed."""
    options = arguments()
    if options.list:
        for call in CALLS.values():
            print(f"{call.name:<6} {call.minutes:>2g} min  {call.description}")
        return 0
    output = (options.output or (RESULTS if options.device != "cpu" else ROOT / "build" / "gpu-trial")).resolve()
    output.mkdir(parents=True, exist_ok=True)
    environment, machine = prepare(options.device, options.wheels)
    print(f"Machine: {machine}", flush=True)
    passed, summaries = True, []
    for name in options.calls or CALLS:
        call = CALLS[name]
        path = output / f"gpu-{name}-{options.device.split(':')[0]}.jsonl"
        results = Results(path, machine, f"gpu: {call.description}")
        turns = [
            [program for program in turn if not results.passed(program.name)]
            for turn in turns_of(call, options.device, output)
        ]
        limit_s = 60 * (options.minutes or call.minutes)
        print(f"\n== {name}: {call.description} (at most {limit_s:.0f} s)", flush=True)
        run_turns(turns, environment, limit_s, results.add)
        results.write()
        passed &= all(results.passed(program.name) for turn in turns for program in turn)
        summaries.append(f"{name}:\n{results.summary()}")
    print("\n" + "\n\n".join(summaries))
    return 0 if passed else 1


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"any of {', '.join(CALLS)}; default: all")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a small trial")
    parser.add_argument("--minutes", type=float, help="time limit of each call; default: see --list")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results; build/gpu-trial on a CPU")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="wheels of missing packages")
    parser.add_argument("--list", action="store_true", help="list the calls with their time limits")
    options = parser.parse_args()
    unknown = [name for name in options.calls if name not in CALLS]
    if unknown:
        parser.error(f"unknown call {unknown[0]!r}: the calls are {', '.join(CALLS)}")
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes must be more than 0, not {options.minutes:g}")
    if options.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device must be cuda or cpu, not {options.device!r}")
    return options


def prepare(device: str, folder: Path) -> tuple[dict[str, str], str]:
    """Make the package importable; return the environment of the programs, and the machine's name."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    probed = probe(device, environment)
    if probed.returncode != 0:
        install(sorted(folder.glob("*.whl")))
        # Before other paths: an older version of a package may be installed.
        environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *paths])
        probed = probe(device, environment)
    if probed.returncode != 0:
        sys.exit(
            f"{sys.executable} cannot use the package: {probed.stderr.strip().splitlines()[-1]}\n"
            f"Put wheels of missing packages into {folder} (make wheels FOLDER={folder}), or run `make check`, which "
            f"installs all."
        )
    return environment, probed.stdout.strip()


def install(wheels: list[Path]) -> None:
    """Install wheels, and this package if it is not among them, into a directory; the next call finds them there."""
    own = [] if any(wheel.name.startswith("patrickstar-") for wheel in wheels) else [ROOT]
    content = "".join(f"{wheel.name} {wheel.stat().st_mtime_ns}\n" for wheel in wheels)
    note = SITE / "wheels.txt"
    if not own and note.exists() and note.read_text() == content:
        return
    print(f"installing {len(wheels)} wheels into {SITE.relative_to(ROOT)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    command += ["--no-compile", "--upgrade", "--target", str(SITE)]
    subprocess.run([*command, *map(str, [*wheels, *own])], check=True)
    note.write_text(content)


def probe(device: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Import the package in a separate process, load its C++ kernel, and print the machine's name."""
    return subprocess.run([sys.executable, "-c", PROBE, device], env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
