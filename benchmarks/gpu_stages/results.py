"""Results of a call in a file of JSON lines, which are added as they come, and as Markdown."""

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from report import table

from gpu_stages.record import Check, End, Entry, Fact, Figure, from_json, to_json


class Results:
    """Results of one call.

    Args:
        path: The file; the Markdown is beside it.
        machine: The machine's name, and versions.
        title: What was measured.
    """

    def __init__(self, path: Path, machine: str, title: str) -> None:
        self.path = path
        self._machine = machine
        self._title = title
        self._entries: dict[str, list[Entry]] = defaultdict(list)
        for line in path.read_text().splitlines() if path.exists() else ():
            values = json.loads(line)
            if "program" in values:
                self._entries[values["program"]].append(from_json(values))
        self._entries = defaultdict(list, {name: self._entries[name] for name in self._entries if self.passed(name)})
        self._rewrite()

    def passed(self, name: str) -> bool:
        """Return whether a program ran to its end, with all checks passed."""
        entries = self._entries.get(name, [])
        ended = any(isinstance(entry, End) and not entry.problem for entry in entries)
        return ended and all(entry.passed for entry in entries if isinstance(entry, Check))

    def add(self, name: str, entry: Entry) -> None:
        """Add a result of a program."""
        self._entries[name].append(entry)
        self._append(name, entry)
        if isinstance(entry, End):
            self.write()

    def _rewrite(self) -> None:
        self.path.write_text(json.dumps({"machine": self._machine, "date": str(date.today())}) + "\n")
        for name, entries in self._entries.items():
            for entry in entries:
                self._append(name, entry)

    def _append(self, name: str, entry: Entry) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"program": name} | to_json(entry)) + "\n")

    def write(self) -> None:
        """Write the Markdown."""
        parts = [f"# {self._title}", f"Machine: {self._machine}; {date.today()}.", self.summary()]
        for name, entries in self._entries.items():
            rows = [_row(entry) for entry in entries if not isinstance(entry, End)]
            if rows:
                parts += [f"## {name}", _table(["what", "result", "limit", "note"], rows)]
        self.path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")

    def summary(self) -> str:
        """Return a table of the programs: seconds and result."""
        rows = []
        for name, entries in self._entries.items():
            end = next((entry for entry in entries if isinstance(entry, End)), None)
            failed = sum(isinstance(entry, Check) and not entry.passed for entry in entries)
            step = next((entry for entry in entries if isinstance(entry, Figure) and entry.label == "step"), None)
            note = next((entry.text for entry in entries if isinstance(entry, Fact) and entry.label == "left out"), "")
            result = "not ended" if end is None else end.problem or note or "passed"
            result += f", {failed} checks failed" if failed else ""
            result += f", {step.measured:.3f} s per step" if step is not None else ""
            rows.append([name, "" if end is None else f"{end.seconds:.0f}", result])
        return _table(["stage", "seconds", "result"], rows)


def _row(entry: Entry) -> list[str]:
    if isinstance(entry, Figure):
        limit = "" if entry.limit is None else _number(entry.limit)
        return [entry.label, f"{_number(entry.measured)} {entry.unit}", limit, entry.note]
    if isinstance(entry, Check):
        return [entry.label, "passed" if entry.passed else "FAILED", "", entry.note]
    assert isinstance(entry, Fact), "an end has no row"
    return [entry.label, entry.text, "", ""]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([[cell.replace("|", "/").replace("\n", " ").strip() for cell in row] for row in rows], columns)
