"""Waits of computation: for which parameter, on which channel, and why it was late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._schedule.step_timeline import Stall, StepTimeline, Work, chunk_index

LISTED = 12
"""Number of stalls in the table of the longest."""


@dataclass(frozen=True)
class NamedStall:
    """Wait of computation."""

    start_s: float
    end_s: float
    parameter: str
    """First parameter of the chunk that was waited for; or what else was."""
    channel: str
    """Channel that brought it; empty if none is known."""
    reason: str
    """Why it was late, as a sentence without a full stop."""

    @property
    def seconds(self) -> float:
        """Length of the wait."""
        return self.end_s - self.start_s


def named_stalls(timeline: StepTimeline, names: Mapping[int, Sequence[str]]) -> list[NamedStall]:
    """Return the stalls of a step, in order. `names`: parameters of each chunk of parameters, by its index."""
    return [_named(stall, timeline, names) for stall in sorted(timeline.stalls, key=lambda each: each.start_s)]


def covered_s(spans: Sequence[NamedStall | Work]) -> float:
    """Return the time of waits or works; those inside of others count once."""
    total_s, until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start_s):
        total_s += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def longest(stalls: Sequence[NamedStall]) -> list[NamedStall]:
    """Return the longest stalls, the longest first."""
    return sorted(stalls, key=lambda each: each.seconds, reverse=True)[:LISTED]


def chunk_name(label: str, names: Mapping[int, Sequence[str]]) -> str:
    """Return the first parameter of a chunk such as `param16[3]`, and how many others it has."""
    index = chunk_index(label)
    found = () if index is None else names.get(index, ())
    if not found:
        return label
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more} ({label})"


def _named(stall: Stall, timeline: StepTimeline, names: Mapping[int, Sequence[str]]) -> NamedStall:
    label = stall.label.removeprefix("gradients of ")
    work = _awaited(label, stall, timeline)
    if work is None:
        reason = "what it waited for is not recorded: an agreement of several processes, or a copy within an operator"
        return NamedStall(stall.start_s, stall.end_s, chunk_name(label, names), "", reason)
    return NamedStall(stall.start_s, stall.end_s, chunk_name(label, names), work.channel, _reason(work, stall))


def _awaited(label: str, stall: Stall, timeline: StepTimeline) -> Work | None:
    """Return the last work with this label that had been requested by the end of the wait and ended in it."""
    works = [work for work in timeline.work if work.label == label and work.asked_s <= stall.end_s]
    during = [work for work in works if work.end_s >= stall.start_s]
    return max(during, key=lambda work: work.asked_s, default=None)


def _reason(work: Work, stall: Stall) -> str:
    took_s, queued_s = work.end_s - work.start_s, work.start_s - work.asked_s
    rate = f"{format_size(work.nbytes)} in {format_seconds(took_s)}" if took_s > 0 else format_size(work.nbytes)
    if work.urgent:
        return f"it was requested only when an operator needed it: {rate}"
    lead = f"requested {format_seconds(stall.start_s - work.asked_s)} before its use"
    if queued_s > took_s:
        return f"{lead}, it was behind other transfers for {format_seconds(queued_s)}, and then took {rate}"
    return f"{lead}, it took {rate}"
