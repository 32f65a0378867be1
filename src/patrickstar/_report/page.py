"""Page of a report: one HTML file with all pictures, which needs no network."""

import html
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from patrickstar._layout.byte_size import format_size
from patrickstar._report.advice import advice
from patrickstar._report.figures import (
    CURVES,
    channels_figure,
    memory_figure,
    residency_figure,
    steps_figure,
)
from patrickstar._report.html_page import Figure, cards, html_page, picture, table, write_page
from patrickstar._report.memory_curves import memory_curves
from patrickstar._report.products import slowest_rows
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import NamedStall, covered_s, longest, named_stalls
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import StepTimeline

PICTURES = {
    "channels": ("Channels and waits", "When each channel was busy, and what computation waited for."),
    "device": ("Device memory", "What is on the device at each time, under its budget."),
    "host": ("Host memory", "What is in host memory at each time, under its budget."),
    "residency": ("Where the parameters are", "One row per chunk. Hover to see its parameters."),
}
"""Title and explanation of each picture of a step."""
TITLES = {
    "loss": "Loss",
    "seconds": "Time of a step",
    "bytes": "Bytes moved",
    "evictions": "Evictions",
    "staleness": "Staleness",
}
EXPLANATIONS = {
    "loss": "The training loss, as it was logged.",
    "seconds": "How long a step took, and how much of it computation waited for transfers.",
    "bytes": "Between the tiers, and to other processes.",
    "evictions": "Chunks that left the device to make room.",
    "staleness": "Updates that the parameters of a step's forward did not contain yet.",
}


SHOWN = 6
"""Largest number of timelines of a run on a page, so that it stays small."""


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the page of a run, or of two that are compared.

    Raises:
        ConfigError: The file can't be written.
    """
    write_page(page(runs), path)


def page(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    figures: dict[str, Figure] = {}
    body = [_section(run, number, figures) for number, run in enumerate(runs)]
    body.append(_steps_section(runs, figures))
    title = " and ".join(run.description["model"] for run in runs)
    return html_page(f"{title}: report", "\n".join(body), figures)


def _section(run: Run, number: int, figures: dict[str, Figure]) -> str:
    about, names = run.description, run.names
    parts = [f"<h1>{html.escape(about['model'])}</h1>", f'<p class="about">{html.escape(_about(run))}</p>']
    parts.append(_cards(run))
    if run.plan:
        parts.append(_said_and_took(run))
    if not run.timelines:
        parts.append("<p>No step of this run was recorded.</p>")
        return f"<section>{''.join(parts)}</section>"
    options, steps = [], []
    for timeline in _shown(run.timelines):
        key = f"run{number}-step{timeline.step}"
        last = timeline is run.timelines[-1]
        stalls = named_stalls(timeline, names)
        options.append(f'<option value="{key}"{" selected" if last else ""}>{timeline.step}</option>')
        figures[f"{key}-channels"] = channels_figure(run, timeline)
        figures[f"{key}-device"] = memory_figure(run, timeline, Tier.DEVICE)
        figures[f"{key}-host"] = memory_figure(run, timeline, Tier.HOST)
        figures[f"{key}-residency"] = residency_figure(run, timeline)
        steps.append(_step(key, run, timeline, stalls, last))
    parts.append(
        f'<div class="choice"><label for="step{number}">Recorded step</label>'
        f'<select id="step{number}" data-group="run{number}">{"".join(options)}</select></div>'
    )
    return f"<section>{''.join(parts + steps)}</section>"


def _shown(timelines: Sequence[StepTimeline]) -> Sequence[StepTimeline]:
    """Return the first timeline, of the step that was traced, and the last ones."""
    return timelines if len(timelines) <= SHOWN else [timelines[0], *timelines[1 - SHOWN :]]


def _about(run: Run) -> str:
    about = run.description
    processes = f", {about['processes']} processes" if about["processes"] > 1 else ""
    disk = ", disk" if about["disk"] is not None else ""
    return (
        f"{about['parameters']:,} parameters, {about['precision']} on {about['device']}{processes}; budgets: device "
        f"{format_size(about['device_budget_bytes'])}, host {format_size(about['host_budget_bytes'])}{disk}. "
        f"{about['machine']}. {about['started']}. {run.path.name}"
    )


def _cards(run: Run) -> str:
    about = run.description
    later = run.steps[len(run.steps) // 2 :]
    seconds = median(step["elapsed_s"] for step in later)
    stalled = median(step["stall_s"] for step in later)
    tokens = [step["tokens"] / step["elapsed_s"] for step in later if step.get("tokens")]
    losses = [step["loss"] for step in run.steps if step.get("loss") is not None]
    peak = max((memory_curves(each, Tier.DEVICE).peak for each in run.timelines), default=0)
    ratio = about["model_data_bytes"] / about["device_budget_bytes"]
    texts = [
        ("step", f"{seconds:.3g} s", "median of the second half"),
        *([("speed", f"{median(tokens):,.0f} tokens/s", "median of the second half")] if tokens else []),
        ("waiting", f"{stalled / seconds:.0%}", "of a step, for transfers"),
        ("model data", format_size(about["model_data_bytes"]), f"{ratio:.1f} times the device budget"),
        *([("device peak", format_size(peak), f"of {format_size(about['device_budget_bytes'])}")] if peak else []),
        *([("loss", f"{losses[-1]:.4f}", f"{losses[0]:.4f} in the first step")] if losses else []),
    ]
    return cards(texts)


COMPARED = {
    "seconds": "time of a step",
    "h2d_bytes": "moved to the device",
    "d2h_bytes": "moved to the host",
    "disk_read_bytes": "read from disk",
    "disk_write_bytes": "written to disk",
    "device_peak_model_bytes": "peak of model data on the device",
    "host_peak_model_bytes": "peak of model data on the host",
}
"""Values of a step that a dry run predicts, by field."""


def _said_and_took(run: Run) -> str:
    """Return a table of what a dry run said and what a step took: medians of the second half of the steps."""
    later, rows = run.steps[len(run.steps) // 2 :], []
    for name, title in COMPARED.items():
        said, took = run.plan[name], median(step["elapsed_s" if name == "seconds" else name] for step in later)
        if said or took:
            texts = [f"{each:.3g} s" if name == "seconds" else format_size(round(each)) for each in (said, took)]
            rows.append((title, *texts, f"{took / said:.2f}" if said else ""))
    rows.insert(1, ("lower bound of that plan", f"{run.plan['bound_s']:.3g} s", "", ""))
    compared = table(("of a step", "said", "took", "took / said"), rows, "Table of what was said and what it took")
    return f'<div class="said"><h2>What the dry run said, and what it took</h2>{compared}</div>'


def _step(key: str, run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall], shown: bool) -> str:
    sentences = "".join(f"<li>{html.escape(text)}</li>" for text in advice(run, timeline, stalls))
    pictures = "".join(picture(f"{key}-{name}", *texts) for name, texts in PICTURES.items())
    rows = [
        (f"{1e3 * each.seconds:.2f}", each.parameter, each.channel, each.reason[:1].upper() + each.reason[1:])
        for each in longest(stalls)
    ]
    waits = "<p>Computation waited for nothing.</p>"
    if rows:
        waits = table(("ms", "waited for", "channel", "why"), rows, f"Table of the waits of step {timeline.step}")
    slowest = ""
    if products := slowest_rows(run, timeline):
        columns = ("ms", "of the step", "product", "rate of a core")
        slowest = "<h2>Slowest products</h2>" + table(columns, products, f"Products of step {timeline.step}")
    summary = f"Step {timeline.step} took {timeline.seconds:.3f} s; computation waited {covered_s(stalls):.3f} s of it."
    return (
        f'<div class="step" id="{key}" data-group="{key.partition("-")[0]}"{"" if shown else " hidden"}>'
        f"<h2>What would make it faster</h2><p>{summary}</p><ul>{sentences}</ul>{pictures}"
        f"<h2>Longest waits</h2>{waits}{slowest}</div>"
    )


def _steps_section(runs: Sequence[Run], figures: dict[str, Figure]) -> str:
    pictures = []
    for name in CURVES:
        figure = steps_figure(runs, name)
        if figure is not None:
            figures[f"steps-{name}"] = figure
            pictures.append(picture(f"steps-{name}", TITLES[name], EXPLANATIONS[name]))
    return f'<section><h1>All steps</h1><div class="grid">{"".join(pictures)}</div></section>'
