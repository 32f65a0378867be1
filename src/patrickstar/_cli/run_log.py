"""Records of training steps and of a whole run, and the JSON lines file that stores them."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from patrickstar import StepStats
from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class StepRecord:
    """Record of a step. ``step`` counts from 1; ``gradient_norm`` is None without gradient clipping."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    elapsed_s: float
    stats: StepStats


@dataclass(frozen=True)
class Summary:
    """Record of a run, complete or interrupted.

    ``loss_first`` and ``loss_last`` are means over up to three steps. ``tokens_per_s`` excludes the first step, which
    is traced, unless it is the only one.
    """

    model: str
    parameters: int
    machine: str
    device: str
    precision: str
    steps: int
    interrupted: bool
    loss_first: float
    loss_last: float
    tokens_per_s: float
    elapsed_s: float
    model_data_bytes: int
    padding_bytes: int
    chunk_count: int
    chunk_numel: int
    device_budget_bytes: int
    host_budget_bytes: int
    stats: StepStats
    processes: int = 1
    tp: int = 1
    ep: int = 1
    replicas: int = 1


class RunLog:
    """File of JSON lines, one per step and one for the summary. Numbers that are not finite are written as null.

    Args:
        path: File; None writes nothing.
        steps: Number of steps to retain of an existing file.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path | None, steps: int = 0) -> None:
        self._file = None
        self._retained: list[str] | None = None
        """Retained lines, until the first record is written: a run that fails earlier leaves the log unchanged."""
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._retained = _steps_in(path, steps)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the log {path} can't be written: {error.strerror}; check --log") from error

    def write(self, record: StepRecord | Summary) -> None:
        """Append a record and flush the file, so that a killed run leaves its steps in the log."""
        if self._file is not None:
            kind = "step" if isinstance(record, StepRecord) else "summary"
            fields = {"kind": kind, **asdict(record)}
            fields |= {name: value for name, value in fields.pop("stats").items() if name != "steps"}
            if self._retained is not None:
                self._file.truncate(0)
                self._file.writelines(self._retained)
                self._retained = None
            json_fields = {name: _json_number(value) for name, value in fields.items()}
            self._file.write(json.dumps(json_fields, allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _steps_in(path: Path, steps: int) -> list[str]:
    """Return the lines of a log that belong to the first `steps` steps."""
    if not steps or not path.exists():
        return []
    retained = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the run was killed while writing
        if isinstance(record, dict) and record.get("kind") == "step" and record.get("step", 0) <= steps:
            retained.append(line)
    return retained


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
