"""What a run says about its steps and about itself: plain data, and the JSON lines it is written as."""

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
    """One step; ``step`` counts from 1, ``gradient_norm`` is None where gradients are not clipped."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    elapsed_s: float
    stats: StepStats


@dataclass(frozen=True)
class Summary:
    """A whole run, or what there was of it when it was interrupted.

    ``loss_first`` and ``loss_last`` are means over up to three steps. ``tokens_per_s`` leaves the first step out, in
    which the trace is taken, unless there was no other.
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


class RunLog:
    """A file of JSON lines, one for each step and one for the summary; without a path it writes nothing.

    Of what is there, the first `steps` steps stay. A number that is not finite is written as null. Raises ConfigError
    for a path that can't be written.
    """

    def __init__(self, path: Path | None, steps: int = 0) -> None:
        self._file = None
        self._kept: list[str] | None = None
        """What stays, until the first record is written: a run that does not come to that leaves the log as it is."""
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._kept = _steps_in(path, steps)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the log {path} can't be written: {error.strerror}; check --log") from error

    def write(self, record: StepRecord | Summary) -> None:
        """Append one record and hand it to the system, so that a run that dies leaves its steps behind."""
        if self._file is not None:
            kind = "step" if isinstance(record, StepRecord) else "summary"
            fields = {"kind": kind, **asdict(record)}
            fields |= {name: value for name, value in fields.pop("stats").items() if name != "steps"}
            if self._kept is not None:
                self._file.truncate(0)
                self._file.writelines(self._kept)
                self._kept = None
            finite = {name: _json_number(value) for name, value in fields.items()}
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _steps_in(path: Path, steps: int) -> list[str]:
    """The lines of a log that are of the first so many steps."""
    if not steps or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote
        if isinstance(record, dict) and record.get("kind") == "step" and record.get("step", 0) <= steps:
            kept.append(line)
    return kept


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
