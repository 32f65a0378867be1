"""Page of a plan: the answer, the frontier over memory, and what further parts would bring."""

import html

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._plan.frontier import Frontier
from patrickstar._plan.plan_text import activations_text, answer, config_text, gain, loads, remarks, speed, tiers
from patrickstar._plan.prediction import Prediction
from patrickstar._report.figures import axis
from patrickstar._report.html_page import Figure, cards, html_page, picture, table

GIB = 1 << 30


def plan_page(plan: Prediction) -> str:
    """Return the plan as an HTML page that needs no network."""
    best = plan.best
    figures: dict[str, Figure] = {"resources": _resources_figure(plan)}
    places = [picture("resources", "Where the time goes", "Busy seconds of each resource in a step.")]
    for number, frontier in enumerate(plan.frontier):
        key = f"frontier{number}"
        figures[key] = _frontier_figure(plan, frontier)
        places.append(
            picture(
                key,
                f"Speed over {frontier.tier}",
                f"Most tokens per second with less and more {frontier.tier}, relative to this plan (the mark), by "
                "estimates.",
            )
        )
    upgrades = [(each.name, gain(each, best)) for each in plan.upgrades]
    memory = [
        (name, format_size(used), format_size(capacity), f"{used / capacity:.0%}")
        for name, used, capacity in tiers(plan.budgets, best)
    ]
    sections = [
        f"<h1>{html.escape(answer(plan))}</h1>",
        f'<p class="about">{html.escape(plan.machine.source)}</p>',
        _cards(plan),
        f'<h2>To set</h2><pre tabindex="0">{html.escape(config_text(plan))}</pre>',
        f'<div class="grid">{"".join(places)}</div>',
        "<h2>Memory</h2>",
        table(("", "used", "of", "share"), memory, "Table of the memory of each tier"),
    ]
    if upgrades:
        sections += [
            "<h2>What further parts would bring</h2>",
            table(("part", "gain, by estimates"), upgrades, "Table of what further parts would bring"),
        ]
    sections += [
        "<h2>More</h2>",
        table(
            ("", "of this plan"),
            [*(("margins", text) for text in plan.margins), *remarks(plan)],
            "Table of further properties",
        ),
    ]
    return html_page(f"{plan.model.name}: plan", f"<section>{''.join(sections)}</section>", figures)


def _cards(plan: Prediction) -> str:
    simulated = "the estimate" if plan.dry_run is None else "a dry run of the engine"
    days, work = plan.drive_days, plan.best.workload
    return cards(
        [
            ("step", format_seconds(plan.step_s), f"by {simulated}"),
            ("bound", format_seconds(plan.bound_s), f"by {plan.limited_by}"),
            (
                "speed",
                speed(plan),
                "of one process" if plan.best.processes == 1 else f"of {plan.best.processes} processes",
            ),
            ("batch", f"{plan.batch} x {plan.model.sequence}", f"tokens; at most {plan.max_batch} sequences fit"),
            ("model data", format_size(plan.best.model_data_bytes), "per process, on all tiers"),
            ("other data", format_size(work.non_model_bytes), f"activations {activations_text(work)}"),
            *([] if days is None else [("drive", f"{days:,.1f} days", "of training until it is worn")]),
        ]
    )


def _resources_figure(plan: Prediction) -> Figure:
    """Return the busy seconds of each resource in a step, and the step's time."""
    busy = [load for load in loads(plan) if load[1]]
    names = [name for name, _, _ in busy]
    seconds = plan.step_s
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": "busy",
                "y": names,
                "x": [round(busy_s, 6) for _, busy_s, _ in busy],
                "text": [amount for _, _, amount in busy],
                "textposition": "none",
                "hovertemplate": "%{x:.3g} s<br>%{text}<extra>%{y}</extra>",
                "marker": {"color": "@parameters"},
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"a step, {format_seconds(seconds)}",
                "x": [seconds, seconds],
                "y": [names[0], names[-1]],
                "line": {"color": "@budget", "width": 2, "dash": "dash"},
                "hovertemplate": "a step takes %{x:.3g} s<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": axis("busy in a step, s", rangemode="tozero"),
            "yaxis": {"autorange": "reversed", "automargin": True},
            "hovermode": "closest",
        },
    }


def _frontier_figure(plan: Prediction, frontier: Frontier) -> Figure:
    """Return the tokens per second over the memory of a tier, and where the plan is."""
    part = plan.machine.gpu if frontier.tier.startswith("device") else plan.machine.host
    assert part is not None, "tiers of the frontier are those of the machine"
    best_per_s = plan.best.tokens_per_s
    sizes = [round(nbytes / GIB, 3) for nbytes, _ in frontier.points]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "estimate",
                "x": sizes,
                "y": [round(tokens_per_s / best_per_s, 4) for _, tokens_per_s in frontier.points],
                "line": {"color": "@curve0", "width": 2},
                "hovertemplate": "%{y:.2f} times as fast with %{x:.1f} GiB<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "this plan",
                "x": [round(part.memory / GIB, 3)],
                "y": [1],
                "marker": {"color": "@budget", "size": 12, "symbol": "diamond"},
                "hovertemplate": "this plan: %{x:.1f} GiB<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": axis(
                f"{frontier.tier}, GiB", type="log", tickvals=sizes[::2], ticktext=[f"{s:.3g}" for s in sizes[::2]]
            ),
            "yaxis": axis("speed, relative to this plan", rangemode="tozero"),
            "hovermode": "closest",
        },
    }
