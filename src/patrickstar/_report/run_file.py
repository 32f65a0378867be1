"""Reader of the log of a run: its description, steps and timelines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patrickstar._schedule.step_timeline import LOG_FORMAT, StepTimeline
from patrickstar.errors import ConfigError


@dataclass
class Run:
    """Content of the log of a run.

    Attributes:
        description: What all steps have in common, by the names of `RunDescription`.
        steps: Record of each step, by the names of `StepRecord` and `StepStats`.
        timelines: Timelines of some steps, in order.
        summary: Summary of a run of the command line; empty without one.
        plan: Prediction of a step by a dry run: `seconds`, `bound_s` and the names of `StepStats`; empty without one.
    """

    path: Path
    description: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[StepTimeline] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> dict[int, list[str]]:
        """Names of the parameters in each chunk of parameters, by its index."""
        return {int(index): names for index, names in self.description["names"].items()}


def read_run(path: Path) -> Run:
    """Read the log of a run.

    Args:
        path: File that `patrickstar train --log`, `engine.record` or the Trainer's callback wrote.

    Returns:
        Its content. A line that a killed run left unfinished at the end is ignored.

    Raises:
        ConfigError: The file can't be read, or is no such log.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the log {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    run = Run(path)
    for number, line in enumerate(lines, 1):
        try:
            _add(run, json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is no record of a run: {error!r}; {_HINT}") from error
    if not run.description or not run.steps:
        lacking = "the description of a run" if not run.description else "a step"
        raise ConfigError(f"{path} lacks {lacking}; {_HINT}")
    return run


_HINT = "write one with `patrickstar train --log FILE` or `with engine.record(FILE):`"


def _add(run: Run, record: Mapping[str, Any]) -> None:
    kind = record["kind"]
    fields = {name: value for name, value in record.items() if name != "kind"}
    if kind == "run":
        if fields["format"] != LOG_FORMAT:
            raise ValueError(f"its format is {fields['format']}, and this version reads {LOG_FORMAT}")
        run.description = fields
    elif kind == "step":
        run.steps.append(fields)
    elif kind == "timeline":
        run.timelines.append(StepTimeline.of_json(fields))
    elif kind == "summary":
        run.summary = fields
    elif kind == "plan":
        run.plan = fields
    else:
        raise ValueError(f"there is no kind of record {kind!r}")
