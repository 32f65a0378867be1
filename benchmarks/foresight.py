"""Compare the predictions of dry runs with real runs on this machine, over random models and budgets.

python benchmarks/foresight.py [--draws 20] [--seeds 0 1] [--precision bf16]
Each draw is a GPT of random size, batch and budget, dry-run in one process, then trained in another; a quarter have 20
layers of tiny operators. Times are medians, peaks are maxima over the steps from the fourth on: three, or those of two
seconds if these are shorter.
"""

import random
import time
from collections.abc import Callable, Iterable
from itertools import chain
from statistics import median

import torch
from fresh_processes import apart
from report import options, publish
from steps import gpt, seconds_of, train_step
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.simulation import simulate, simulate_on_this_machine
from patrickstar._layout.byte_size import format_size
from patrickstar._models.presets import Preset
from patrickstar._perf_model.machine_spec import Host, Machine
from patrickstar._schedule.trace import Moment

UNTIMED, TIMED, TIMED_S = 3, 3, 2.0
"""Steps before those that are timed; then as many at least, and as long."""
PEAKS = ("device_peak_model_bytes", "device_peak_non_model_bytes", "host_peak_model_bytes")
RAM = Machine(
    name="any",
    source="only its bytes are used",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.5),
)


def build(draw: dict) -> GPT2LMHeadModel:
    shape = Preset(draw["layers"], draw["hidden"], heads=draw["hidden"] // 64, vocab=draw["vocab"])
    return gpt(shape, draw["checkpointing"])


def draws(count: int, seed: int) -> list[dict]:
    chosen = random.Random(seed)
    usual = {"layers": range(2, 9), "hidden": [256, 384, 512, 768, 1024], "vocab": [4096, 16384, 50257]}
    deep = {"layers": [20], "hidden": [64, 128], "vocab": [512, 4096]}
    return [
        {name: chosen.choice(values) for name, values in (usual if chosen.random() < 0.75 else deep).items()}
        | {
            "batch": chosen.randint(1, 4),
            "sequence": chosen.choice([128, 256, 512]),
            "checkpointing": chosen.random() < 0.5,
            "share": chosen.uniform(0.4, 1.6),
        }
        for _ in range(count)
    ]


def step_of(draw: dict) -> Callable[[ps.Engine], object]:
    torch.manual_seed(0)
    data = torch.randint(0, draw["vocab"], (draw["batch"], draw["sequence"]))

    return lambda engine: train_step(engine, data.clone())  # a data loader delivers new tensors at each step


def configured(budget: int, precision: str) -> ps.Config:
    return ps.Config(
        device="cpu", device_memory=budget, host_memory="8GiB", precision=precision, optimizer=ps.AdamW(lr=1e-4)
    )


def needs(draw: dict, precision: str) -> tuple[int, int, int]:
    """Return the bytes of non-model data and of parameters of a step without limits, and the number of parameters."""
    ample = ps.Config(device="cpu", device_memory="16GiB", host_memory="16GiB", precision=precision)
    report = simulate(Engine, lambda: build(draw), ample, step_of(draw), RAM)
    numel = sum(param.numel() for param in build(draw).parameters())
    return report.stats.device_peak_non_model_bytes, ample.compute_dtype.itemsize * numel, numel


def predict(draw: dict) -> dict:
    """Dry-run one draw and return the predictions, with the budget chosen for it."""
    step = step_of(draw)
    non_model_bytes, param16_bytes, _ = needs(draw, draw["precision"])
    # In some of the draws, this budget forces transfers of parameters.
    budget = int(1.3 * non_model_bytes + param16_bytes * draw["share"] + (1 << 26))
    start = time.perf_counter()
    config = configured(budget, draw["precision"])
    report = simulate_on_this_machine(Engine, lambda: build(draw), config, step, torch.device("cpu"))
    return {
        "budget": budget,
        "dry_run_s": time.perf_counter() - start,
        "bound_s": report.bound_s,
        "seconds": report.seconds,
        "moved": report.stats.h2d_bytes + report.stats.d2h_bytes,
        "trace": plain(report.trace.moments),
        **{name: getattr(report.stats, name) for name in PEAKS},
    }


def train(draw: dict) -> dict:
    """Train one draw and return the measurements."""
    step = step_of(draw)
    engine, _ = ps.initialize(lambda: build(draw), configured(draw["budget"], draw["precision"]))
    seconds, stats = [], []
    while len(seconds) < UNTIMED + TIMED or sum(seconds[UNTIMED:]) < TIMED_S:
        seconds.append(seconds_of(lambda: step(engine)))
        stats.append(engine.stats.last)
    trace = plain(engine.inspect().trace)
    engine.close(keep=False)
    return {
        "seconds": median(seconds[UNTIMED:]),
        "moved": stats[-1].h2d_bytes + stats[-1].d2h_bytes,
        "trace": trace,
        **{name: max(getattr(step_stats, name) for step_stats in stats[UNTIMED:]) for name in PEAKS},
    }


def plain(moments: Iterable[Moment | ps.MomentInfo]) -> list[tuple[list[int], int]]:
    return [(list(moment.chunks), moment.non_model_bytes) for moment in moments]


def compared(predicted: list, actual: list) -> str:
    """Compare the accesses of two traces of one step, and their non-model data at each moment."""
    if [chunks for chunks, _ in predicted] != [chunks for chunks, _ in actual]:
        return "other accesses"
    errors = [nbytes - actual_bytes for (_, nbytes), (_, actual_bytes) in zip(predicted, actual, strict=True)]
    return f"{len(predicted)} moments, {min(errors):+,} to {max(errors):+,} bytes"


def device_bytes(result: dict) -> int:
    return result["device_peak_model_bytes"] + result["device_peak_non_model_bytes"]


COLUMNS = {
    "moved": "transferred per step",
    "device_peak_model_bytes": "device, model data",
    "device_peak_non_model_bytes": "device, non-model data",
    "host_peak_model_bytes": "host",
}


def main() -> None:
    given = options(__doc__, draws=20, seeds=[0], precision="bf16")
    rows, errors, peaks = [], [], {"device": [], "host": []}
    for draw in chain.from_iterable(draws(given.draws, seed) for seed in given.seeds):
        draw = draw | {"precision": given.precision}
        # In processes of their own: a dry run before training would already have initialized libraries.
        predicted = apart(predict, draw)
        actual = apart(train, draw | {"budget": predicted["budget"]})
        error = predicted["seconds"] / actual["seconds"] - 1
        errors.append(abs(error))
        peaks["device"].append(device_bytes(predicted) / device_bytes(actual) - 1)
        if actual["host_peak_model_bytes"]:
            peaks["host"].append(predicted["host_peak_model_bytes"] / actual["host_peak_model_bytes"] - 1)
        sizes = {COLUMNS[key]: " / ".join(format_size(side[key]) for side in (predicted, actual)) for key in COLUMNS}
        rows.append(
            {
                "layers x hidden, vocabulary": f"{draw['layers']} x {draw['hidden']}, {draw['vocab']:,}",
                "batch": f"{draw['batch']} x {draw['sequence']}{', checkpointing' if draw['checkpointing'] else ''}",
                "device budget": format_size(predicted["budget"]),
                "bound": f"{predicted['bound_s']:.2f} s",
                "predicted": f"{predicted['seconds']:.2f} s",
                "measured": f"{actual['seconds']:.2f} s",
                "error": f"{100 * error:+.0f} %",
                **sizes,
                "traces with equal accesses: error of non-model data": compared(predicted["trace"], actual["trace"]),
                "dry run duration": f"{predicted['dry_run_s']:.1f} s",
            }
        )
        print(list(rows[-1].values()), flush=True)
    spans = {
        name: f"{100 * min(values):+.4f} to {100 * max(values):+.4f} %" if values else "not measured"
        for name, values in peaks.items()
    }
    publish(
        "foresight",
        f"Prediction of a dry run / measurement of a run: {len(rows)} random GPTs, {given.precision}, host budget 8 "
        f"GiB (seeds {', '.join(map(str, given.seeds))}). Absolute error of the step time: {100 * median(errors):.1f} "
        f"% in the median (limit 6 %), {100 * max(errors):.1f} % at most (limit 20 %). Errors of the peaks: device "
        f"(model and non-model data) {spans['device']} (limit 0), host {spans['host']} (limit 1 %, never below 0). The "
        f"bound is the time of the busiest resource.",
        rows,
    )


if __name__ == "__main__":
    main()
