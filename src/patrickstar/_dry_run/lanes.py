"""Lanes of a simulated step: busy intervals of each resource, waits of computation, and their picture and tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from patrickstar._perf_model.text_tables import LINE_NAME_WIDTH, busy_line, format_seconds, mark_line, table
from patrickstar._schedule.step_timeline import chunk_index

PHASES = ("forward", "backward", "step")
LONGEST_WAITS = 5
"""Number of names in the table of the longest waits."""


@dataclass(frozen=True)
class Interval:
    """Time in which a resource is busy with one thing, in seconds since the step's start."""

    start_s: float
    end_s: float
    label: str


@dataclass(frozen=True)
class Lane:
    """Busy intervals of one resource over a step, in order: of computation, or of a channel."""

    name: str
    intervals: tuple[Interval, ...]

    @property
    def busy_s(self) -> float:
        """Busy seconds within the step."""
        return sum(interval.end_s - interval.start_s for interval in self.intervals)


@dataclass(frozen=True)
class Wait:
    """Exposed time: computation waits for a channel."""

    start_s: float
    """Seconds since the step's start."""
    seconds: float
    channel: str
    label: str
    """Name of the transfer that is waited for; others before it in the queue may take a part of the time."""
    phase: str
    """Part of the step: forward, backward or step (all that follows a backward, until the next forward)."""
    parameter: str = ""
    """First parameter of the chunk that is waited for, if it is one."""

    @property
    def end_s(self) -> float:
        """End in seconds since the step's start."""
        return self.start_s + self.seconds


def clip(intervals: Iterable[Interval], start_s: float, end_s: float) -> tuple[Interval, ...]:
    """Return the parts of intervals between two times, relative to the first; empty ones are left out."""
    parts = (
        Interval(max(interval.start_s, start_s) - start_s, min(interval.end_s, end_s) - start_s, interval.label)
        for interval in intervals
    )
    return tuple(part for part in parts if part.start_s < part.end_s)


def name_parameters(waits: Iterable[Wait], start_s: float, first_parameters: Mapping[int, str]) -> tuple[Wait, ...]:
    """Return waits relative to `start_s`, with the first parameter of each chunk that is waited for.

    Args:
        waits: With times since the start of the dry run.
        start_s: Start of the step since the start of the dry run, in seconds.
        first_parameters: Name of the first parameter by the index of its chunk.
    """
    named = []
    for wait in waits:
        index = chunk_index(wait.label)
        parameter = "" if index is None else first_parameters.get(index, "")
        named.append(replace(wait, start_s=wait.start_s - start_s, parameter=parameter))
    return tuple(named)


def end_s(lanes: Iterable[Lane], waits: Iterable[Wait]) -> float:
    """Return the end of the step: computation or a wait ends it."""
    ends = [interval.end_s for lane in lanes for interval in lane.intervals[-1:]]
    return max([*ends, *(wait.end_s for wait in waits)], default=0.0)


def picture(lanes: Iterable[Lane], waits: Sequence[Wait]) -> str:
    """Draw each used lane as one line over time, with marks below where computation waits."""
    lanes = [lane for lane in lanes if lane.intervals]
    seconds = end_s(lanes, waits)
    lines = ["the step over time (full height: busy all the time; ^ compute waits half of the time or more, . less)"]
    for lane in lanes:
        spans = [(interval.start_s, interval.end_s) for interval in lane.intervals]
        lines.append(f"  {lane.name:<{LINE_NAME_WIDTH}}{busy_line(spans, seconds)}")
    marks = mark_line([(wait.start_s, wait.end_s) for wait in waits], seconds)
    lines.append(f"  {'compute waits':<{LINE_NAME_WIDTH}}{marks}".rstrip())
    return "\n".join(lines)


def exposed_table(waits: Sequence[Wait], seconds: float) -> str:
    """Format what computation waits for in a step of `seconds`: by channel and phase, then by name."""
    if not waits:
        return "exposed: nothing, compute never waits"
    total_s = _sum_s(waits)
    phases = [phase for phase in PHASES if any(wait.phase == phase for wait in waits)]
    by_channel = [("waits for", "exposed", "share", *phases)]
    for group in _grouped(waits, "channel"):
        group_s = _sum_s(group)
        in_phases = [_sum_s(wait for wait in group if wait.phase == phase) for phase in phases]
        cells = [format_seconds(phase_s) if phase_s else "" for phase_s in in_phases]
        by_channel.append((group[0].channel, format_seconds(group_s), f"{group_s / seconds:.0%}", *cells))
    by_name = [("exposed", "waits", "for", "channel", "phase", "first at", "first parameter")]
    for group in _grouped(waits, "label", "channel", "phase")[:LONGEST_WAITS]:
        first = group[0]
        names = first.label, first.channel, first.phase
        by_name.append(
            (format_seconds(_sum_s(group)), str(len(group)), *names, format_seconds(first.start_s), first.parameter)
        )
    title = f"exposed: compute waits {format_seconds(total_s)}, {total_s / seconds:.0%} of the step"
    return "\n".join([table(title, by_channel), table("longest waits", by_name)])


def _grouped(waits: Iterable[Wait], *attributes: str) -> list[list[Wait]]:
    """Return the waits that agree in these attributes together, the longest sum first."""
    groups: dict[tuple[str, ...], list[Wait]] = {}
    for wait in waits:
        groups.setdefault(tuple(getattr(wait, attribute) for attribute in attributes), []).append(wait)
    return sorted(groups.values(), key=_sum_s, reverse=True)


def _sum_s(waits: Iterable[Wait]) -> float:
    return sum(wait.seconds for wait in waits)
