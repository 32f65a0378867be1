"""Tests in a process of their own, since libraries read variables of the environment when they are imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import NIGHTLY, nightly

VARIABLES = {"TRITON_INTERPRET": "1", "ATEN_CPU_CAPABILITY": "default"}
INTERPRETED = {"triton": "interpreted_triton.py", "liger_kernel": "interpreted_liger.py"}
"""Files by the package that they need."""
FILES = ["torch_without_avx.py", *(file for name, file in INTERPRETED.items() if importlib.util.find_spec(name))]


@pytest.mark.long("imports torch, and interprets kernels: a fifth of a second for each program of a sum")
@pytest.mark.parametrize("selected", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted_kernels_and_operators_without_vector_instructions_give_the_bits_of_the_list(selected):
    if selected == "slow" and len(FILES) == 1:
        pytest.skip("Triton is not installed: pip install triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selected, *FILES]
    command += ["--hypothesis-profile", NIGHTLY] if nightly() else []
    place = {"cwd": Path(__file__).parent, "env": os.environ | VARIABLES}
    result = subprocess.run(command, **place, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr
