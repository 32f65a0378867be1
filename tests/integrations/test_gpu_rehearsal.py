"""`make gpu DEVICE=cpu`: small versions of all stages of the GPU run."""

import subprocess
import sys
from pathlib import Path

from sampling import nightly

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
NIGHTLY = ("tests", "bits", "sanitizer", "resident", "large", "blocking")
"""Stages of `make nightly` only: they run tests that `make test` runs too, or the code of the others."""


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True)


def stages():
    return [line.split()[0] for line in run("--list").stdout.splitlines()]


def test_stages_run_and_write_their_results(tmp_path):
    names = [name for name in stages() if nightly() or name not in NIGHTLY]
    done = run(*names, "--device", "cpu", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["gpu-cpu.md", *(f"gpu_{name}-cpu.md" for name in names)]
    )
    summary = (tmp_path / "gpu-cpu.md").read_text()
    for name in names:
        text = (tmp_path / f"gpu_{name}-cpu.md").read_text()
        (result,) = [line for line in text.splitlines() if line.startswith("Result: ")]
        assert result.startswith("Result: ran in") and " 0 failed;" in result, text
        assert f"| {name} | {result.removeprefix('Result: ')} |" in summary
        assert "Machine: " in text and text.count("\n| ") > 1, f"{name} found nothing:\n{text}"


def test_a_stage_that_exceeds_its_time_limit_is_reported_as_failed(tmp_path):
    done = run("versions", "micro", "--device", "cpu", "--minutes", "0.002", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "FAILED: ended at its limit of 0.1" in (tmp_path / "gpu_versions-cpu.md").read_text()
    assert "FAILED: no time left" in (tmp_path / "gpu_micro-cpu.md").read_text()


def test_invalid_arguments_are_rejected():
    for arguments, message in (
        (["tets"], "unknown stage 'tets': the stages are versions, tests"),
        (["--minutes", "0"], "--minutes must be more than 0"),
        (["--device", "tpu"], "--device must be cuda or cpu, not 'tpu'"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
