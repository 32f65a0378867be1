"""The progress line and the summary of a training run."""

from collections import deque
from datetime import timedelta
from functools import partial
from statistics import median
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from patrickstar._cli.console import print_row, print_text
from patrickstar._cli.first_step_notice import FirstStepNotice
from patrickstar._cli.summary import Summary
from patrickstar._cli.time_limit import TimeLimit
from patrickstar._engine.run_log import StepRecord, memory_figures, waiting_figure
from patrickstar._layout.byte_size import format_size
from patrickstar.integrations._meshes import MeshSizes

# Printed once, so that the progress line fits a terminal.
LEGEND = (
    "device: peaks of model data and of non-model data, at different moments, and their budget; host: peak; disk: "
    "bytes stored; moved: bytes to and from the device in the step; waiting: share of the step's time for transfers"
)
RECENT_STEPS = 20
"""Number of steps whose median time gives the time that is left."""
BAR_WIDTH = 30


class Progress:
    """Progress display: a live bar and figures in a terminal, else one plain line per step; nothing if ``quiet``.

    Args:
        console: Where to print.
        steps: Number of the last step.
        device_budget_bytes: Budget of the device, to be compared with what is used.
        limit: Limit on the time of the run.
        done: Number of steps that were completed before.
        notice: Text for a first step that takes long.
        quiet: Show nothing.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        device_budget_bytes: int,
        limit: TimeLimit,
        *,
        done: int = 0,
        notice: str = "",
        quiet: bool = False,
    ) -> None:
        self._console = console
        self._steps = steps
        self._device_budget_bytes = device_budget_bytes
        self._limit = limit
        self._done = done
        self._quiet = quiet
        self._notice = FirstStepNotice(partial(print_text, console, notice))
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        # Refreshed manually once per step, so that no thread draws while the step computes.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None

    def show(self, record: StepRecord) -> None:
        """Update the live display, or print a new line."""
        assert record.loss is not None and record.tokens is not None, "the training loop logs them"
        self._notice.end()
        self._seconds.append(record.elapsed_s)
        figures, left = self._figures(record), self._time_left(record)
        if self._live is not None:
            self._draw(self._live, record.step, left, "  ".join(figures))
        elif not self._quiet:
            print_text(self._console, "  ".join((self._step(record.step), *figures, left)))

    def note(self, name: str, text: str) -> None:
        """Print a name and a text above the live display, or as a new line."""
        if not self._quiet:
            print_row(self._console, name, text)

    def _draw(self, live: Live, step: int, left: str, figures: str) -> None:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(self._step(step), ProgressBar(self._steps, step, width=BAR_WIDTH), left)
        live.update(Group(bar, Text(figures, no_wrap=True, overflow="ellipsis")), refresh=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._draw(self._live, self._done, "", f"step {self._done + 1} is running")
        if not self._quiet:
            self._notice.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._notice.end()
        if self._live is not None:
            self._live.stop()

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"

    def _time_left(self, record: StepRecord) -> str:
        left_s = min((self._steps - record.step) * median(self._seconds), max(0.0, self._limit.left_s))
        return f"{timedelta(seconds=round(left_s))} left"

    def _figures(self, record: StepRecord) -> tuple[str, ...]:
        stats = record.stats
        return (
            f"loss {record.loss:.4f}",
            f"{(record.tokens or 0) / record.elapsed_s:,.0f} tokens/s",
            *memory_figures(record, self._device_budget_bytes),
            f"moved {format_size(stats.h2d_bytes + stats.d2h_bytes)}",
            waiting_figure(record),
        )


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary of a run, with average bytes per step."""
    console.print()
    for name, value in _rows(summary):
        print_row(console, name, value)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    ratio = summary.model_data_bytes / summary.device_budget_bytes
    stats = summary.stats
    steps = f"{summary.steps}, interrupted" if summary.interrupted else str(summary.steps)
    if summary.minutes is not None:
        steps += f", ended by --minutes {summary.minutes:g}"
    unfinished = f", and {summary.unfinished_s:.1f} s of an unfinished step" if summary.interrupted else ""
    means = f" (means of {summary.loss_steps} steps)" if summary.loss_steps > 1 else ""
    distributed = summary.processes > 1
    sizes = MeshSizes(summary.processes, summary.tp, summary.ep, summary.replicas)
    return [
        ("machine", summary.machine),
        *([("mesh", f"{sizes}; the following values are those of rank 0")] if distributed else []),
        ("model", f"{summary.model}, {summary.parameters:,} parameters, {summary.precision} on {summary.device}"),
        (
            "model data",
            f"{format_size(summary.model_data_bytes)}, {ratio:.2f} times the device budget of "
            f"{format_size(summary.device_budget_bytes)}; {format_size(summary.padding_bytes)} of it padding",
        ),
        *([("activations", f"{summary.activations}, chosen by dry runs")] if summary.activations else []),
        ("steps", f"{steps} in {summary.elapsed_s:.1f} s{unfinished}"),
        ("loss", f"{summary.loss_first:.4f} at the start, {summary.loss_last:.4f} at the end{means}"),
        ("tokens/s", f"{summary.tokens_per_s:,.0f}"),
        (
            "moved per step",
            f"{format_size(stats.h2d_bytes // stats.steps)} to the device, "
            f"{format_size(stats.d2h_bytes // stats.steps)} to the host",
        ),
        *(
            [
                (
                    "disk per step",
                    f"{format_size(stats.disk_read_bytes // stats.steps)} read, "
                    f"{format_size(stats.disk_write_bytes // stats.steps)} written; "
                    f"{format_size(stats.disk_bytes)} stored",
                )
            ]
            if stats.disk_bytes
            else []
        ),
        *(
            [
                (
                    "sent per step",
                    f"{format_size(stats.gathered_bytes // stats.steps)} of parameters, "
                    f"{format_size(stats.reduced_bytes // stats.steps)} of gradients",
                )
            ]
            if distributed
            else []
        ),
        *(
            [
                (
                    "to replicas",
                    f"{format_size(stats.inter_replica_gathered_bytes // stats.steps)} of these parameters, "
                    f"{format_size(stats.inter_replica_reduced_bytes // stats.steps)} of these gradients",
                )
            ]
            if sizes.replicas > 1
            else []
        ),
        ("device peak", _peaks(stats.device_peak_model_bytes, stats.device_peak_non_model_bytes)),
        ("host peak", _peaks(stats.host_peak_model_bytes, stats.host_peak_non_model_bytes)),
        *(
            [("process", f"{format_size(stats.library_resident_peak_bytes)} for libraries, beside the budgets")]
            if stats.library_resident_peak_bytes
            else []
        ),
        ("evictions", str(stats.evictions)),
        *(
            [("staleness", f"{stats.staleness:.2f} updates on average, {stats.peak_staleness} at most")]
            if stats.peak_staleness
            else []
        ),
        ("stalled", f"{stats.stall_s:.2f} s waiting for transfers"),
    ]


def _peaks(model_bytes: int, non_model_bytes: int) -> str:
    return f"{format_size(model_bytes)} model data, {format_size(non_model_bytes)} non-model data"
