"""Train with batches of 64 lengths in a budget that does not hold all parameters, and measure what libraries take.

python benchmarks/lengths.py [--steps 500] [--seed 1]
Each variant is a separate process: with and without `engine.plan` before the first step, and with `torch._dynamo`
imported before or by the engine. "Libraries" is resident memory beside tensors and chunks, which no budget counts.
"""

import importlib
import random
from itertools import product

import torch
from fresh_processes import apart
from report import options, publish
from steps import train_step
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._layout.byte_size import format_size

LENGTHS = range(8, 72)
VOCABULARY = 256
BUDGET = "4MiB"


def llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **shape)).train()


def run(planned: bool, imported: bool, steps: int, seed: int) -> dict[str, str]:
    """Train in this process; return the row of a variant."""
    if imported:
        importlib.import_module("torch._dynamo")
    draw, libraries = random.Random(seed), []
    config = ps.Config(device="cpu", precision="fp32", device_memory=BUDGET, host_memory="16MiB")
    engine, _ = ps.initialize(llama, config)
    if planned:
        ids = torch.zeros(2, max(LENGTHS), dtype=torch.int64)
        engine.plan(input_ids=ids, labels=ids)
    for _ in range(steps):
        train_step(engine, torch.randint(0, VOCABULARY, (2, draw.choice(LENGTHS))))
        libraries.append(engine.stats.last.library_resident_peak_bytes)
    total = engine.stats.total
    engine.close(keep=False)
    return {
        "`engine.plan` first": "yes" if planned else "no",
        "`torch._dynamo`": "before" if imported else "by the engine",
        "steps run": f"{total.steps} of {steps}",
        "evictions": str(total.evictions),
        "libraries, step 1": format_size(libraries[0]),
        "middle": format_size(libraries[steps // 2]),
        "last": format_size(libraries[-1]),
    }


def main() -> None:
    given = options(__doc__, steps=500, seed=1)
    publish(
        "lengths",
        "cpu",
        f"A Llama of 0.2 million parameters, 2 x {min(LENGTHS)} to {max(LENGTHS)} tokens, {len(LENGTHS)} lengths at "
        f"random, {BUDGET} of device memory, fp32.",
        [apart(run, *variant, given.steps, given.seed) for variant in product((False, True), repeat=2)],
    )


if __name__ == "__main__":
    main()
