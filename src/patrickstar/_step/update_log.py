"""Log of lock-free updates: which steps' gradients each update has used. A replay repeats them in the same order."""

import fcntl
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from patrickstar._distributed.process_group import Processes
from patrickstar.errors import ConfigError, TrainingError

FORMAT = 1
BEGINNING = b'{"format":'
BLOCK_BYTES = 1 << 16

# The file has one JSON object per line. The first one has options of the run, and describes the pages:
#     {"format": 1, "after_step": 39, "after": 40, "gradient_dtype": "fp32",
#      "chunks": {"0": {"page_numel": 1048576, "params": [["weight", 0, 4096]]}}}
# `params` holds name, first element and number of elements, and with several processes the first element of the
# parameter that they are. There is one more after each resumption, and if the pages
# have changed: lines before it that are of steps after `after_step` are void, since the resumed run repeats them.
# The others hold the updates whose results the forward of the step after `step` was the first to read, as chunk, page,
# first and last step whose gradients each has used; one line for each step:
#     {"step": 41, "updates": [[3, 0, 40, 40]]}
# Updates before a flush, which a save makes too, have "flush" in place of "updates". They are for the reader only: the
# loop repeats its flushes, which make all updates.

Pages = Mapping[str, Mapping[str, Any]]


def log_of_rank(path: str | Path, world: Processes) -> Path:
    """Return the file of this process: with several processes `run.jsonl` of rank 1 is `run-1.jsonl`."""
    path = Path(path)
    return path if world.size == 1 else path.with_name(f"{path.stem}-{world.rank}{path.suffix}")


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

    Raises:
        ConfigError: The file can't be written, is no log, or another engine writes it.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._options = dict(options)
        self._pages: Pages | None = None
        """The pages that the log describes; None before a description of this run."""
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"the log of updates {str(path)!r} can't be written: {error}") from error
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        """Lock the file, and cut the line off that a killed run has not completed. Raises ConfigError."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"the log of updates {str(self.path)!r} is written by another engine, or by a process that was "
                f"forked from one, or can't be locked ({error}): use another"
            ) from error
        if not self.path.is_file() or not (nbytes := self.path.stat().st_size):
            return
        with self.path.open("rb") as content:
            if not content.read(len(BEGINNING)) == BEGINNING:
                raise ConfigError(f"the file {str(self.path)!r} exists and is no log of updates: choose another name")
            end = nbytes
            while end:  # block by block from the end
                first = max(0, end - BLOCK_BYTES)
                content.seek(first)
                if (last := content.read(end - first).rfind(b"\n")) >= 0:
                    self._file.truncate(first + last + 1)
                    return
                end = first
        self._file.truncate(0)

    def write(self, step: int, records: Sequence[UpdateRecord], pages: Pages, *, flush: bool = False) -> None:
        """Write the updates that the forward after a step is the first to read. If that fails, warn and write no more.

        Args:
            flush: They were made before a flush after that step.
        """
        lines: list[Mapping[str, Any]] = []
        if pages != self._pages:
            lines.append(self._header(step if self._pages is not None else step - 1, pages))
        if records or not flush:
            lines.append({"step": step, "flush" if flush else "updates": records})
        self._pages = pages
        self._write(lines)

    def resume(self) -> None:
        """Go on with the step after a checkpoint that was loaded."""
        self._pages = None

    def _header(self, after_step: int, pages: Pages) -> Mapping[str, Any]:
        return {"format": FORMAT, "after_step": after_step, **self._options, "chunks": pages}

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            while text and not self._file.closed:
                text = text[self._file.write(text) :]
        except OSError as error:
            self._file.close()
            warnings.warn(
                f"the log of updates {str(self.path)!r} can't be written: {error}. Training goes on, but this run "
                f"can't be replayed beyond the last step that the log contains",
                stacklevel=2,
            )

    def close(self, pages: Pages) -> None:
        """Close the file. If there was no lock-free update, it describes the pages all the same."""
        if self._pages is None and not self._file.closed and self._file.tell() == 0:
            self._write([self._header(0, pages)])
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forked processes may have the file open
            self._file.close()


class _Header(NamedTuple):
    after_step: int
    options: Mapping[str, Any]
    pages: Pages


class LoggedRun:
    """Log of a run that has ended.

    Raises:
        ConfigError: The file can't be read, or is no log.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.last_step = 0
        """Last step that the log contains."""
        self._headers: list[_Header] = []
        self._updates: dict[int, list[UpdateRecord]] = {}
        number = 0
        try:
            with Path(path).open(encoding="utf-8") as file:
                for line in file:
                    number += 1
                    if line.endswith("\n"):  # else the run was killed while it wrote this line
                        self._add(json.loads(line))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the log of updates {str(path)!r} can't be read: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{str(path)!r} is no log of updates: line {number} is invalid ({type(error).__name__}: {error})"
            ) from error
        if not self._headers:
            raise ConfigError(f"{str(path)!r} is no log of updates: it has no description of pages")

    def _add(self, line: Mapping[str, Any]) -> None:
        if "format" in line:
            if line["format"] != FORMAT:
                raise ValueError(f"format {line['format']} is unknown, this version reads {FORMAT}")
            after_step = line["after_step"]
            options = {"after": line["after"], "gradient_dtype": line["gradient_dtype"]}
            self._headers = [header for header in self._headers if header.after_step < after_step]
            self._headers.append(_Header(after_step, options, line["chunks"]))
            self._updates = {step: found for step, found in self._updates.items() if step <= after_step}
            self.last_step = min(self.last_step, after_step)
            return
        records = [UpdateRecord(*values) for values in line["flush" if "flush" in line else "updates"]]
        if "flush" not in line:
            self._updates.setdefault(line["step"], []).extend(records)
            self.last_step = max(self.last_step, line["step"])

    @property
    def options(self) -> dict[str, Any]:
        """Options of the run on which its results depend."""
        return dict(self._headers[-1].options)

    @cached_property
    def pages(self) -> dict[str, Mapping[str, Any]]:
        """All pages, also those of parameters that were unfrozen in the run."""
        return {index: chunk for header in self._headers for index, chunk in header.pages.items()}

    def at(self, step: int) -> list[UpdateRecord]:
        """Return the updates whose results the forward after a step was the first to read, in their order.

        Raises:
            TrainingError: The log ends before.
        """
        if step > self.last_step:
            raise TrainingError(
                f"the log of updates {str(self.path)!r} ends with step {self.last_step}, so that step {step} can't be "
                f"replayed: stop there, or load a checkpoint of it and train on without `replay`"
            )
        return self._updates.get(step, [])

    def check_any(self, options: Mapping[str, Any], pages: Pages) -> None:
        """Raise ConfigError if no part of the log, up to its end or to a resumption, is of these options and pages."""
        errors = [_difference(header, options, pages) for header in self._headers]
        if all(errors):
            raise ConfigError(f"the log of updates {str(self.path)!r} {errors[0]}")

    def check(self, step: int, options: Mapping[str, Any], pages: Pages) -> None:
        """Raise ConfigError if the run had other options or pages in this step."""
        before = [header for header in self._headers if header.after_step < step] or self._headers[:1]
        if error := _difference(before[-1], options, pages):
            raise ConfigError(f"the log of updates {str(self.path)!r} {error}; step {step} can't be replayed")


def _difference(header: _Header, options: Mapping[str, Any], pages: Pages) -> str:
    """Return how options and pages differ from those of a log; an empty string if they do not."""
    for name, value in header.options.items():
        if options[name] != value:
            return f"is of a run with {name}={value!r}, not {options[name]!r}: use the same"
    if pages != header.pages:
        return (
            "is of another model or of other chunks: use the same model, optimizer and `chunk_size`, and, if that is "
            "'auto', the budgets and the disk by which chunks were chosen"
        )
    return ""
