"""Train one model with one trainer in this process and print the results as one line of JSON.

python -m gpu_stages.trainer '{"trainer": "engine", "model": "tiny", "device": "cpu", ...}', in benchmarks/
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import patrickstar as ps
from gpu_stages.peers import PEERS, Step
from gpu_stages.shapes import build_on_meta, pattern
from gpu_stages.step_profile import profile_step
from gpu_stages.timing import synchronize
from gpu_stages.training import RESULT

WARM_UP_STEPS = 3
"""Traced iteration, iteration that verifies the trace, first planned iteration."""


@dataclass(frozen=True)
class Run:
    """Configuration of one training run.

    Args:
        trainer: "engine", "plain", "fsdp2" or "deepspeed".
        model: A name of `shapes.LLAMAS`, or a preset of the command line.
        device: "cuda" or "cpu".
        batch: Samples per step.
        sequence: Tokens per sample.
        steps: Number of timed steps.
        checkpointing: Use activation checkpointing.
        device_memory: Device budget of the engine in bytes; by default the memory of the device.
        update: Update in backward (engine only).
        deterministic: Use PyTorch's deterministic kernels.
        plan: Predict the step with `engine.plan` first.
    """

    trainer: str
    model: str
    device: str
    batch: int
    sequence: int
    steps: int = 5
    checkpointing: bool = False
    device_memory: int | None = None
    update: bool = False
    deterministic: bool = False
    plan: bool = False


def engine(run: Run, result: dict[str, Any]) -> tuple[Step, Callable[[], None]]:
    """Return a step function of this library's engine and its close function."""
    config = ps.Config(device=run.device, device_memory=run.device_memory)
    model = build_on_meta(run.model, run.checkpointing)
    trainer, optimizer = ps.initialize(model, config, weights=lambda name: pattern(model, name))
    result["parameters"] = trainer.layout.numel
    result["device_memory"] = trainer.device_budget_bytes

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = trainer(input_ids=ids, labels=ids).loss
        trainer.backward(loss, update=run.update)
        optimizer.step()
        optimizer.zero_grad()
        last = trainer.stats.last
        result["moved"] = last.h2d_bytes + last.d2h_bytes
        result["stall_s"] = last.stall_s
        result["memory_retries"] = last.memory_retries
        result["non_model"] = last.device_peak_non_model_bytes
        return loss.detach()

    if run.plan:
        ids = tokens(run, trainer.device)
        report = trainer.plan(input_ids=ids, labels=ids)
        result["predicted_s"] = report.seconds
        result["predicted_compute_s"] = report.compute_s
    return step, trainer.close


def tokens(run: Run, device: torch.device) -> torch.Tensor:
    """Return random token ids, the same for every trainer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (run.batch, run.sequence), generator=generator).to(device)


def main(run: Run) -> dict[str, Any]:
    """Train and return the results."""
    device = torch.device(run.device)
    if run.deterministic:
        torch.use_deterministic_algorithms(True)
    result: dict[str, Any] = {}
    start = time.perf_counter()
    make = engine if run.trainer == "engine" else PEERS[run.trainer]
    step, close = make(run, result)
    result["build_s"] = time.perf_counter() - start
    ids = tokens(run, device)
    losses, times = [], []
    for number in range(WARM_UP_STEPS + run.steps):
        if number == WARM_UP_STEPS and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        start = time.perf_counter()
        losses.append(step(ids).float().item())
        synchronize(device)
        times.append(time.perf_counter() - start)
        print(f"step {number}: {times[-1]:.3f} s, loss {losses[-1]:.6f}", flush=True)
    result |= {"losses": losses, "first_s": times[0], "step_s": median(times[WARM_UP_STEPS:])}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        result |= {
            "allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.peak"],
            "inactive_split": stats["inactive_split_bytes.all.peak"],
            "alloc_retries": stats["num_alloc_retries"],
        }
    result |= profile_step(lambda: step(ids), device)
    close()
    return result


if __name__ == "__main__":
    result = main(Run(**json.loads(sys.argv[1])))
    print(f"{RESULT}{json.dumps(result)}", flush=True)
