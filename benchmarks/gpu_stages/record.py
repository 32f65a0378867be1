"""Results of a stage: measurements with predictions, checks and facts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Args:
        label: Name of the measured quantity.
        measured: Its value; None if it could not be measured, for the reason in `note`.
        unit: Unit of all three numbers.
        predicted: Value predicted before the first run.
        limit: Physical limit.
        note: Method of measurement, or the reason that there is none.
    """

    label: str
    measured: float | None
    unit: str
    predicted: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def misses(self) -> bool:
        """Return whether measurement and prediction differ by more than a factor of 1.5."""
        if self.measured is None or not self.predicted:
            return False
        return not 2 / 3 <= self.measured / self.predicted <= 1.5


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


Entry = Figure | Check | Fact


class Record:
    """Results of one stage, written to a file one at a time, so that a killed stage keeps its results.

    Args:
        path: The file.
        predicting: Keep predictions and limits, which are for an H100.
    """

    def __init__(self, path: Path, *, predicting: bool = True) -> None:
        self.path = path
        self.predicting = predicting

    def figure(
        self,
        label: str,
        measured: float | None,
        unit: str,
        *,
        predicted: float | None = None,
        limit: float | None = None,
        note: str = "",
    ) -> None:
        """Add a measurement. See `Figure`."""
        if not self.predicting:
            predicted = limit = None
        self._add(Figure(label, measured, unit, predicted, limit, note))

    def check(self, label: str, passed: bool, note: str = "") -> None:
        """Add a check."""
        self._add(Check(label, passed, note))

    def fact(self, label: str, text: str) -> None:
        """Add a fact."""
        self._add(Fact(label, text))

    def _add(self, entry: Entry) -> None:
        line = json.dumps({"kind": type(entry).__name__} | asdict(entry))
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def read(self) -> list[Entry]:
        """Return all results so far."""
        kinds = {kind.__name__: kind for kind in (Figure, Check, Fact)}
        if not self.path.exists():
            return []
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [kinds[values.pop("kind")](**values) for values in entries]
