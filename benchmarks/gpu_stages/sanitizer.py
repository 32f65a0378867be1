"""Stream races and out-of-bounds accesses, checked by PyTorch's CUDA sanitizer and NVIDIA's compute-sanitizer."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from gpu_stages.logged import run_logged
from gpu_stages.record import Record

TRAIN = (sys.executable, "-m", "gpu_stages.tiny")
EXACT = "every step was exact"
LIMIT_S = 90


def run(record: Record, options: argparse.Namespace) -> None:
    """Train the tiny model under each sanitizer."""
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if options.device == "cpu":
        _check(record, "the tiny model trains", [*TRAIN, options.device], settings, unwanted="CSAN detected")
        return
    # CSAN compares addresses of whole tensors; it would miss the second parameter of a chunk. The tiny model has one.
    _check(
        record,
        "no race between streams (TORCH_CUDA_SANITIZER)",
        [*TRAIN, options.device],
        settings | {"TORCH_CUDA_SANITIZER": "1"},
        unwanted="CSAN detected",
    )
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        record.fact("compute-sanitizer", "not installed")
        return
    _check(
        record,
        "no access out of bounds (compute-sanitizer)",
        # cudaErrorNotReady from an event query is no error.
        [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", *TRAIN, options.device],
        settings | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        unwanted="Invalid __",
    )


def _check(record: Record, label: str, command: list[str], settings: dict[str, str], unwanted: str) -> None:
    done = run_logged(command, os.environ | settings, limit_s=LIMIT_S, cwd=os.getcwd())
    passed = done.returncode == 0 and unwanted not in done.text and EXACT in done.text
    lines = done.text.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if unwanted in line), max(0, len(lines) - 3))
    note = f"{done.problem or 'exit code 0'}: {' / '.join(lines[first : first + 4])[:400]}"
    record.check(label, passed, "" if passed else note)
