"""Ray Train: examples/ray_train.py trains in two workers, and resumes after one has ended."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_train.py"

pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")


def digest(folder: Path, *options: str) -> str:
    """Return the digest of the parameters that the example prints."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--steps", "12", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "  parameters " in run.stdout, run.stdout + run.stderr
    return run.stdout.split("  parameters ")[1].split()[0]


@pytest.mark.slow
def test_a_failed_worker_changes_no_bit(tmp_path):
    whole = digest(tmp_path / "whole")
    assert digest(tmp_path / "failed", "--fail-after", "7") == whole
