"""Results of a program: measurements, checks and facts, each printed as a line that `turns` collects."""

import json
from dataclasses import asdict, dataclass
from typing import Any

MARK = "@result "
"""Begin of a line with a result."""
READY = "@ready"
"""Line of a program that has imported what it needs, and waits for its turn."""


@dataclass(frozen=True)
class Figure:
    """One measurement; `limit` is the machine's, in the same unit."""

    label: str
    measured: float
    unit: str
    limit: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """One check that passed or failed."""

    label: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """One fact about the machine or the run."""

    label: str
    text: str


@dataclass(frozen=True)
class End:
    """End of a program; `problem` is empty if it succeeded."""

    seconds: float
    problem: str


Entry = Figure | Check | Fact | End


class Record:
    """Results of this program."""

    def figure(self, label: str, measured: float, unit: str, *, limit: float | None = None, note: str = "") -> None:
        """Add a measurement. See `Figure`."""
        self._add(Figure(label, measured, unit, limit, note))

    def check(self, label: str, passed: bool, note: str = "") -> None:
        """Add a check."""
        self._add(Check(label, passed, note))

    def fact(self, label: str, text: str) -> None:
        """Add a fact."""
        self._add(Fact(label, text))

    def _add(self, entry: Entry) -> None:
        print(MARK + json.dumps(to_json(entry)), flush=True)


def to_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as a JSON object."""
    return {"kind": type(entry).__name__} | asdict(entry)


def from_json(values: dict[str, Any]) -> Entry:
    """Return the entry of a JSON object."""
    kinds = {kind.__name__: kind for kind in (Figure, Check, Fact, End)}
    return kinds[values["kind"]](**{name: value for name, value in values.items() if name not in ("kind", "program")})
