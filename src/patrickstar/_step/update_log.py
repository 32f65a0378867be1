"""Log of lock-free updates: which steps' gradients each update has used. A replay repeats them in the same order."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from patrickstar.errors import ConfigError

FORMAT = 1

# The file has one JSON object per line. The first one, and one more after each resumption, has options of the run and
# describes the pages:
#     {"format": 1, "after_step": 39, "after": 40, "gradient_dtype": "fp32",
#      "chunks": {"0": {"page_numel": 1048576, "params": [["weight", 0, 4096]]}}}
# `params` holds name, first element and number of elements. The others hold the updates whose results the forward of
# the step after `step` was the first to read, as chunk, page, first and last step whose gradients it has used:
#     {"step": 41, "updates": [[3, 0, 40, 40]]}
# Updates before a flush, which a save makes too, have "flush" in place of "updates". They are for the reader only: the
# loop repeats its flushes, which make all updates.
# A forward that a resumed run repeats counts once: lines of steps after `after_step` that come before are void.

Pages = Mapping[str, Mapping[str, Any]]


class UpdateRecord(NamedTuple):
    """Update of one page."""

    chunk: int
    page: int
    first: int
    """First step whose gradients it has used."""
    last: int
    """Last step whose gradients it may have used."""


class UpdateLog:
    """Writer of a log, to whose end it appends.

    Args:
        options: Options of the run on which its results depend.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._options = dict(options)
        self._begun = False
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"the log of updates {str(path)!r} can't be written: {error}") from error

    def write(self, step: int, records: Sequence[UpdateRecord], pages: Pages, *, flush: bool = False) -> None:
        """Write the updates that the forward after a step is the first to read. If that fails, warn and write no more.

        Args:
            flush: They were made before a flush after that step.
        """
        lines: list[Mapping[str, Any]] = []
        if not self._begun:
            lines.append(self._header(step - 1, pages))
        if records:
            lines.append({"step": step, "flush" if flush else "updates": records})
        self._write(lines)

    def _header(self, after_step: int, pages: Pages) -> Mapping[str, Any]:
        return {"format": FORMAT, "after_step": after_step, **self._options, "chunks": pages}

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        self._begun = True
        try:
            while text and not self._file.closed:
                text = text[self._file.write(text.encode()) :]  # names of parameters are ASCII in JSON
        except OSError as error:
            self._file.close()
            warnings.warn(
                f"the log of updates {str(self.path)!r} can't be written: {error}. Training goes on, but this run "
                f"can't be replayed beyond the last step that the log contains",
                stacklevel=2,
            )

    def close(self, pages: Pages) -> None:
        """Close the file. If there was no lock-free update, it describes the pages all the same."""
        if not self._begun and self._file.tell() == 0:
            self._write([self._header(0, pages)])
        self._file.close()


class LoggedRun:
    """Log of a run that has ended.

    Raises:
        ConfigError: The file can't be read, or is no log.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.pages: Pages = {}
        self.options: dict[str, Any] = {}
        """Options of the run on which its results depend."""
        self._updates: dict[int, list[UpdateRecord]] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the log of updates {str(path)!r} can't be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break  # the run was killed while it wrote this line
            try:
                self._add(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{str(path)!r} is no log of updates: line {number} is invalid ({type(error).__name__}: {error})"
                ) from error
        if not self.pages:
            raise ConfigError(f"{str(path)!r} is no log of updates: it has no description of pages")

    def _add(self, line: Mapping[str, Any]) -> None:
        if "format" in line:
            if line["format"] != FORMAT:
                raise ValueError(f"format {line['format']} is unknown, this version reads {FORMAT}")
            self.pages = line["chunks"]
            self.options = {"after": line["after"], "gradient_dtype": line["gradient_dtype"]}
            self._updates = {step: found for step, found in self._updates.items() if step <= line["after_step"]}
            return
        records = [UpdateRecord(*values) for values in line["flush" if "flush" in line else "updates"]]
        if "flush" not in line:
            self._updates.setdefault(line["step"], []).extend(records)

    def at(self, step: int) -> list[UpdateRecord]:
        """Return the updates whose results the forward after a step was the first to read, in their order."""
        return self._updates.get(step, [])

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if the run had other options."""
        for name, value in self.options.items():
            if options[name] != value:
                raise ConfigError(
                    f"the log of updates {str(self.path)!r} is of a run with {name}={value!r}, not {options[name]!r}: "
                    f"use the same"
                )

    def check_pages(self, pages: Pages) -> None:
        """Raise ConfigError if the log is of other pages than these."""
        if json.loads(json.dumps(pages)) != self.pages:
            raise ConfigError(
                f"the log of updates {str(self.path)!r} is of another model or of other chunks: use the same model, "
                f"optimizer and `chunk_size`, and the budgets from which chunks were chosen if that is 'auto'"
            )


def names(pages: Pages, records: Iterable[UpdateRecord]) -> list[str]:
    """Return the names of the parameters that have elements on the pages of some updates."""
    found: dict[str, None] = {}
    for record in records:
        chunk = pages[str(record.chunk)]
        first = record.page * chunk["page_numel"]
        for name, offset, numel in chunk["params"]:
            if offset < first + chunk["page_numel"] and offset + numel > first:
                found[name] = None
    return list(found)
