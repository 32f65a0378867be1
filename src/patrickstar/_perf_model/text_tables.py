"""Plain-text output of plans and dry runs: rows, utilization tables and a sparkline of memory over time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from patrickstar._layout.byte_size import format_size

NAME_WIDTH = 16
BAR_WIDTH = 24
SPARKLINE_WIDTH = 60
HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class ChannelRow:
    """Use of one resource in a step."""

    name: str
    busy_s: float
    amount: str
    """Amount of work as text: bytes or operations."""


@dataclass(frozen=True)
class TierRow:
    """Peak use of one tier."""

    name: str
    used_bytes: int
    capacity_bytes: int


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs of name and text, one per line."""
    return "\n".join(f"{name:<{NAME_WIDTH}}{text}" for name, text in pairs)


def channels_table(channels: Iterable[ChannelRow], seconds: float) -> str:
    """Format the busy and idle time of each resource in a step of `seconds`."""
    cells = [("resource", "busy", "idle", "amount", "utilization")]
    for channel in channels:
        share = channel.busy_s / seconds if seconds else 0.0
        idle_s = max(0.0, seconds - channel.busy_s)
        cells.append((channel.name, f"{channel.busy_s:.2f} s", f"{idle_s:.2f} s", channel.amount, bar(share)))
    return _table("where the time goes", cells)


def memory_table(tiers: Iterable[TierRow]) -> str:
    """Format the peak use of each tier."""
    cells = [("tier", "used", "capacity", "utilization")]
    for tier in tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        cells.append((tier.name, format_size(tier.used_bytes), format_size(tier.capacity_bytes), bar(share)))
    return _table("memory", cells)


def _table(title: str, cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def bar(share: float) -> str:
    """Format a fraction as a bar."""
    filled = round(BAR_WIDTH * min(1.0, share))
    return "#" * filled + "." * (BAR_WIDTH - filled)


def sparkline(samples: Sequence[tuple[float, int]], seconds: float, full_bytes: int) -> str:
    """Draw (time, bytes) samples as one line of blocks, each the maximum of its time slice relative to `full_bytes`."""
    if not samples or not full_bytes or seconds <= 0:
        return ""
    peaks: list[int | None] = [None] * SPARKLINE_WIDTH
    for at_s, nbytes in samples:
        column = min(SPARKLINE_WIDTH - 1, int(SPARKLINE_WIDTH * at_s / seconds))
        peaks[column] = max(peaks[column] or 0, nbytes)
    steps, last, line = len(HEIGHTS) - 1, samples[0][1], ""
    for peak in peaks:
        last = last if peak is None else peak
        # Round up, so that any use is visible.
        line += HEIGHTS[min(steps, -(-steps * last // full_bytes))]
    return line
