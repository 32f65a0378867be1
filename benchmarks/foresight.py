"""What a rehearsal says beforehand against what a run then takes, on this machine, over random models and budgets.

python benchmarks/foresight.py [--draws 20] [--seed 0]
Each draw is a GPT of random size, batch and budget, in a process of its own: first rehearsed, then trained. Seconds are
the median of steps 4 to 6; peaks are the largest of these.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from report import publish
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps
from patrickstar.engine.rehearsal import rehearse, rehearse_here
from patrickstar.layout.sizes import format_size
from patrickstar.schedule.machine import Host, Machine

STEPS, TIMED = 6, 3
RAM = Machine(
    name="any",
    source="only bytes count here",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.5),
)


def build(draw: dict) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=draw["layers"],
        n_embd=draw["hidden"],
        n_head=draw["hidden"] // 64,
        vocab_size=draw["vocab"],
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.use_cache = False
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    if draw["checkpointing"]:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def draws(count: int, seed: int) -> list[dict]:
    chosen = random.Random(seed)
    return [
        {
            "layers": chosen.randint(2, 8),
            "hidden": chosen.choice([256, 384, 512, 768, 1024]),
            "vocab": chosen.choice([4096, 16384, 50257]),
            "batch": chosen.randint(1, 4),
            "sequence": chosen.choice([128, 256, 512]),
            "checkpointing": chosen.random() < 0.5,
            "share": chosen.uniform(0.4, 1.6),
        }
        for _ in range(count)
    ]


def step_of(draw: dict) -> Callable[[ps.Engine], None]:
    torch.manual_seed(0)
    ids = torch.randint(0, draw["vocab"], (draw["batch"], draw["sequence"]))

    def step(engine: ps.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


def run(draw: dict) -> dict:
    """One draw: what was said, and what it took."""
    step = step_of(draw)

    def configured(device_memory: int) -> ps.Config:
        return ps.Config(device="cpu", device_memory=device_memory, host_memory="8GiB", optimizer=ps.AdamW(lr=1e-4))

    wide = rehearse(lambda: build(draw), configured(16 << 30), step, RAM)
    # A budget that makes parameters move, in part of the draws.
    param16 = sum(param.numel() * 2 for param in build(draw).parameters())
    budget = int(1.3 * wide.stats.device_peak_non_model_bytes + param16 * draw["share"] + (1 << 26))
    start = time.perf_counter()
    config = configured(budget)
    forecast = rehearse_here(lambda: build(draw), config, step, torch.device("cpu"))
    rehearsal_s = time.perf_counter() - start
    engine, _ = ps.initialize(lambda: build(draw), config)
    seconds, stats = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        step(engine)
        seconds.append(time.perf_counter() - start)
        stats.append(engine.stats.last)
    traced = engine._clock.trace.peak_non_model_bytes
    engine.close(keep=False)
    said = forecast.stats

    def peak(name: str) -> int:
        return max(getattr(one, name) for one in stats[-TIMED:])

    return {
        "budget": budget,
        "rehearsal_s": rehearsal_s,
        "bound_s": forecast.bound_s,
        "said_s": forecast.seconds,
        "took_s": median(seconds[-TIMED:]),
        "moved": [said.h2d_bytes + said.d2h_bytes, stats[-1].h2d_bytes + stats[-1].d2h_bytes],
        "device": [said.device_peak_model_bytes, peak("device_peak_model_bytes")],
        "non_model": [said.device_peak_non_model_bytes, traced],
        "host": [said.host_peak_model_bytes, peak("host_peak_model_bytes")],
    }


def in_a_process(draw: dict) -> dict:
    command = [sys.executable, __file__, "--draw", json.dumps(draw)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw:
        print(json.dumps(run(json.loads(options.draw))))
        return
    rows, errors = [], []
    for draw in draws(options.draws, options.seed):
        found = in_a_process(draw)
        error = found["said_s"] / found["took_s"] - 1
        errors.append(abs(error))
        rows.append(
            [
                f"{draw['layers']} x {draw['hidden']}, {draw['vocab']:,}",
                f"{draw['batch']} x {draw['sequence']}{', checkpointing' if draw['checkpointing'] else ''}",
                format_size(found["budget"]),
                f"{found['bound_s']:.2f} s",
                f"{found['said_s']:.2f} s",
                f"{found['took_s']:.2f} s",
                f"{100 * error:+.0f} %",
                *(" / ".join(format_size(n) for n in found[name]) for name in ("moved", "device", "non_model", "host")),
                f"{found['rehearsal_s']:.1f} s",
            ]
        )
        print(rows[-1], flush=True)
    publish(
        "foresight",
        torch.device("cpu"),
        f"What a rehearsal says / what the run took: {options.draws} random GPTs, bf16, host budget 8 GiB (seed "
        f"{options.seed}). Median of the errors of the seconds: {100 * median(errors):.1f} % (limit 15 %). The bound "
        f"is the busiest resource alone. Non-model data of the run: the trace's peak, heap that was freed not counted.",
        [
            "layers x hidden, vocabulary",
            "batch",
            "device budget",
            "bound",
            "said",
            "took",
            "error",
            "moved in a step",
            "device, model data",
            "device, non-model data",
            "host",
            "rehearsal",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
