"""The line that shows how a run is going."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from patrickstar._cli.run_log import StepRecord
from patrickstar._layout.byte_size import format_size

# Said once, so that the line itself stays short enough for a terminal.
LEGEND = "device: peaks of model data + non-model data, of the budget; moved: both ways, in the step"


class Progress:
    """One live line in a terminal, a plain line for each step anywhere else, nothing when ``quiet``."""

    def __init__(self, console: Console, steps: int, device_budget_bytes: int, quiet: bool = False) -> None:
        self._console = console
        self._steps = steps
        self._device_budget_bytes = device_budget_bytes
        self._quiet = quiet
        # Refreshed by hand, once a step: no thread that draws while the step computes.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None

    def show(self, record: StepRecord) -> None:
        """Replace the live line, or print the next one."""
        line = Text(self._line(record), no_wrap=True, overflow="ellipsis")
        if self._live is not None:
            self._live.update(line, refresh=True)
        elif not self._quiet:
            # Not wrapped and not cut where the output is a file.
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
