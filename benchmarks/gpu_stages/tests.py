"""Files of tests/cuda, and the tiny model for the sanitizers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import patrickstar  # noqa: F401  before the program's turn
from gpu_stages import tiny
from gpu_stages.record import Record
from patrickstar._tiers.hardware import Hardware

ROOT = Path(__file__).parents[2]
TEST_LIMIT_S = 60
"""Seconds after which a test ends its process with the traces of all threads."""


class _Reporter:
    """Plugin of pytest that prints a failure when it happens, and counts."""

    def __init__(self, record: Record) -> None:
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.reasons: set[str] = set()
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
            lines = report.longreprtext.strip().splitlines()
            errors = [line for line in lines if line.startswith("E ")]
            self._record.check(report.nodeid, False, " / ".join(errors or lines[-1:])[:300])
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons.add(str(report.longrepr[2])[:120])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(f"{report.nodeid} can't be collected:\n{report.longreprtext}", flush=True)
            self._record.check(f"{report.nodeid} is collected", False, report.longreprtext[-300:])


def run(record: Record, options: SimpleNamespace) -> None:
    """Run files of tests/cuda, with further `arguments` of pytest."""
    reporter = _Reporter(record)
    files = [str(ROOT / "tests" / "cuda" / name) for name in options.files]
    code = pytest.main(
        [
            *("-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "-W", "default", "--rootdir", str(ROOT)),
            *("-o", f"faulthandler_timeout={TEST_LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"),
            *(*options.arguments, *files),
        ],
        plugins=[reporter],
    )
    text = ", ".join(f"{count} {outcome}" for outcome, count in reporter.counts.items())
    # Exit code 5: no tests were collected.
    passed = code in (0, 5) and not reporter.counts["failed"]
    record.check(", ".join(options.files), passed, "; ".join([text, *sorted(reporter.reasons)]))
    sys.exit(int(not passed))


class _NotedEvent(torch.Event):
    """Event that PyTorch's sanitizer sees pass: it knows that the host has waited for an event, not that it asked."""

    def query(self) -> bool:
        passed = super().query()
        if passed:
            self.synchronize()
        return passed


def train_tiny(record: Record, options: SimpleNamespace) -> None:
    """Train the tiny model, whose chunks move in every step, and compare it with plain PyTorch."""
    torch.Event = _NotedEvent  # type: ignore[misc]
    torch.use_deterministic_algorithms(True)
    tiny.compare(options.device, Hardware(torch.device(options.device)))
    record.check("the tiny model is exact", True)
