"""Command line and output of the benchmarks: options, tables with the machine's name, files of results/."""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from patrickstar._hardware.machine_name import machine_name

HERE = Path(__file__).parent
RESULTS = HERE / "results"
Row = Mapping[str, str] | Sequence[str]
"""Cells of a row, by column or in the order of the columns."""


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line: an option for each default, of its type.

    A list takes several values, False is a flag, and a type in place of a default makes the option required.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, required=True)
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default)
        else:
            parser.add_argument(flag, type=str if default is None else type(default), default=default)
    return parser.parse_args()


def shown(rows: Iterable[Row]) -> list[Row]:
    """Return rows, of which each is printed as soon as it is known."""
    found = []
    for row in rows:
        found.append(row)
        print(list(row.values()) if isinstance(row, Mapping) else row, flush=True)
    return found


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Return a Markdown table. Rows of cells by column need no columns."""
    cells = [list(row.values()) if isinstance(row, Mapping) else row for row in rows]
    columns = columns or list(rows[0] if rows else ())
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def publish(name: str, intro: str, rows: Sequence[Row], columns: Sequence[str] = (), device: str = "cpu") -> None:
    """Print a table and write it to results/NAME-DEVICE.md, with the machine's name."""
    machine = f"{machine_name(torch.device(device))}; PyTorch {torch.__version__}; {date.today()}"
    text = f"{intro.strip()}\n\nMachine: {machine}.\n\n{table(rows, columns)}\n"
    _write(f"{name}-{torch.device(device).type}", f"# {name}\n\n{text}", text)


def read(name: str) -> tuple[str, list[dict[str, str]]]:
    """Return the text of results/NAME.md, and the rows of its table, by column."""
    text = (RESULTS / f"{name}.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert len(lines) > 2, f"{name} contains no table"
    return text, [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def reference(name: str) -> list[dict[str, str]]:
    """Return the rows of reference/NAME.csv; lines that begin with # are comments."""
    lines = (HERE / "reference" / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line[:1] != "#"))


def publish_text(name: str, **values: Any) -> None:
    """Print texts/NAME.md, with the values at their places, and write it to results/NAME.md."""
    text = filled(name, **values)
    _write(name, text, text)


def filled(name: str, **values: Any) -> str:
    """Return texts/NAME.md with the values at their places."""
    return (HERE / "texts" / f"{name}.md").read_text().format(**values)


def _write(name: str, text: str, printed: str) -> None:
    print(printed, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
