"""Findings of a stage: figures beside their predictions, and checks that passed or failed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Args:
        what: what was measured.
        measured: its value; None if it could not be measured, for the reason in `note`.
        unit: of all three numbers.
        predicted: what it was expected to be, said before the first run.
        limit: what physics allows.
        note: how it was measured, or why it was not.
    """

    what: str
    measured: float | None
    unit: str
    predicted: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def misses(self) -> bool:
        """Return whether the prediction was off by more than half, either way."""
        if self.measured is None or not self.predicted:
            return False
        return not 2 / 3 <= self.measured / self.predicted <= 1.5


@dataclass(frozen=True)
class Check:
    """Something that holds or does not."""

    what: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """Something to know about the machine or the run."""

    what: str
    text: str


TensorEntry = Figure | Check | Fact


class Record:
    """Findings of one stage, written to a file one by one, so that a stage that is killed leaves what it had.

    Args:
        path: the file.
        predicting: whether predictions and limits, which are of an H100, apply to this machine.
    """

    def __init__(self, path: Path, *, predicting: bool = True) -> None:
        self.path = path
        self.predicting = predicting

    def figure(
        self,
        what: str,
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
        self._add(Figure(what, measured, unit, predicted, limit, note))

    def check(self, what: str, passed: bool, note: str = "") -> None:
        """Add a check."""
        self._add(Check(what, passed, note))

    def fact(self, what: str, text: str) -> None:
        """Add a fact."""
        self._add(Fact(what, text))

    def _add(self, entry: TensorEntry) -> None:
        line = json.dumps({"kind": type(entry).__name__} | asdict(entry))
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def read(self) -> list[TensorEntry]:
        """Return all findings so far."""
        kinds = {kind.__name__: kind for kind in (Figure, Check, Fact)}
        if not self.path.exists():
            return []
        found = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [kinds[values.pop("kind")](**values) for values in found]
