"""Plain-text output of plans and dry runs: rows, utilization tables, and lines that show memory and use over time."""

from collections.abc import Iterable, Sequence

from patrickstar._layout.byte_size import format_size

NAME_WIDTH = 16
BAR_WIDTH = 24
LINE_NAME_WIDTH = 20
"""Width of the names before lines over time, which are drawn one below the other."""
SPARKLINE_WIDTH = 60
HEIGHTS = " ▁▂▃▄▅▆▇█"
LEAST_SHARE = 1e-6
"""Share of a time slice up to which it counts as empty: rounding errors are smaller."""


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs of name and text, one per line."""
    return "\n".join(f"{name:<{NAME_WIDTH}}{text}" for name, text in pairs)


def channels_table(channels: Iterable[tuple[str, float, str]], seconds: float) -> str:
    """Format the use of each resource in a step of `seconds`: name, busy seconds, bytes or operations as text."""
    cells = [("resource", "busy", "idle", "amount", "utilization")]
    for name, busy_s, amount in channels:
        idle_s = max(0.0, seconds - busy_s)
        cells.append((name, format_seconds(busy_s), format_seconds(idle_s), amount, _bar(busy_s, seconds)))
    return table("where the time goes", cells)


def memory_table(tiers: Iterable[tuple[str, int, int]]) -> str:
    """Format the peak use of each tier: name, used bytes, capacity in bytes."""
    cells = [("tier", "used", "capacity", "utilization")]
    for name, used, capacity in tiers:
        cells.append((name, format_size(used), format_size(capacity), _bar(used, capacity)))
    return table("memory", cells)


def table(title: str, cells: Sequence[Sequence[str]]) -> str:
    """Format rows of cells in aligned columns below a title."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _bar(part: float, whole: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, part / whole)) if whole else 0
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


def busy_line(spans: Iterable[tuple[float, float]], seconds: float) -> str:
    """Draw (start, end) spans as one line of blocks, each the share of its time slice in which a resource is busy."""
    steps = len(HEIGHTS) - 1
    # Any use is visible.
    return "".join(
        HEIGHTS[max(round(steps * share), int(share > LEAST_SHARE))] for share in _slice_shares(spans, seconds)
    )


def mark_line(spans: Iterable[tuple[float, float]], seconds: float) -> str:
    """Mark the time slices that (start, end) spans cover: `^` at least half of the slice, `.` less."""
    return "".join(
        "^" if share >= 0.5 else "." if share > LEAST_SHARE else " " for share in _slice_shares(spans, seconds)
    )


def _slice_shares(spans: Iterable[tuple[float, float]], seconds: float) -> list[float]:
    """Return the covered share of each time slice; spans do not overlap."""
    if seconds <= 0:
        return []
    covered, slice_s = [0.0] * SPARKLINE_WIDTH, seconds / SPARKLINE_WIDTH
    for start_s, end_s in spans:
        first, last = (min(SPARKLINE_WIDTH - 1, int(at_s / slice_s)) for at_s in (start_s, end_s))
        for column in range(first, last + 1):
            covered[column] += max(0.0, min(end_s, (column + 1) * slice_s) - max(start_s, column * slice_s))
    return [covered_s / slice_s for covered_s in covered]


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds, or in milliseconds if it is shorter than one."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
