"""Timelines in Chrome's trace format, which Perfetto and chrome://tracing show."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel, StepTimeline, Work, chunk_index
from patrickstar.errors import ConfigError

PROCESS = "PatrickStar"
"""Group of the channels in the trace."""
PHASES, STALLS = "phases", "stalls"

Event = dict[str, Any]


def write_chrome_trace(
    path: Path, timelines: Sequence[StepTimeline], names: Mapping[int, str], profile: Path | None = None
) -> None:
    """Write timelines as a trace.

    Args:
        path: JSON file to write.
        timelines: Timelines of this process, on the clock of `time.perf_counter`.
        names: First parameter of each chunk of parameters, by its index.
        profile: Trace of `torch.profiler`, whose content is written, too.

    Raises:
        ConfigError: A file can't be read or written.
    """
    trace: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}
    if profile is not None:
        try:
            trace = json.loads(profile.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{profile} is no trace of torch.profiler that can be read: {error}") from error
    # torch.profiler's times are microseconds since a base, which is in nanoseconds since the epoch.
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    offset_us = (time.time_ns() - time.perf_counter_ns() - base_ns) / 1e3
    rows: dict[str, int] = {PHASES: 0, STALLS: 1}
    events = [event for timeline in timelines for event in _events(timeline, names, rows)]
    for event in events:
        event["pid"], event["ts"] = PROCESS, round(event["ts"] * 1e6 + offset_us, 3)
    trace["traceEvents"] += [*_metadata(rows), *events]
    try:
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be written: {error.strerror}; choose another path") from error


def _metadata(rows: Mapping[str, int]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": PROCESS}}
    for name, row in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": row, "args": {"sort_index": row}}


def _events(timeline: StepTimeline, names: Mapping[int, str], rows: dict[str, int]) -> Iterator[Event]:
    """Yield the events of a step with times in seconds. `rows`: row of each channel, to which new ones are added."""
    for (start_s, name), (end_s, _) in zip(timeline.phases, timeline.phases[1:], strict=False):
        yield _span(f"{name} of step {timeline.step}", rows[PHASES], start_s, end_s)
    for stall in timeline.stalls:
        yield _span(named(stall.label, names), rows[STALLS], stall.start_s, stall.end_s)
    for channel in Channel:
        for number, works in enumerate(_side_by_side(work for work in timeline.work if work.channel is channel)):
            row = rows.setdefault(channel if number == 0 else f"{channel} {number + 1}", len(rows))
            for work in works:
                wait_ms = 1e3 * (work.start_s - work.asked_s)
                args = {"bytes": work.nbytes, "queued for ms": round(wait_ms, 3), "urgent": work.urgent}
                yield _span(named(work.label, names), row, work.start_s, work.end_s) | {"args": args}
    yield from _memory(timeline)


def _span(name: str, row: int, start_s: float, end_s: float) -> Event:
    return {"ph": "X", "name": name, "tid": row, "ts": start_s, "dur": round(1e6 * (end_s - start_s), 3)}


def named(label: str, names: Mapping[int, str]) -> str:
    """Return the label of a chunk with its first parameter, such as `param16[3] (h.0.attn.weight)`."""
    index = chunk_index(label)
    name = None if index is None else names.get(index)
    return label if name is None else f"{label} ({name})"


def _side_by_side(works: Iterable[Work]) -> list[list[Work]]:
    """Return works of one channel in rows, in each of which none overlaps another."""
    rows: list[list[Work]] = []
    for work in works:
        row = next((row for row in rows if row[-1].end_s <= work.start_s), None)
        if row is None:
            rows.append([work])
        else:
            row.append(work)
    return rows


def _memory(timeline: StepTimeline) -> Iterator[Event]:
    """Yield the number of chunks on each tier in memory, and the non-model data at each moment."""
    counts = dict.fromkeys((Tier.DEVICE, Tier.HOST), 0)
    for each in (*timeline.initial, *timeline.residency):
        if each.tier in counts:
            counts[each.tier] += 1 if each.present else -1
            chunks = {f"on the {tier.value}": count for tier, count in counts.items()}
            yield {"ph": "C", "name": "chunks", "ts": each.at_s, "args": chunks}
    for at_s, nbytes in timeline.non_model:
        yield {"ph": "C", "name": "non-model data on the device", "ts": at_s, "args": {"bytes": nbytes}}
