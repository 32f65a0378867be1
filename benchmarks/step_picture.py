"""Draw docs/step.svg: memory and channels of one training step, from a recorded run. Needs matplotlib.

python benchmarks/step_picture.py [LOG]
LOG is what the command in `COMMAND` writes. Its last timeline is stored in results/step_picture.jsonl and drawn;
without LOG, the picture is drawn again from that file.
"""

import json
import re
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from report import RESULTS

from patrickstar._layout.byte_size import format_size
from patrickstar._report.memory_curves import ACTIVATIONS, CATEGORIES, GRADIENTS, PARAMETERS, STATES, memory_curves
from patrickstar._report.run_file import Run, read_run
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel, StepTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = (
    "patrickstar train --model gpt2-124m --vocab-size 4096 --sequence 256 --batch 8 --steps 4 "
    "--activation-checkpointing --lr 6e-4 --warmup-steps 10 --weight-decay 0.01 --max-norm 1.0 --device cpu "
    "--device-memory 240MiB --precision bf16 --seed 0 --log LOG"
)
LOG = RESULTS / "step_picture.jsonl"
PICTURE = Path(__file__).parents[1] / "docs" / "step.svg"
MIB = 1 << 20

BACK, TEXT, GRID, BUDGET, PHASE, UPDATE = "back", "text", "grid", "budget", "phase", "update"
COLORS = {
    BACK: ("#fdfdfc", "#14181b"),
    TEXT: ("#1d2327", "#e7ebee"),
    GRID: ("#dfe3e6", "#343d43"),
    BUDGET: ("#b3261e", "#ff8a80"),
    PHASE: ("#d5dce2", "#3c474e"),
    PARAMETERS: ("#3b7dd8", "#6ea8f5"),
    GRADIENTS: ("#e08a1e", "#f0a64a"),
    STATES: ("#7a6bc9", "#a598ee"),
    ACTIVATIONS: ("#3d9a78", "#65c6a2"),
    UPDATE: ("#5d7585", "#90a7b6"),
}
"""Colors on a light and on a dark page. The picture names them, so that a browser chooses by its color scheme."""

ROWS = (
    ("to device", Channel.TO_DEVICE, PARAMETERS),
    ("to host", Channel.TO_HOST, STATES),
    ("update", Channel.UPDATE, UPDATE),
)


def light(name: str) -> str:
    """Return the color on a light page."""
    return COLORS[name][0]


def trimmed(log: Path) -> str:
    """Return the description of a run and the record and timeline of its last recorded step, as a log."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    step = max(record["step"] for record in records if record["kind"] == "timeline")
    found = [record for record in records if record["kind"] == "run" or record.get("step") == step]
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in found)


def draw(run: Run) -> str:
    """Return the picture of the last recorded step as SVG, the same for the same run."""
    from matplotlib import pyplot

    options = {
        "svg.hashsalt": "step",
        "font.size": 11,
        "text.color": light(TEXT),
        "axes.labelcolor": light(TEXT),
        "axes.edgecolor": light(GRID),
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": light(TEXT),
        "ytick.color": light(TEXT),
        "figure.facecolor": light(BACK),
    }
    with pyplot.rc_context(options):
        figure, (memory, channels) = pyplot.subplots(
            2, 1, sharex=True, figsize=(6.6, 5.0), height_ratios=(3, 1.35), layout="constrained"
        )
        timeline = run.timelines[-1]
        draw_memory(memory, run, timeline)
        draw_channels(channels, timeline)
        figure.suptitle(title(run), x=0.02, ha="left", fontsize=13, fontweight="bold")
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return with_color_schemes(text.getvalue())


def title(run: Run) -> str:
    """Return the statement of the picture."""
    model_data_gib = run.description["model_data_bytes"] / (1 << 30)
    budget_mib = run.description["device_budget_bytes"] / MIB
    return f"A model with {model_data_gib:.2g} GiB of model data trains within {budget_mib:.0f} MiB"


def draw_memory(axis: "Axes", run: Run, timeline: StepTimeline) -> None:
    """Draw the bytes on the device, stacked by what they are, and the budget."""
    curves = memory_curves(timeline, Tier.DEVICE)
    stacked = [name for name in CATEGORIES[Tier.DEVICE] if any(curves.values[name])]
    tops_mib = accumulate(([nbytes / MIB for nbytes in curves.values[name]] for name in stacked), added)
    # The highest sum first: each area begins at zero, and those below cover it.
    for name, top_mib in reversed(list(zip(stacked, tops_mib, strict=True))):
        times, values = changes(curves.times, top_mib)
        axis.fill_between(times, values, step="post", color=light(name), linewidth=0, label=name.partition(" and ")[0])
    budget_mib = run.description["device_budget_bytes"] / MIB
    axis.axhline(budget_mib, color=light(BUDGET), linestyle="--", linewidth=1.6)
    axis.text(0, budget_mib * 1.02, f"device budget, {budget_mib:.0f} MiB", color=light(BUDGET), va="bottom")
    axis.set(ylabel="device memory, MiB", ylim=(0, 1.16 * budget_mib), yticks=range(0, int(budget_mib) + 1, 60))
    axis.set_xlim(0, timeline.end_s)
    axis.grid(axis="y", color=light(GRID), linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=4,
        reverse=True,
        frameon=False,
        handlelength=0.9,
        borderaxespad=0.2,
    )


def added(lower: list[float], upper: list[float]) -> list[float]:
    """Return the sums of two curves."""
    return [sum(pair) for pair in zip(lower, upper, strict=True)]


def changes(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Return the points of a curve at which its value changes, and the last."""
    places = [place for place, value in enumerate(values) if place == 0 or value != values[place - 1]]
    places = sorted({*places, len(values) - 1})
    return [times[place] for place in places], [values[place] for place in places]


def draw_channels(axis: "Axes", timeline: StepTimeline) -> None:
    """Draw the phases of the step, and when each channel was busy."""
    rows = ["computation", *(name for name, _, _ in ROWS)]
    for name, start_s, end_s in phases(timeline):
        axis.broken_barh([(start_s, end_s - start_s)], (-0.38, 0.76), color=light(PHASE), edgecolor=light(BACK))
        if end_s - start_s > timeline.seconds / 10:
            axis.text((start_s + end_s) / 2, 0, name, ha="center", va="center_baseline", fontsize=10)
    for place, (_, channel, color) in enumerate(ROWS, 1):
        spans = [(work.start_s, work.end_s - work.start_s) for work in timeline.work if work.channel is channel]
        axis.broken_barh(spans, (place - 0.34, 0.68), color=light(color), linewidth=1.2)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="time in the step, s", ylim=(len(rows) - 0.45, -0.55))
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def phases(timeline: StepTimeline) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of the parts of a step, in seconds."""
    ends = [at_s for at_s, _ in timeline.phases[1:]] + [timeline.end_s]
    for (start_s, name), end_s in zip(timeline.phases, ends, strict=True):
        if name:
            yield name, start_s, end_s


def with_color_schemes(svg: str) -> str:
    """Return the picture with a variable in place of each color: light by default, dark where the reader prefers it."""
    names = {pair[0]: f"--{name.split()[0]}" for name, pair in COLORS.items()}
    svg = re.sub("|".join(names), lambda found: f"var({names[found[0]]})", svg)
    values = [" ".join(f"{names[pair[0]]}: {pair[dark]};" for pair in COLORS.values()) for dark in (False, True)]
    style = f"<style>svg {{ {values[0]} }} @media (prefers-color-scheme: dark) {{ svg {{ {values[1]} }} }}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1\n {style}", svg, count=1)


def main() -> None:
    """Store the step of a log, if one is given, and draw it."""
    if len(sys.argv) > 1:
        LOG.write_text(trimmed(Path(sys.argv[1])))
    run = read_run(LOG)
    PICTURE.write_text(draw(run))
    peak = memory_curves(run.timelines[-1], Tier.DEVICE).peak
    print(f"{title(run)}. Peak of the step: {format_size(peak)}.")


if __name__ == "__main__":
    main()
