"""Summary printed at the end of a run."""

from rich.console import Console
from rich.text import Text

from patrickstar._cli.run_log import Summary
from patrickstar._layout.byte_size import format_size


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary of a run, with average bytes per step."""
    console.print()
    for name, value in _rows(summary):
        # Only the terminal wraps lines: a file has no width.
        console.print(Text.assemble((f"{name:<16}", "bold"), value), soft_wrap=True)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    ratio = summary.model_data_bytes / summary.device_budget_bytes
    stats = summary.stats
    steps = f"{summary.steps}, interrupted" if summary.interrupted else str(summary.steps)
    distributed = summary.processes > 1
    return [
        ("machine", summary.machine),
        *([("processes", f"{summary.processes}; the following values are those of rank 0")] if distributed else []),
        ("model", f"{summary.model}, {summary.parameters:,} parameters, {summary.precision} on {summary.device}"),
        (
            "model data",
            f"{format_size(summary.model_data_bytes)}, {ratio:.2f} times the device budget of "
            f"{format_size(summary.device_budget_bytes)}; {format_size(summary.padding_bytes)} of it padding",
        ),
        ("steps", f"{steps} in {summary.elapsed_s:.1f} s"),
        ("loss", f"{summary.loss_first:.4f} at the start, {summary.loss_last:.4f} at the end (means of up to 3 steps)"),
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
        ("device peak", _peaks(stats.device_peak_model_bytes, stats.device_peak_non_model_bytes)),
        ("host peak", _peaks(stats.host_peak_model_bytes, stats.host_peak_non_model_bytes)),
        ("evictions", str(stats.evictions)),
        ("stalled", f"{stats.stall_s:.2f} s waiting for transfers"),
    ]


def _peaks(model_bytes: int, non_model_bytes: int) -> str:
    return f"{format_size(model_bytes)} model data, {format_size(non_model_bytes)} non-model data"
