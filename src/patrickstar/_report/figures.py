"""Pictures of a run as figures of Plotly, in plain data.

A color such as `@stall` is a name, in place of which the page has a color of its theme.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import PARAM16
from patrickstar._report.html_page import Figure
from patrickstar._report.memory_curves import CATEGORIES, memory_curves
from patrickstar._report.residency_map import NOWHERE, PLACES, residency_map
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import chunk_name, named_stalls
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel, StepTimeline

MIB = 1 << 20
COMPUTE = "computation"
HIGHEST = {Tier.DEVICE: "device_budget_bytes", Tier.HOST: "host_budget_bytes"}


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis with a title that has a unit."""
    return {"title": {"text": title}, **options}


def memory_figure(run: Run, timeline: StepTimeline, tier: Tier) -> Figure:
    """Return the bytes of a tier over a step, stacked by what they are, and its budget."""
    curves = memory_curves(timeline, tier)
    times = [round(1e3 * at_s, 3) for at_s in curves.times]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": times,
            "y": [round(nbytes / MIB, 3) for nbytes in curves.values[name]],
            "text": [format_size(nbytes) for nbytes in curves.values[name]],
            "hovertemplate": "%{text}<extra>" + name + "</extra>",
            "stackgroup": "bytes",
            "line": {"shape": "hv", "width": 0},
            "fillcolor": f"@{name}",
        }
        for name in CATEGORIES[tier]
        if any(curves.values[name])
    ]
    budget = run.description[HIGHEST[tier]] / MIB
    near = curves.peak / MIB > budget / 4
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "budget",
            "x": [0, times[-1]],
            "y": [budget, budget],
            "hovertemplate": format_size(run.description[HIGHEST[tier]]) + "<extra>budget</extra>",
            "line": {"color": "@budget", "width": 2, "dash": "dash"},
            "visible": True if near else "legendonly",
        }
    )
    layout = {
        "xaxis": axis("time in the step, ms", range=[0, times[-1]]),
        "yaxis": axis(f"{tier.value} memory, MiB", rangemode="tozero"),
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}


def channels_figure(run: Run, timeline: StepTimeline) -> Figure:
    """Return when each channel was busy in a step, and what computation waited for."""
    names, end_s = run.names, timeline.end_s
    traces = [_phases(timeline)]
    stalls = named_stalls(timeline, names)
    spans = [(each.start_s, each.end_s, f"{each.parameter}<br>{each.reason}") for each in stalls]
    traces.append(_bars("waits of computation", spans, end_s, "@stall"))
    for channel in Channel:
        works = [work for work in timeline.work if work.channel is channel]
        spans = [
            (
                work.start_s,
                work.end_s,
                f"{chunk_name(work.label, names)}<br>{format_size(work.nbytes)}, requested "
                f"{1e3 * (work.start_s - work.asked_s):.2f} ms before",
            )
            for work in works
        ]
        if spans:
            traces.append(_bars(channel.value, spans, end_s, f"@{channel.value}"))
    rows = list(dict.fromkeys(trace["y"][0] for trace in traces if trace["y"]))
    layout = {
        "xaxis": axis("time in the step, ms", range=[0, 1e3 * end_s]),
        "yaxis": {"categoryorder": "array", "categoryarray": rows[::-1], "automargin": True},
        "barmode": "overlay",
        "bargap": 0.25,
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def _phases(timeline: StepTimeline) -> dict[str, Any]:
    marks = [(at_s, name) for at_s, name in timeline.phases]
    ends = [at_s for at_s, _ in marks[1:]] + [timeline.end_s]
    spans = [(start_s, end_s, name) for (start_s, name), end_s in zip(marks, ends, strict=True) if name]
    trace = _bars(COMPUTE, spans, timeline.end_s, "@phase")
    trace["text"] = [name for _, _, name in spans]
    trace["textposition"] = "inside"
    trace["insidetextanchor"] = "middle"
    return trace


def _bars(name: str, spans: Sequence[tuple[float, float, str]], end_s: float, color: str) -> dict[str, Any]:
    """Return horizontal bars from begin to end. What began before the step, begins with it in the picture."""
    clipped = [(max(start_s, 0.0), min(stop_s, end_s), text) for start_s, stop_s, text in spans if stop_s >= 0]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [name] * len(clipped),
        "base": [round(1e3 * start_s, 3) for start_s, _, _ in clipped],
        "x": [round(1e3 * (stop_s - start_s), 3) for start_s, stop_s, _ in clipped],
        "customdata": [text for _, _, text in clipped],
        "hovertemplate": "%{customdata}<br>%{x:.2f} ms, from %{base:.2f} ms<extra>" + name + "</extra>",
        "textposition": "none",
        "marker": {"color": color, "line": {"width": 0}},
    }


def residency_figure(run: Run, timeline: StepTimeline) -> Figure:
    """Return where each chunk of parameters was over a step. `runs`: count and place of equal values in each row."""
    names = run.names
    found = residency_map(timeline, PARAM16)
    colors = [f"@{name}" for name in PLACES]
    share = 1 / len(colors)
    scale = [[edge, color] for n, color in enumerate(colors) for edge in (n * share, (n + 1) * share)]
    trace = {
        "type": "heatmap",
        "x": [round(1e3 * at_s, 3) for at_s in found.times],
        "y": [chunk_name(f"{PARAM16}[{index}]", names) for index in found.chunks],
        "runs": [[[len(list(equal)), place] for place, equal in groupby(row)] for row in found.places],
        "places": list(PLACES),
        "hovertemplate": "%{y}<br>%{text} at %{x:.2f} ms<extra></extra>",
        "colorscale": scale,
        "zmin": NOWHERE - 0.5,
        "zmax": len(PLACES) - 0.5,
        "showscale": False,
        "xgap": 0,
        "ygap": 1,
    }
    layout = {
        "xaxis": axis("time in the step, ms"),
        "yaxis": axis("chunks", autorange="reversed", showticklabels=False),
    }
    return {"data": [trace], "layout": layout, "key": list(PLACES)}


CURVES: Mapping[str, tuple[str, tuple[tuple[str, str, float], ...]]] = {
    "loss": ("loss, nats per token", (("loss", "loss", 1),)),
    "seconds": ("time of a step, s", (("elapsed_s", "step", 1), ("stall_s", "waiting for transfers", 1))),
    "bytes": (
        "moved per step, GiB",
        (
            ("h2d_bytes", "to the device", 1 << 30),
            ("d2h_bytes", "to the host", 1 << 30),
            ("disk_read_bytes", "read from disk", 1 << 30),
            ("disk_write_bytes", "written to disk", 1 << 30),
            ("gathered_bytes", "parameters sent", 1 << 30),
            ("reduced_bytes", "gradients sent", 1 << 30),
        ),
    ),
    "evictions": ("evicted per step, chunks", (("evictions", "evictions", 1),)),
    "staleness": ("staleness, updates", (("staleness", "mean", 1), ("peak_staleness", "largest", 1))),
}
"""Pictures of all steps by name: title of the axis, and field, name and unit of each curve."""


def steps_figure(runs: Sequence[Run], name: str) -> Figure | None:
    """Return a value of each step of one or several runs; None if no run has it."""
    title, curves = CURVES[name]
    traces = []
    for number, run in enumerate(runs):
        for place, (key, label, unit) in enumerate(curves):
            values = [step.get(key) for step in run.steps]
            if not any(values):
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(values) > 1 else "markers",
                    "name": label if len(runs) == 1 else f"{run.path.name}: {label}",
                    "x": [step["step"] for step in run.steps],
                    "y": [None if value is None else round(value / unit, 6) for value in values],
                    "line": {"width": 2, "color": f"@curve{place}", "dash": "solid" if number == 0 else "dot"},
                    "hovertemplate": "%{y}<extra>" + label + "</extra>",
                }
            )
    if not traces:
        return None
    mode = "normal" if name == "loss" else "tozero"
    layout = {"xaxis": axis("step, number"), "yaxis": axis(title, rangemode=mode), "hovermode": "x unified"}
    return {"data": traces, "layout": layout}
