"""What a run would take, printed before it: `patrickstar train --dry-run`."""

from rich.console import Console
from rich.text import Text

from patrickstar.engine.rehearsal import Forecast
from patrickstar.layout.sizes import format_size


def print_forecast(console: Console, forecast: Forecast) -> None:
    """Print a planned step: its time, beside what nothing can be faster than, and its bytes."""
    for name, value in _rows(forecast):
        console.print(Text.assemble((f"{name:<16}", "bold"), value), soft_wrap=True)


def _rows(forecast: Forecast) -> list[tuple[str, str]]:
    stats = forecast.stats
    device = stats.device_peak_model_bytes + stats.device_peak_non_model_bytes
    host = stats.host_peak_model_bytes + stats.host_peak_non_model_bytes
    busy = ", ".join(f"{lane.name} {lane.busy_s:.2f} s" for lane in forecast.lanes if lane.nbytes)
    rows = [
        ("it fits", "nothing was trained; what follows is a step once it is planned"),
        ("step", f"{forecast.seconds:.2f} s, not below {forecast.bound_s:.2f} s with this plan"),
        ("busy", f"compute {forecast.compute_s:.2f} s" + (f", {busy}" if busy else "")),
        (
            "device",
            f"{format_size(device)} of {format_size(forecast.device_budget_bytes)}: model data "
            f"{format_size(stats.device_peak_model_bytes)}, non-model data "
            f"{format_size(stats.device_peak_non_model_bytes)} at their peaks",
        ),
        ("host", f"{format_size(host)} of {format_size(forecast.host_budget_bytes)}"),
        ("moved", f"{format_size(stats.h2d_bytes)} to the device, {format_size(stats.d2h_bytes)} to the host"),
    ]
    if stats.disk_bytes:
        rows.append(
            (
                "disk",
                f"{format_size(stats.disk_bytes)} lie there; {format_size(stats.disk_read_bytes)} read and "
                f"{format_size(stats.disk_write_bytes)} written in a step",
            )
        )
    return rows
