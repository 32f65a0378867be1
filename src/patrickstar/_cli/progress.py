"""Progress line of a training run."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from patrickstar._cli.run_log import StepRecord
from patrickstar._layout.byte_size import format_size

# Printed once, so that the progress line fits a terminal.
LEGEND = "device: peak model data + peak non-model data of the budget; moved: bytes to and from the device in the step"


class Progress:
    """Progress display: one live line in a terminal, else one plain line per step; nothing if ``quiet``."""

    def __init__(self, console: Console, steps: int, device_budget_bytes: int, quiet: bool = False) -> None:
        self._console = console
        self._steps = steps
        self._device_budget_bytes = device_budget_bytes
        self._quiet = quiet
        # Refreshed manually once per step, so that no thread draws while the step computes.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None

    def show(self, record: StepRecord) -> None:
        """Update the live line, or print a new line."""
        line = Text(self._line(record), no_wrap=True, overflow="ellipsis")
        if self._live is not None:
            self._live.update(line, refresh=True)
        elif not self._quiet:
            # Neither wrapped nor cut if the output is a file.
            self._console.print(line.plain, soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _line(self, record: StepRecord) -> str:
        stats = record.stats
        width = len(str(self._steps))
        return "  ".join(
            (
                f"step {record.step:>{width}}/{self._steps}",
                f"loss {record.loss:.4f}",
                f"{record.tokens / record.elapsed_s:,.0f} tokens/s",
                f"device {format_size(stats.device_peak_model_bytes)}"
                f" + {format_size(stats.device_peak_non_model_bytes)} of {format_size(self._device_budget_bytes)}",
                f"moved {format_size(stats.h2d_bytes + stats.d2h_bytes)}",
            )
        )
