"""Train one model by one trainer in a process of its own; one line that it prints holds its figures, as a JSON object.

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
"""The first is watched, the second checks the trace, the third is the first that is planned."""


@dataclass(frozen=True)
class Run:
    """A training run: the model, the trainer, the budget and the number of steps.

    Args:
        trainer: "engine", "plain", "fsdp2" or "deepspeed".
        model: a name of `shapes.LLAMAS`, or a preset of the command line.
        device: "cuda" or "cpu".
        batch: samples per step.
        sequence: tokens per sample.
        steps: how many are timed.
        checkpointing: whether layers are recomputed in backward.
        device_memory: the engine's budget in bytes; by default what the device has.
        update: whether the engine updates beside backward.
        deterministic: use PyTorch's deterministic kernels.
        plan: have `engine.plan` say beforehand what a step takes.
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


def engine(run: Run, found: dict[str, Any]) -> tuple[Step, Callable[[], None]]:
    """Return one step of this library's engine, and what ends it."""
    config = ps.Config(device=run.device, device_memory=run.device_memory)
    model = build_on_meta(run.model, run.checkpointing)
    trainer, optimizer = ps.initialize(model, config, weights=lambda name: pattern(model, name))
    found["parameters"] = trainer.layout.numel
    found["device_memory"] = trainer.device_budget_bytes

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = trainer(input_ids=ids, labels=ids).loss
        trainer.backward(loss, update=run.update)
        optimizer.step()
        optimizer.zero_grad()
        last = trainer.stats.last
        found["moved"] = last.h2d_bytes + last.d2h_bytes
        found["stall_s"] = last.stall_s
        found["memory_retries"] = last.memory_retries
        found["non_model"] = last.device_peak_non_model_bytes
        return loss.detach()

    if run.plan:
        ids = tokens(run, trainer.device)
        said = trainer.plan(input_ids=ids, labels=ids)
        found["said_s"] = said.seconds
        found["said_compute_s"] = said.compute_s
    return step, trainer.close


def tokens(run: Run, device: torch.device) -> torch.Tensor:
    """Return random token ids, the same for every trainer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (run.batch, run.sequence), generator=generator).to(device)


def main(run: Run) -> dict[str, Any]:
    """Train, and return what was found."""
    device = torch.device(run.device)
    if run.deterministic:
        torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    start = time.perf_counter()
    make = engine if run.trainer == "engine" else PEERS[run.trainer]
    step, close = make(run, found)
    found["build_s"] = time.perf_counter() - start
    ids = tokens(run, device)
    losses, taken = [], []
    for number in range(WARM_UP_STEPS + run.steps):
        if number == WARM_UP_STEPS and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        start = time.perf_counter()
        losses.append(step(ids).float().item())
        synchronize(device)
        taken.append(time.perf_counter() - start)
        print(f"step {number}: {taken[-1]:.3f} s, loss {losses[-1]:.6f}", flush=True)
    found |= {"losses": losses, "first_s": taken[0], "step_s": median(taken[WARM_UP_STEPS:])}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        found |= {
            "allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.peak"],
            "inactive_split": stats["inactive_split_bytes.all.peak"],
            "alloc_retries": stats["num_alloc_retries"],
        }
    found |= profile_step(lambda: step(ids), device)
    close()
    return found


if __name__ == "__main__":
    found = main(Run(**json.loads(sys.argv[1])))
    print(f"{RESULT}{json.dumps(found)}", flush=True)
