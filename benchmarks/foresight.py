"""What a rehearsal says beforehand against what a run then takes, on this machine, over random models and budgets.

python benchmarks/foresight.py [--draws 20] [--seed 0]
Each draw is a GPT of random size, batch and budget, rehearsed in a process, then trained in another. Seconds are the
median of steps 4 to 6; peaks are the largest of these.
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
from patrickstar._engine.dry_run import dry_run, dry_run_here
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import Host, Machine
from patrickstar._schedule.trace import Trace

STEPS, TIMED = 6, 3
PEAKS = ("device_peak_model_bytes", "device_peak_non_model_bytes", "host_peak_model_bytes")
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


def configured(budget: int) -> ps.Config:
    return ps.Config(device="cpu", device_memory=budget, host_memory="8GiB", optimizer=ps.AdamW(lr=1e-4))


def say(draw: dict) -> dict:
    """What a rehearsal says of one draw, and the budget that it chose for it."""
    step = step_of(draw)
    wide = dry_run(lambda: build(draw), configured(16 << 30), step, RAM)
    # A budget that makes parameters move, in part of the draws.
    param16 = sum(param.numel() * 2 for param in build(draw).parameters())
    budget = int(1.3 * wide.stats.device_peak_non_model_bytes + param16 * draw["share"] + (1 << 26))
    start = time.perf_counter()
    dry_run_report = dry_run_here(lambda: build(draw), configured(budget), step, torch.device("cpu"))
    return {
        "budget": budget,
        "rehearsal_s": time.perf_counter() - start,
        "bound_s": dry_run_report.bound_s,
        "seconds": dry_run_report.seconds,
        "moved": dry_run_report.stats.h2d_bytes + dry_run_report.stats.d2h_bytes,
        "trace": plain(dry_run_report.trace),
        **{name: getattr(dry_run_report.stats, name) for name in PEAKS},
    }


def take(draw: dict) -> dict:
    """What a run of it takes."""
    step = step_of(draw)
    engine, _ = ps.initialize(lambda: build(draw), configured(draw["budget"]))
    seconds, stats = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        step(engine)
        seconds.append(time.perf_counter() - start)
        stats.append(engine.stats.last)
    trace = plain(engine._core.tracer.trace)
    engine.close(keep=False)
    return {
        "seconds": median(seconds[-TIMED:]),
        "moved": stats[-1].h2d_bytes + stats[-1].d2h_bytes,
        "trace": trace,
        **{name: max(getattr(one, name) for one in stats[-TIMED:]) for name in PEAKS},
    }


def plain(trace: Trace) -> list[tuple[list[int], int]]:
    return [(list(moment.chunks), moment.non_model_bytes) for moment in trace.moments]


def compared(said: list, took: list) -> str:
    """Two traces of one step: their accesses, and how far non-model data is off at any moment."""
    if [chunks for chunks, _ in said] != [chunks for chunks, _ in took]:
        return "other accesses"
    off = [one - other for (_, one), (_, other) in zip(said, took, strict=True)]
    return f"{len(said)} moments, {min(off) / 2**20:+.1f} to {max(off) / 2**20:+.1f} MiB"


def in_a_process(what: str, draw: dict) -> dict:
    """As a user would: who trains has not rehearsed before, which would have made libraries ready."""
    command = [sys.executable, __file__, "--" + what, json.dumps(draw)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def device_bytes(found: dict) -> int:
    return found["device_peak_model_bytes"] + found["device_peak_non_model_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--take", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.say or options.take:
        print(json.dumps(say(options.say) if options.say else take(options.take)))
        return
    rows, errors, peaks = [], [], {"device": [], "host": []}
    for draw in draws(options.draws, options.seed):
        said = in_a_process("say", draw)
        took = in_a_process("take", draw | {"budget": said["budget"]})
        error = said["seconds"] / took["seconds"] - 1
        errors.append(abs(error))
        peaks["device"].append(device_bytes(said) / device_bytes(took) - 1)
        if took["host_peak_model_bytes"]:
            peaks["host"].append(said["host_peak_model_bytes"] / took["host_peak_model_bytes"] - 1)
        rows.append(
            [
                f"{draw['layers']} x {draw['hidden']}, {draw['vocab']:,}",
                f"{draw['batch']} x {draw['sequence']}{', checkpointing' if draw['checkpointing'] else ''}",
                format_size(said["budget"]),
                f"{said['bound_s']:.2f} s",
                f"{said['seconds']:.2f} s",
                f"{took['seconds']:.2f} s",
                f"{100 * error:+.0f} %",
                *(" / ".join(format_size(one[name]) for one in (said, took)) for name in ("moved", *PEAKS)),
                compared(said["trace"], took["trace"]),
                f"{said['rehearsal_s']:.1f} s",
            ]
        )
        print(rows[-1], flush=True)
    spans = {name: f"{100 * min(found):+.1f} to {100 * max(found):+.1f} %" for name, found in peaks.items()}
    publish(
        "foresight",
        torch.device("cpu"),
        f"What a rehearsal says / what the run took: {options.draws} random GPTs, bf16, host budget 8 GiB (seed "
        f"{options.seed}). Median of the errors of the seconds: {100 * median(errors):.1f} % (limit 15 %). Peaks, said "
        f"against taken: device (model and non-model data) {spans['device']}, host {spans['host']} (limit 5 %, never "
        f"below). The bound is the busiest resource alone.",
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
            "traces: the same accesses, non-model data off by",
            "rehearsal",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
