"""Plans and forecasts as plain text: rows, bars of lanes and tiers, and a picture of memory over a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from patrickstar._layout.byte_size import format_size

NAME_WIDTH = 16
BAR_WIDTH = 24
PICTURE_WIDTH = 60
HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class ChannelRow:
    """What one resource does in a step."""

    name: str
    busy_s: float
    amount: str
    """What it moves, or computes."""


@dataclass(frozen=True)
class TierRow:
    """What a tier holds at its fullest."""

    name: str
    used_bytes: int
    there_bytes: int


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Names, and what is to be said of them."""
    return "\n".join(f"{name:<{NAME_WIDTH}}{text}" for name, text in pairs)


def channels_table(channels: Iterable[ChannelRow], seconds: float) -> str:
    """How long each resource is busy and idle in a step of so many seconds."""
    cells = [("resource", "busy", "idle", "moves", "busy share")]
    for lane in channels:
        share = lane.busy_s / seconds if seconds else 0.0
        idle_s = max(0.0, seconds - lane.busy_s)
        cells.append((lane.name, f"{lane.busy_s:.2f} s", f"{idle_s:.2f} s", lane.amount, bar(share)))
    return _table("where the time goes", cells)


def memory_table(tiers: Iterable[TierRow]) -> str:
    """How full each tier is."""
    cells = [("tier", "used", "of", "share")]
    for tier in tiers:
        share = tier.used_bytes / tier.there_bytes if tier.there_bytes else 0.0
        cells.append((tier.name, format_size(tier.used_bytes), format_size(tier.there_bytes), bar(share)))
    return _table("memory", cells)


def _table(title: str, cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def bar(share: float) -> str:
    """A share of one as a bar."""
    filled = round(BAR_WIDTH * min(1.0, share))
    return "#" * filled + "." * (BAR_WIDTH - filled)


def picture(samples: Sequence[tuple[float, int]], seconds: float, full_bytes: int) -> str:
    """Bytes over time as a line of blocks, each as high as the most in its part of the time; full is the budget."""
    if not samples or not full_bytes or seconds <= 0:
        return ""
    most: list[int | None] = [None] * PICTURE_WIDTH
    for at_s, nbytes in samples:
        column = min(PICTURE_WIDTH - 1, int(PICTURE_WIDTH * at_s / seconds))
        most[column] = max(most[column] or 0, nbytes)
    steps, last, drawn = len(HEIGHTS) - 1, samples[0][1], ""
    for found in most:
        last = last if found is None else found
        # Any bytes at all are to be seen.
        drawn += HEIGHTS[min(steps, -(-steps * last // full_bytes))]
    return drawn
