"""Processor time of tests: of each, of each file and of the run, printed at its end."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

LONGEST = 20
"""Tests that are listed."""
LIMIT_S = 360
"""Seconds that `make test` may take on two processors."""
SHARE = 0.02
"""Part of the limit from which a test needs a reason: `@pytest.mark.long("reason")`."""


def processor_s() -> float:
    """Return the seconds on a processor of this process, its fork server, and the children of both that have ended."""
    seconds = sum(os.times()[:4])
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:  # tests of several processes fork them from it
        with suppress(psutil.Error):
            seconds += sum(psutil.Process(server).cpu_times()[:4])
    return seconds


class Times:
    """Plugin that measures tests, in each worker, and reports them where the run is controlled.

    Args:
        table: File for the seconds of each file and test; None: none is written.
    """

    def __init__(self, table: str | None) -> None:
        self._table = table
        self._tests: dict[str, tuple[float, float]] = {}
        self._reasons: dict[str, str] = {}
        self._began, self._collected_s = time.monotonic(), 0.0

    def pytest_collection_finish(self) -> None:
        self._collected_s = time.monotonic() - self._began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._measured(item, "setup_s"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._measured(item, "call_s"))

    @staticmethod
    def _measured(item: pytest.Item, name: str) -> Any:
        began = processor_s()
        try:
            return (yield)
        finally:
            item.user_properties.append((name, processor_s() - began))
            if name == "setup_s" and (mark := item.get_closest_marker("long")) is not None:
                item.user_properties.append(("long", mark.args[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found = dict(report.user_properties)
            self._tests[report.nodeid] = float(found.get("setup_s", 0)), float(found.get("call_s", 0))
            if "long" in found:
                self._reasons[report.nodeid] = str(found["long"])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        tests = sorted(self._tests, key=lambda name: -self._tests[name][1])
        setup_s, call_s = (sum(times) for times in zip(*self._tests.values(), strict=True))
        write = terminalreporter.write_line
        terminalreporter.write_sep("=", "processor time")
        write(
            f"{call_s:.0f} s in {len(tests)} tests, {setup_s:.0f} s in fixtures; collected in {self._collected_s:.0f} s"
        )
        for name in tests[:LONGEST]:
            reason = self._reasons.get(name, "")
            write(f"{self._tests[name][1]:7.1f} s  {name}{reason and ': '}{reason}")
        without = [name for name in tests if self._tests[name][1] > SHARE * LIMIT_S and name not in self._reasons]
        if without:
            write(f"over {SHARE * LIMIT_S:.0f} s without a reason, a mark `long`: {', '.join(without)}")
        if self._table is not None:
            self._write(tests)

    def _write(self, tests: list[str]) -> None:
        files: Counter[str] = Counter()
        for name in tests:
            files[name.split("::")[0]] += sum(self._tests[name])
        lines = ["| file | seconds |", "|---|---|", *(f"| {file} | {s:.1f} |" for file, s in files.most_common()), ""]
        lines += ["| test | seconds | of fixtures |", "|---|---|---|"]
        lines += [f"| {name} | {self._tests[name][1]:.2f} | {self._tests[name][0]:.2f} |" for name in tests]
        Path(self._table or "").write_text("\n".join(lines) + "\n")
