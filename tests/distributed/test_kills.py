"""Kills at random moments: the newest checkpoint is complete, and the resumed run has the bits of one without kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import draws

TESTS = Path(__file__).parents[1]


def check_kills(count: int, size: int, seed: int, steps: int, seconds: float) -> None:
    command = [sys.executable, "-m", "distributed.kills", str(count), "--processes", str(size)]
    command += ["--seed", str(seed), "--steps", str(steps)]
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    assert "all losses and final states were bit-identical" in done.stdout


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_few_kills(size):
    check_kills(draws(4), size, seed=1, steps=draws(24), seconds=200)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_two_hundred_kills(size):
    check_kills(100, size, seed=2, steps=24, seconds=1800)
