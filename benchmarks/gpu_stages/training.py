"""Whole steps: the engine where everything fits, and under a budget, beside plain PyTorch, FSDP2 and DeepSpeed."""

import argparse
import importlib.util
import json
import os
import sys
from typing import Any

from gpu_stages.logged import run_logged
from gpu_stages.record import Record

GIB = 1 << 30

# Rates that predictions are made with, per second. They are a guess of what an H100 machine reaches, not its limit.
FLOPS, LINK_BYTES, HOST_BYTES = 500e12, 50e9, 100e9
PEAK_FLOPS = 989e12
LIMIT_S = {"8b": 290.0}
RESULT = "result: "
"""Begins the line of a trainer's output that holds its figures."""
LAUNCH_BOUND_S = 0.02
"""Time of the host to launch a step of a small model."""


def resident(record: Record, options: argparse.Namespace) -> None:
    """Everything fits: the engine against plain PyTorch."""
    models = [("tiny", 2, 16)] if options.small else [("gpt2-124m", 8, 1024), ("gpt-1b", 4, 1024)]
    for model, batch, sequence in models:
        run = {"model": model, "batch": batch, "sequence": sequence, "device": options.device}
        _same_losses(record, model, run | {"deterministic": True, "steps": 2})
        if options.small:
            _measured(record, model, run | {"trainer": "engine", "plan": True, "update": True}, options)
            continue
        plain = _measured(record, f"{model}, plain", run | {"trainer": "plain"}, options)
        ours = _measured(record, f"{model}, engine", run | {"trainer": "engine", "plan": True}, options)
        _measured(record, f"{model}, engine, update=True", run | {"trainer": "engine", "update": True}, options)
        if plain and ours:
            record.figure(
                f"{model}: engine's speed by plain PyTorch's", plain["step_s"] / ours["step_s"], "of 1", predicted=0.7,
                limit=1.0,
            )  # fmt: skip


def capped(record: Record, options: argparse.Namespace) -> None:
    """A budget far below the model data: the engine, with its peers and allocator settings."""
    checkpointing = {"checkpointing": True, "device": options.device}
    if options.small:
        tiny = {"model": "tiny", "batch": 2, "sequence": 16}
        _measured(record, "tiny, FSDP2", tiny | checkpointing | {"trainer": "fsdp2"}, options)
        return
    middle = {"model": "3b", "batch": 4, "sequence": 2048} | checkpointing
    within = {"trainer": "engine", "device_memory": 24 * GIB}
    _measured(record, "3b in 24 GiB, engine", middle | within | {"plan": True}, options, budget=24 * GIB)
    _measured(record, "3b, FSDP2 offloaded to the CPU", middle | {"trainer": "fsdp2", "steps": 3}, options)
    if importlib.util.find_spec("deepspeed") is not None:
        _measured(record, "3b, DeepSpeed ZeRO-3 offloaded", middle | {"trainer": "deepspeed", "steps": 3}, options)
    else:
        record.fact("DeepSpeed", "not installed")
    _measured(record, "3b, plain, all of the GPU", middle | {"trainer": "plain"}, options)
    _measured(record, "3b in 24 GiB, engine, update=True", middle | within | {"update": True}, options, budget=24 * GIB)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    _measured(
        record, "3b in 24 GiB, engine, no expandable segments", middle | within, options, settings, budget=24 * GIB
    )


def large(record: Record, options: argparse.Namespace) -> None:
    """Train a model that no trainer here holds on the GPU: 8 billion parameters within 24 GiB, the rest in RAM."""
    model, sequence, budget = ("tiny", 16, 64 << 20) if options.small else ("8b", 2048, 24 * GIB)
    run = {"model": model, "batch": 2, "sequence": sequence, "checkpointing": True, "device": options.device}
    name = f"{model} in {budget / GIB:g} GiB, engine"
    planned = {"trainer": "engine", "device_memory": budget, "plan": not options.small}
    _measured(record, name, run | planned, options, budget=budget)


def _same_losses(record: Record, model: str, run: dict[str, Any]) -> None:
    """Compare the losses of plain PyTorch and of the engine, to the bit, with deterministic kernels.

    The plain trainer's fused AdamW rounds otherwise, so only the first loss, before any update, has to agree.
    """
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = [_train(run | {"trainer": trainer}, settings) for trainer in ("plain", "engine")]
    problems = [one["error"] for one in found if "error" in one]
    if problems:
        record.check(f"{model}: the first loss is plain PyTorch's", False, problems[0])
        return
    expected, ours = (one["losses"][0] for one in found)
    record.check(f"{model}: the first loss is plain PyTorch's", expected == ours, f"{expected!r} and {ours!r}")


def _measured(
    record: Record,
    name: str,
    run: dict[str, Any],
    options: argparse.Namespace,
    settings: dict[str, str] | None = None,
    budget: int | None = None,
) -> dict[str, Any] | None:
    """Train in a process, and record what it found; None if it failed."""
    found = _train(run, settings or {})
    if "error" in found:
        record.check(f"{name} trains", False, found["error"])
        return None
    _record_step(record, name, run, found)
    for what, key, unit, scale in (
        ("peak allocated", "allocated", "GiB", GIB),
        ("peak reserved", "reserved", "GiB", GIB),
        ("peak of inactive split blocks", "inactive_split", "GiB", GIB),
        ("allocator's retries", "alloc_retries", "", 1),
        ("engine's retries in a step", "memory_retries", "", 1),
        ("waits for a stream in a step", "cudaStreamSynchronize", "", 1),
        ("waits for an event in a step", "cudaEventSynchronize", "", 1),
        ("time with a kernel running", "busy", "of 1", 1),
        ("time with a copy running", "copying", "of 1", 1),
        ("moved in a step", "moved", "GiB", GIB),
        ("first step", "first_s", "s", 1),
        ("building", "build_s", "s", 1),
    ):
        if key in found:
            limit = budget / GIB if budget is not None and key in ("allocated", "reserved") else None
            record.figure(f"{name}: {what}", found[key] / scale, unit, limit=limit)
    if budget is not None and "allocated" in found:
        record.check(f"{name}: allocated memory of planned steps stays within the budget", found["allocated"] <= budget)
    return found


def _record_step(record: Record, name: str, run: dict[str, Any], found: dict[str, Any]) -> None:
    tokens = run["batch"] * run["sequence"]
    numel = found.get("parameters")
    predicted = limit = None
    if numel is not None:
        predicted, limit = step_s(numel, tokens, run)
    record.figure(f"{name}: step", found["step_s"], "s", predicted=predicted, limit=limit)
    record.figure(f"{name}: tokens per second", tokens / found["step_s"], "1/s")
    if numel is not None:
        record.figure(f"{name}: model operations", 6 * numel * tokens / found["step_s"] / 1e12, "TFLOP/s", limit=989)
    if "said_s" in found:
        record.figure(
            f"{name}: step that engine.plan said", found["step_s"] / found["said_s"], "measured/said", predicted=1.0
        )


def step_s(numel: int, tokens: int, run: dict[str, Any]) -> tuple[float, float]:
    """Return what a step should take, and the least that computing and the link allow, overlapped, in seconds.

    With everything on the device it is computing, or launching. Under a budget the states are updated on the host:
    28 bytes of memory traffic per parameter, whose rate is not known beforehand, 2 bytes down and up to 4 up.
    """
    flops = (8 if run.get("checkpointing") else 6) * numel * tokens
    if run.get("device_memory") is None:
        return max(flops / FLOPS, LAUNCH_BOUND_S) + 28 * numel / 2.6e12, flops / PEAK_FLOPS
    link_s, host_s = 4 * numel / LINK_BYTES, 30 * numel / HOST_BYTES
    # Without update=True the update follows backward.
    together = max(flops / FLOPS, link_s)
    predicted = max(together, host_s) if run.get("update") else together + host_s
    return predicted, max(flops / PEAK_FLOPS, 4 * numel / 63e9)


def _train(run: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "gpu_stages.trainer", json.dumps(run)]
    done = run_logged(command, os.environ | settings, limit_s=LIMIT_S.get(run["model"], 120), cwd=os.getcwd())
    lines = done.text.splitlines()
    # Libraries may have the last word.
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if not results:
        told = [line for line in lines if "Error" in line] or lines
        return {"error": ": ".join([done.problem or "no result", *told[-1:]])[:400]}
    found: dict[str, Any] = json.loads(results[-1])
    return found
