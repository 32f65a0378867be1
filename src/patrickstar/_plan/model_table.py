"""Table of the open models that a machine can train: whole, with LoRA, and with QLoRA. Estimates, not dry runs."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patrickstar._models.open_models import OPEN_MODELS, OpenModel
from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import Estimate
from patrickstar._perf_model.transformer_shape import Checkpointing
from patrickstar._perf_model.workload import STATE_BYTES, Workload, of_shares, option_of
from patrickstar._plan.planned_model import PlannedModel
from patrickstar._plan.search import Search
from patrickstar._plan.upgrades import ENDURANCE, drive_tokens
from patrickstar.errors import BudgetError

WIDTH = 80
"""Columns of a terminal."""
MILLION = 10**6


@dataclass(frozen=True)
class ModelRow:
    """An open model, and the fastest estimate of each way to train it; None where it does not fit."""

    name: str
    params: int
    estimates: tuple[Estimate | None, ...]


@dataclass(frozen=True)
class ModelTable:
    """Open models on a machine, the smallest first.

    Attributes:
        ways: What each estimate of a row trains: None is the whole model.
        rows: Models that fit in at least one way.
        too_large: Names of the others.
    """

    machine: Machine
    mesh: Mesh
    sequence: int
    ways: tuple[Adapters | None, ...]
    rows: tuple[ModelRow, ...]
    too_large: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return {
            "machine": self.machine.model_dump(),
            "gpus": self.mesh.gpus,
            "sequence": self.sequence,
            "rank": next(way.rank for way in self.ways if way is not None),
            "models": [
                {"name": row.name, "params": row.params}
                | {_key(way): self._figures(each) for way, each in zip(self.ways, row.estimates, strict=True)}
                for row in self.rows
            ],
            "too_large": list(self.too_large),
        }

    def _figures(self, best: Estimate | None) -> dict[str, Any] | None:
        if best is None:
            return None
        return {
            "tokens_per_s": best.tokens_per_s,
            "hours_per_million_tokens": MILLION / best.tokens_per_s / 3600,
            "batch": best.workload.batch,
            "activation_checkpointing": option_of(best.workload.checkpointing),
            "drive_tokens": drive_tokens(self.machine, best),
        }

    def __str__(self) -> str:
        wears = [any(self._tokens(row, column) is not None for row in self.rows) for column in range(len(self.ways))]
        heads = [_title(way) for way in self.ways]
        cells = [["model", *(name for wear in wears for name in _columns(wear))]]
        for row in self.rows:
            figures = [row.name]
            for column, (best, wear) in enumerate(zip(row.estimates, wears, strict=True)):
                figures += _cells(best, self._tokens(row, column), wear)
            cells.append(figures)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines, position = [], 1
        head = " " * widths[0]
        for title, wear in zip(heads, wears, strict=True):
            span = len(_columns(wear))
            head += "  " + title.rjust(sum(widths[position : position + span]) + 2 * (span - 1))
            position += span
        lines.append(head)
        for figures in cells:
            name, *numbers = (
                text.rjust(width) if index else text.ljust(width)
                for index, (text, width) in enumerate(zip(figures, widths, strict=True))
            )
            lines.append("  ".join([name, *numbers]).rstrip())
        return "\n".join([*self._introduction(), *lines, *self._remarks(any(wears))])

    def _tokens(self, row: ModelRow, column: int) -> float | None:
        best = row.estimates[column]
        return None if best is None else drive_tokens(self.machine, best)

    def _introduction(self) -> list[str]:
        gpus = f" ({self.mesh.gpus} GPUs)" if self.mesh.gpus > 1 else ""
        text = (
            f"Open models that {self.machine.name}{gpus} can train, with sequences of {self.sequence:,} tokens. All "
            f"figures are estimates."
        )
        return [*textwrap.wrap(text, WIDTH), ""]

    def _remarks(self, wears: bool) -> Iterator[str]:
        texts = ["h/M: hours per million tokens. -: it does not fit; LoRA of models with experts is not planned."]
        if wears and self.machine.disk is not None:
            written = f"{ENDURANCE * self.machine.disk.capacity / 1e12:,.0f} TB"
            texts[0] += (
                f" drive: million tokens until the drive has been written {written}, {ENDURANCE} times its capacity, "
                f"which is usual for what it endures."
            )
        if self.too_large:
            texts.append(f"Too large: {', '.join(self.too_large)}.")
        texts.append(
            "For one of them, with a dry run of the engine: patrickstar plan --model NAME, and --lora RANK or --qlora "
            "RANK."
        )
        yield ""
        for text in texts:
            yield from textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def models_that_fit(search: Search, sequence: int, rank: int) -> ModelTable:
    """Return the table of the open models on the machine of a search.

    Args:
        search: Machine, mesh, and choices of batch and of activation checkpointing.
        sequence: Tokens of a sequence.
        rank: Rank of the adapters of LoRA and QLoRA.

    Raises:
        BudgetError: None fits.
    """
    ways = (None, Adapters(rank), Adapters(rank, quantized=True))
    rows, too_large = [], []
    for name, model in sorted(OPEN_MODELS.items(), key=lambda item: item[1].params):
        if sequence > model.positions:
            continue
        estimates = tuple(_best(search, _planned(name, model, sequence, way)) for way in ways)
        if any(best is not None for best in estimates):
            rows.append(ModelRow(name, model.params, estimates))
        else:
            too_large.append(name)
    if not rows:
        smallest = min(too_large, key=lambda name: OPEN_MODELS[name].params) if too_large else None
        if smallest is None:
            raise BudgetError(f"no open model has positions for {sequence:,} tokens: choose a smaller --sequence")
        try:
            search.best(_planned(smallest, OPEN_MODELS[smallest], sequence, ways[-1]), search.machine, search.mesh)
        except BudgetError as error:
            raise BudgetError(
                f"no open model fits {search.machine.name}: of the smallest, {smallest} with {ways[-1]}, {error}",
                error.short_bytes,
            ) from None
    return ModelTable(search.machine, search.mesh, sequence, ways, tuple(rows), tuple(too_large))


def _planned(name: str, model: OpenModel, sequence: int, way: Adapters | None) -> PlannedModel:
    decoder = model.decoder()

    def workload(batch: int, checkpointing: Checkpointing, mesh: Mesh) -> Workload:
        return decoder.workload(batch, sequence, checkpointing, way)

    return PlannedModel(name, sequence, of_shares(workload), adapters=way)


def _best(search: Search, model: PlannedModel) -> Estimate | None:
    machine, mesh = search.machine, search.mesh
    if model.adapters is not None and OPEN_MODELS[model.name].decoder().expert_numel:
        return None  # how peft adapts experts is not planned
    work = model.workload(min(search.batches), True, mesh)
    # Most models are too large by far: their linear programs need not be solved.
    capacity = machine.host.memory + (machine.disk.capacity if machine.disk is not None else 0)
    capacity += mesh.gpus * machine.gpu.memory if machine.gpu is not None else 0
    if work.frozen_bytes + work.params * (work.param_bytes + STATE_BYTES) > capacity:
        return None
    return search.best_or_none(model, machine, mesh)


def _key(way: Adapters | None) -> str:
    return "full" if way is None else "qlora" if way.quantized else "lora"


def _title(way: Adapters | None) -> str:
    return "whole model" if way is None else str(way).replace(" of", ",")


def _columns(wears: bool) -> list[str]:
    return ["tokens/s", "h/M", *(["drive"] if wears else [])]


def _cells(best: Estimate | None, tokens: float | None, wears: bool) -> list[str]:
    if best is None:
        return ["-" for _ in _columns(wears)]
    hours = MILLION / best.tokens_per_s / 3600
    endured = [] if not wears else ["" if tokens is None else _short(tokens / MILLION)]
    return [
        f"{best.tokens_per_s:,.0f}" if best.tokens_per_s >= 10 else f"{best.tokens_per_s:.1f}",
        _short(hours),
        *endured,
    ]


def _short(number: float) -> str:
    """Return a number with two digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}" if number >= 0.995 else f"{number:.2f}"
