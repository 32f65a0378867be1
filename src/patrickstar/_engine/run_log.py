"""Log of a run: a file of JSON lines with its description, a record per step, and timelines of some steps."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from patrickstar._dry_run.precision_choice import linear_widths
from patrickstar._dry_run.product_rates import product_rate
from patrickstar._engine.core import EngineCore
from patrickstar._hardware.machine_name import machine_name
from patrickstar._layout.byte_size import format_size
from patrickstar._schedule.step_timeline import LOG_FORMAT, StepTimeline
from patrickstar._step.stats import StepStats
from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class RunDescription:
    """Description of a run: what all of its steps have in common. Bytes are those of this process.

    Attributes:
        chunks: Kind, index and bytes of each chunk.
        names: Names of the parameters in each chunk of parameters, by its index.
        started: Time of the begin in ISO format.
        threads: Number of threads of an operator on the CPU.
        core_rates: Operations per second at which a core computes products of the model's widths, by precision; empty
            beside an accelerator, and for a model that keeps other dtypes.
    """

    model: str
    parameters: int
    machine: str
    device: str
    precision: str
    processes: int
    model_data_bytes: int
    padding_bytes: int
    device_budget_bytes: int
    host_budget_bytes: int
    disk: str | None
    chunks: list[tuple[str, int, int]]
    names: dict[int, list[str]]
    started: str
    threads: int
    core_rates: dict[str, float]
    format: int = LOG_FORMAT


@dataclass(frozen=True)
class StepRecord:
    """Record of a step. ``step`` counts from 1; what the engine was not told is None.

    ``gradient_norm`` is None without gradient clipping, too.
    """

    step: int
    elapsed_s: float
    stats: StepStats
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens: int | None = None


class RunLog:
    """File of JSON lines. Numbers that are not finite are written as null.

    Args:
        path: File; None writes nothing.
        steps: Number of steps to retain of an existing file.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: str | Path | None, steps: int = 0) -> None:
        self._file = None
        self._retained: list[str] | None = None
        """Retained lines, until the first record is written: a run that fails earlier leaves the log unchanged."""
        if path is not None:
            path = Path(path)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._retained = _steps_in(path, steps)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the log {path} can't be written: {error.strerror}; choose another path") from error

    def write_run(self, run: RunDescription) -> None:
        """Append the description of a run, unless it is continued."""
        if not any(json.loads(line)["kind"] == "run" for line in self._retained or ()):
            self.write("run", asdict(run))

    def write_plan(self, seconds: float, bound_s: float, stats: StepStats) -> None:
        """Append what a dry run predicts of a step: its time, the lower bound of that, and its statistics."""
        self.write("plan", {"seconds": seconds, "bound_s": bound_s, "stats": asdict(stats)})

    def write_step(self, record: StepRecord) -> None:
        """Append the record of a step."""
        self.write("step", asdict(record))

    def write_timeline(self, timeline: StepTimeline) -> None:
        """Append the timeline of a step."""
        self.write("timeline", timeline.as_json())

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a line and flush the file, so that a killed run leaves its steps in the log.

        Args:
            kind: Kind of the line.
            fields: Its content; those of ``stats`` become fields of the line.
        """
        if self._file is None:
            return
        fields = {"kind": kind, **fields}
        fields |= {name: value for name, value in fields.pop("stats", {}).items() if name != "steps"}
        if self._retained is not None:
            self._file.truncate(0)
            self._file.writelines(self._retained)
            self._retained = None
        json_fields = {name: _json_number(value) for name, value in fields.items()}
        self._file.write(json.dumps(json_fields, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def describe(core: EngineCore) -> RunDescription:
    """Return the description of a run with an engine."""
    disk = core.config.disk
    return RunDescription(
        model=type(core.module).__name__,
        parameters=sum(managed.numel for managed in core.model_params),
        machine=machine_name(core.device),
        device=core.device.type,
        precision=core.config.precision,
        processes=core.world.size,
        model_data_bytes=core.layout.model_data_bytes,
        padding_bytes=core.layout.padding_bytes,
        device_budget_bytes=core.device_budget_bytes,
        host_budget_bytes=core.host_budget_bytes,
        disk=None if disk is None else str(disk.directory),
        chunks=[(chunk.kind, chunk.index, chunk.nbytes) for chunk in core.manager.chunks.values()],
        names={index: [managed.name for managed in each] for index, each in core.shards.by_chunk.items()},
        threads=torch.get_num_threads(),
        core_rates=_core_rates(core),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _core_rates(core: EngineCore) -> dict[str, float]:
    """Measure the rates of products in the run's precision and in those that it could have, in half a second."""
    multiplied = {managed.chunk.dtype for managed in core.shards.managed_params if len(managed.shape) == 2}
    if core.device.type != "cpu" or multiplied != {core.config.compute_dtype}:
        return {}  # another precision would be none for a model that keeps its own dtypes
    widths = linear_widths(core.module)
    return {name: product_rate(name, *widths) for name in dict.fromkeys(("fp32", "bf16", core.config.precision))}


def _steps_in(path: Path, steps: int) -> list[str]:
    """Return the lines of a log that describe the run or belong to the first `steps` steps."""
    if not steps or not path.exists():
        return []
    retained = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the run was killed while writing
        if not isinstance(record, dict):
            continue
        of_step = record.get("kind") in ("step", "timeline") and record.get("step", 0) <= steps
        if record.get("kind") in ("run", "plan") or of_step:
            retained.append(line)
    return retained


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def memory_figures(record: StepRecord, device_budget_bytes: int) -> list[str]:
    """Return the peaks of a step on each tier in words."""
    stats = record.stats
    device = f"{format_size(stats.device_peak_model_bytes)} and {format_size(stats.device_peak_non_model_bytes)}"
    return [
        f"device {device} of {format_size(device_budget_bytes)}",
        f"host {format_size(stats.host_peak_model_bytes + stats.host_peak_non_model_bytes)}",
        *([f"disk {format_size(stats.disk_bytes)}"] if stats.disk_bytes else []),
    ]


def waiting_figure(record: StepRecord) -> str:
    """Return the share of a step in which computation waited, in words."""
    return f"waiting {record.stats.stall_s / record.elapsed_s:.0%}"
