"""Steps whose activations are kept, recomputed or offloaded on a CPU, with a quarter of the memory that keeping takes.

python benchmarks/activations.py [--model gpt2-124m] [--batch 4] [--sequence 512] [--rounds 3]
The device budget of an engine that does not keep all activations has a quarter of the bytes that these take, beside the
parameters and what a step needs without them; one for which that is too little has as much as it needs. Model data fits
in every budget, so that only activations differ. Steps of all sides alternate.
"""

from statistics import median
from typing import Any

import torch
from report import options, publish
from steps import alternating, gpt, ratio_of, tokens, train_step

import patrickstar as ps
from patrickstar._autograd.recomputed_layers import chosen_activations

WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "results of products kept": {"activation_checkpointing": "products"},
    "half of the layers recomputed in whole": {"activation_checkpointing": 0.5},
    "recomputed": {"activation_checkpointing": True},
    "half offloaded": {"activation_offload": 0.5},
    "offloaded": {"activation_offload": True},
}
CHOSEN = "chosen by dry runs"
"""Way that is chosen in a budget of a quarter."""


def engine_of(given: Any, device_bytes: int, **way: Any) -> ps.Engine:
    torch.manual_seed(0)
    config = ps.Config(
        device="cpu", precision="fp32", device_memory=device_bytes, host_memory="4GiB", tiled_loss=True, **way
    )
    engine, _ = ps.initialize(lambda: gpt(given.model), config)
    return engine


def peak_bytes(engine: ps.Engine, ids: torch.Tensor) -> int:
    for _ in range(3):
        train_step(engine, ids)
    return engine.stats.last.device_peak_non_model_bytes


def main() -> None:
    given = options(__doc__, model="gpt2-124m", batch=4, sequence=512, rounds=3)
    ids = tokens(given.model, given.batch, given.sequence, seed=0)
    ample = 8 << 30
    peaks = {}
    for name, way in WAYS.items():
        with engine_of(given, ample, **way) as engine:
            peaks[name] = peak_bytes(engine, ids)
            model_bytes = engine.stats.last.device_peak_model_bytes
    activation_bytes = peaks["kept"] - peaks["recomputed"]
    quarter = peaks["recomputed"] + activation_bytes // 4
    peaks[CHOSEN] = 0
    budgets = {name: model_bytes + max(peak, quarter) for name, peak in peaks.items()}
    ways = {**WAYS, CHOSEN: {"activation_checkpointing": "auto"}}
    engines = {name: engine_of(given, budgets[name], **way) for name, way in ways.items()}
    seconds = alternating({name: lambda e=e: train_step(e, ids) for name, e in engines.items()}, given.rounds, 3)
    peaks[CHOSEN] = engines[CHOSEN].stats.last.device_peak_non_model_bytes
    texts = {name: name for name in WAYS} | {CHOSEN: f"{CHOSEN}: {chosen_activations(engines[CHOSEN].config)}"}
    publish(
        "activations",
        f"{given.model}, {given.batch} x {given.sequence} tokens, fp32, tiled loss: activations take "
        f"{activation_bytes / 1e9:.2f} GB more if they are kept than if all layers are recomputed. Budgets have a "
        f"quarter of that, or what the way needs; steps alternate, medians of {given.rounds}. Limit: 1.10 "
        f"times the step that keeps all.",
        [
            [
                texts[name],
                f"{peaks[name] / 1e9:.2f} GB",
                f"{budgets[name] / 1e9:.2f} GB",
                f"{median(seconds[name]):.2f} s",
                f"{ratio_of(seconds[name], seconds['kept']):.3f}",
            ]
            for name in ways
        ],
        ["activations", "peak of non-model data", "device budget", "step", "of kept"],
    )


if __name__ == "__main__":
    main()
