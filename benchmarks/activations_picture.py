"""Draw docs/activations.svg: what becomes of the activations of each layer, and device memory over a step.

python benchmarks/activations_picture.py
Dry runs of Llama 3.2 3B on an H200 with a budget of 24 GiB, 4 x 2,048 tokens, tiled loss. Needs matplotlib.
"""

from io import StringIO
from pathlib import Path
from typing import Any

from step_picture import ACTIVATIONS, BACK, BUDGET, GRADIENTS, GRID, PARAMETERS, STATES, TEXT, light, with_color_schemes

import patrickstar as ps
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import simulate
from patrickstar._models.model_source import find_model
from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._perf_model.tiling import Tiling
from patrickstar._plan.planner import SearchOptions
from patrickstar._plan.traced_model import language_model

MODEL, BATCH, SEQUENCE, GIB = "llama-3.2-3b", 4, 2048, 1 << 30
PICTURE = Path(__file__).parents[1] / "docs" / "activations.svg"
WHOLE, OFFLOADED = 0.25, 0.4
"""Share of the layers recomputed in whole, and of the bytes offloaded: as `ps.plan` plans them."""
POINTS = 400
"""Points of a curve, at most twice as many."""
WAYS = {
    "all layers recomputed": ({"activation_checkpointing": True}, GRADIENTS),
    "products of all layers kept": ({"activation_checkpointing": "products"}, PARAMETERS),
    "a quarter recomputed, 40 % offloaded": (
        {"activation_checkpointing": WHOLE, "activation_offload": OFFLOADED},
        ACTIVATIONS,
    ),
}


def dry_runs() -> dict[str, DryRunReport]:
    """Return a dry run of each way."""
    options: dict[str, Any] = dict.fromkeys(SearchOptions.__dataclass_fields__)
    options |= {"gpu": "h200", "device_memory": "24GiB", "host_memory": "128GB", "batch": BATCH, "sequence": SEQUENCE}
    search = SearchOptions(**options | {"nodes": 1, "tp": 1, "ep": 1, "precision": "auto", "dry_run": True}).search()
    machine = search.budgets(search.machine, search.mesh)
    model = language_model(find_model(MODEL), SEQUENCE, tiling=Tiling(tiled_loss=True))
    return {
        name: simulate(
            ps.Engine, model.build, ps.Config(precision="bf16", tiled_loss=True, **way), model.step(BATCH), machine
        )
        for name, (way, _) in WAYS.items()
    }


def draw_layers(axis: Any) -> None:
    """Draw the bytes of each layer by what becomes of them."""
    decoder, tokens = OPEN_MODELS[MODEL].decoder(), BATCH * SEQUENCE
    layer_input = 2 * decoder.hidden * tokens / GIB
    products = decoder._product_bytes(None) * tokens / GIB - layer_input
    everything = decoder._saved_bytes(None) * tokens / GIB
    layers = range(decoder.layers)
    stored = [0.0 if number < round(WHOLE * decoder.layers) else products for number in layers]
    fates = {
        "kept on the device": ([(1 - OFFLOADED) * (layer_input + each) for each in stored], ACTIVATIONS),
        "offloaded": ([OFFLOADED * (layer_input + each) for each in stored], STATES),
        "computed again": ([everything - layer_input - each for each in stored], GRID),
    }
    bottom = [0.0] * decoder.layers
    for name, (heights, color) in fates.items():
        axis.bar(layers, heights, 0.8, bottom, color=light(color), label=name)
        bottom = [sum(pair) for pair in zip(bottom, heights, strict=True)]
    axis.set(xlabel="layer", ylabel="activations, GiB", xlim=(-0.6, decoder.layers - 0.4))
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, handlelength=0.9)


def draw_memory(axis: Any, reports: dict[str, DryRunReport]) -> None:
    """Draw the non-model data of each way over the step, with the speed."""
    for name, report in reports.items():
        start_s = report.timeline[0].at_s
        samples = report.timeline[:: len(report.timeline) // POINTS]
        times = [sample.at_s - start_s for sample in samples]
        values = [sample.device_non_model_bytes / GIB for sample in samples]
        label = f"{name}: {BATCH * SEQUENCE / report.seconds:,.0f} tokens/s"
        axis.plot(times, values, color=light(WAYS[name][1]), linewidth=1.6, label=label)
    axis.axhline(24, color=light(BUDGET), linestyle="--", linewidth=1.4)
    axis.text(0, 24.3, "device budget: the rest is for model data", color=light(BUDGET), va="bottom")
    axis.set(xlabel="time in the step, s", ylabel="other data, GiB", ylim=(0, 28))
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), frameon=False, handlelength=0.9)


def main() -> None:
    """Draw the picture."""
    from matplotlib import pyplot

    colors = {name: light(TEXT) for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    options = colors | {"svg.hashsalt": "activations", "font.size": 10, "figure.facecolor": light(BACK)}
    options |= {"axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False}
    reports = dry_runs()
    with pyplot.rc_context(options | {"axes.edgecolor": light(GRID)}):
        figure, (layers, memory) = pyplot.subplots(2, 1, figsize=(6.6, 6.0), layout="constrained")
        draw_layers(layers)
        draw_memory(memory, reports)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    PICTURE.write_text(with_color_schemes(text.getvalue()))


if __name__ == "__main__":
    main()
