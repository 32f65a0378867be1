"""What a run would take, printed before it: `patrickstar train --dry-run`."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from patrickstar.cli.report import LaneRow, TierRow, lanes_table, memory_table, picture, print_rows
from patrickstar.engine.forecast import Filled, Forecast
from patrickstar.layout.sizes import format_size


def print_forecast(console: Console, forecast: Forecast) -> None:
    """Print a planned step: its time, beside what nothing can be faster than, its bytes, and where they lie when."""
    print_rows(console, _rows(forecast))
    lanes = [LaneRow(lane.name, lane.busy_s, format_size(lane.nbytes)) for lane in forecast.lanes if lane.nbytes]
    console.print(lanes_table([LaneRow("compute", forecast.compute_s, ""), *lanes], forecast.seconds))
    tiers = _tiers(forecast)
    console.print(memory_table(tiers))
    console.print("over the step, full is the budget", soft_wrap=True)
    pictures: list[tuple[TierRow, Callable[[Filled], int]]] = [
        (tiers[0], lambda one: one.device_bytes),
        (tiers[1], lambda one: one.host_bytes),
    ]
    spent_s = forecast.timeline[-1].at_s if forecast.timeline else 0.0
    for tier, bytes_of in pictures:
        samples = [(one.at_s, bytes_of(one)) for one in forecast.timeline]
        drawn = picture(samples, spent_s, tier.there_bytes)
        console.print(Text.assemble(f"{tier.name:<8}", drawn), soft_wrap=True)


def _tiers(forecast: Forecast) -> list[TierRow]:
    stats = forecast.stats
    device = max((one.device_bytes for one in forecast.timeline), default=0)
    host = stats.host_peak_model_bytes + stats.host_peak_non_model_bytes
    rows = [
        TierRow("device", device, forecast.device_budget_bytes),
        TierRow("host", host, forecast.host_budget_bytes),
    ]
    if stats.disk_bytes:
        rows.append(TierRow("disk", stats.disk_bytes, stats.disk_bytes))
    return rows


def _rows(forecast: Forecast) -> list[tuple[str, str]]:
    stats = forecast.stats
    rows = [
        ("it fits", "nothing was trained; what follows is a step once it is planned"),
        ("step", f"{forecast.seconds:.2f} s, not below {forecast.bound_s:.2f} s with this plan"),
        (
            "device",
            f"model data {format_size(stats.device_peak_model_bytes)}, non-model data "
            f"{format_size(stats.device_peak_non_model_bytes)} at their peaks, which need not be at one time",
        ),
        ("moved", f"{format_size(stats.h2d_bytes)} to the device, {format_size(stats.d2h_bytes)} to the host"),
    ]
    if stats.disk_bytes:
        moved = f"{format_size(stats.disk_read_bytes)} read and {format_size(stats.disk_write_bytes)} written in a step"
        rows.append(("disk", moved))
    if forecast.estimated:
        names = ", ".join(forecast.estimated)
        rows.append(("estimated", f"from operations and bytes, as they can't be measured by themselves: {names}"))
    return rows
