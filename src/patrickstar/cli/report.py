"""What plans and forecasts look like in a terminal: bars of lanes and tiers, and a picture of memory over a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patrickstar.layout.sizes import format_size

BAR_WIDTH = 24
PICTURE_WIDTH = 60
HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LaneRow:
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


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Names and what is to be said of them. Wrapped by the terminal alone: a file has no width."""
    for name, text in rows:
        console.print(Text.assemble((f"{name:<16}", "bold"), text), soft_wrap=True)


def lanes_table(lanes: Iterable[LaneRow], seconds: float) -> Table:
    """How long each resource is busy and idle in a step of so many seconds."""
    table = _table("where the time goes", "resource", "busy", "idle", "moves", "busy share")
    for lane in lanes:
        idle_s = max(0.0, seconds - lane.busy_s)
        share = lane.busy_s / seconds if seconds else 0.0
        table.add_row(lane.name, f"{lane.busy_s:.2f} s", f"{idle_s:.2f} s", lane.amount, bar(share))
    return table


def memory_table(tiers: Iterable[TierRow]) -> Table:
    """How full each tier is."""
    table = _table("memory", "tier", "used", "of", "share")
    for tier in tiers:
        share = tier.used_bytes / tier.there_bytes if tier.there_bytes else 0.0
        table.add_row(tier.name, format_size(tier.used_bytes), format_size(tier.there_bytes), bar(share))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def bar(share: float) -> str:
    """A share of one as a bar."""
    filled = round(BAR_WIDTH * min(1.0, share))
    return "#" * filled + "." * (BAR_WIDTH - filled)


def picture(samples: Sequence[tuple[float, int]], seconds: float, full_bytes: int) -> str:
    """Bytes over time as a line of blocks, each as high as the most in its part of the time; full is the budget."""
    if not samples or not full_bytes or seconds <= 0:
        return ""
    most = [0] * PICTURE_WIDTH
    known = [False] * PICTURE_WIDTH
    for at_s, nbytes in samples:
        column = min(PICTURE_WIDTH - 1, int(PICTURE_WIDTH * at_s / seconds))
        most[column], known[column] = max(most[column], nbytes), True
    for column in range(1, PICTURE_WIDTH):
        if not known[column]:
            most[column] = most[column - 1]
    steps = len(HEIGHTS) - 1
    # Any bytes at all are to be seen.
    return "".join(HEIGHTS[min(steps, -(-steps * nbytes // full_bytes))] for nbytes in most)
