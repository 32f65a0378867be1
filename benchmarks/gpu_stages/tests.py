"""Stage that runs each file of tests/cuda in a separate process."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from gpu_stages.logged import run_logged
from gpu_stages.record import Record

ROOT = Path(__file__).parents[2]
MAX_FAILURES = 20
LIMIT_S = 120
"""Time limit of one file."""


def run(record: Record, options: argparse.Namespace) -> None:
    """Run every file of tests/cuda."""
    run_files(record, options, {})


def run_blocking(record: Record, options: argparse.Namespace) -> None:
    """Run every file with blocking launches, so that an error is raised by the operation that caused it."""
    environment = {"CUDA_LAUNCH_BLOCKING": "1"}
    if options.small:
        file = ROOT / "tests" / "cuda" / "test_triton_cuda.py"
        _run_pytest(record, file.name, [str(file)], environment)
        return
    run_files(record, options, environment)


def run_files(record: Record, options: argparse.Namespace, environment: dict[str, str]) -> None:
    """Run pytest over each file; one check per file, and one more per test that failed."""
    files = sorted((ROOT / "tests" / "cuda").glob("test_*.py"))
    assert files, "tests/cuda has no tests"
    if options.small:
        # Smoke test: all tests can be collected.
        _run_pytest(record, "tests/cuda, collected", [*map(str, files), "--collect-only"], environment)
        return
    for file in files:
        _run_pytest(record, file.name, [str(file)], environment)


def _run_pytest(record: Record, label: str, arguments: list[str], environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.perf_counter()
        command = [
            *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default", "--tb=short", "-rN"),
            *("-o", "faulthandler_timeout=60", f"--maxfail={MAX_FAILURES}", f"--junit-xml={report}", *arguments),
        ]
        done = run_logged(command, os.environ | environment, limit_s=LIMIT_S, cwd=str(ROOT))
        duration_s = time.perf_counter() - start
        if not report.exists():
            record.check(label, False, f"{done.problem or 'no report'}: {_last_line(done.text)}")
            return
        suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    bad = [(case, fault) for case in cases for fault in (*case.findall("failure"), *case.findall("error"))]
    skipped = [fault for case in cases for fault in case.findall("skipped")]
    passed = len(cases) - len(bad) - len(skipped)
    note = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped in {duration_s:.0f} s"
    reasons = sorted({(fault.get("message") or "")[:120] for fault in skipped})
    # Exit code 5: no tests were collected.
    record.check(label, not bad and done.returncode in (0, 5), "; ".join([note, *reasons]))
    for case, fault in bad:
        record.check(f"{label}: {case.get('name')}", False, (fault.get("message") or "")[:300])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no output"
