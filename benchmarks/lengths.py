"""Train with batches of 64 lengths in a budget that does not hold all parameters, and measure what libraries take.

python benchmarks/lengths.py [--steps 500]
Each variant is a separate process: with and without `engine.plan` before the first step, and with `torch._dynamo`
imported before or by the engine. "Libraries" is resident memory beside tensors and chunks, which no budget counts.
"""

import argparse
import importlib
import json
import random
import subprocess
import sys

import torch
from report import publish
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._layout.byte_size import format_size

LENGTHS = range(8, 72)
VOCABULARY = 256
BUDGET = "4MiB"


def llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **shape)).train()


def run(options: argparse.Namespace) -> dict[str, object]:
    if options.imported:
        importlib.import_module("torch._dynamo")
    draw = random.Random(options.seed)
    config = ps.Config(device="cpu", precision="fp32", device_memory=BUDGET, host_memory="16MiB")
    engine, optimizer = ps.initialize(llama, config)
    if options.planned:
        ids = torch.zeros(2, max(LENGTHS), dtype=torch.int64)
        engine.plan(input_ids=ids, labels=ids)
    libraries = []
    for _ in range(options.steps):
        ids = torch.randint(0, VOCABULARY, (2, draw.choice(LENGTHS)))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        libraries.append(engine.stats.last.library_resident_peak_bytes)
    total = engine.stats.total
    engine.close(keep=False)
    return {"libraries": libraries, "evictions": total.evictions, "steps": total.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    for option in ("--planned", "--imported", "--one"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options)))
        return
    rows = []
    for planned in (False, True):
        for imported in (False, True):
            flags = ["--planned"] * planned + ["--imported"] * imported
            arguments = ["--one", "--steps", str(options.steps), "--seed", str(options.seed), *flags]
            done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            libraries = result["libraries"]
            rows.append(
                [
                    "yes" if planned else "no",
                    "before" if imported else "by the engine",
                    f"{result['steps']} of {options.steps}",
                    str(result["evictions"]),
                    *(format_size(libraries[step]) for step in (0, len(libraries) // 2, -1)),
                ]
            )
    publish(
        "lengths",
        "cpu",
        f"A Llama of 0.2 million parameters, 2 x {min(LENGTHS)} to {max(LENGTHS)} tokens, {len(LENGTHS)} lengths at "
        f"random, {BUDGET} of device memory, fp32.",
        ["`engine.plan` first", "`torch._dynamo`", "steps run", "evictions", "libraries, step 1", "middle", "last"],
        rows,
    )


if __name__ == "__main__":
    main()
