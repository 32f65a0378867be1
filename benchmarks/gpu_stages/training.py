"""Whole training steps of the engine, without and with a budget, against plain PyTorch, FSDP2 and DeepSpeed."""

import argparse
import importlib.util
import json
import os
import sys
from typing import Any

from gpu_stages.logged import run_logged
from gpu_stages.record import Record

GIB = 1 << 30

# Rates per second for predictions: estimates of what an H100 machine reaches, not its limits.
FLOPS, LINK_BYTES, HOST_BYTES = 500e12, 50e9, 100e9
PEAK_FLOPS = 989e12
LIMIT_S = {"8b": 290.0}
RESULT = "result: "
"""Prefix of the output line with the results of a trainer."""
LAUNCH_BOUND_S = 0.02
"""Host time to launch a step of a small model."""


def resident(record: Record, options: argparse.Namespace) -> None:
    """Compare the engine with plain PyTorch if everything fits."""
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
                f"{model}: speed, engine / plain PyTorch", plain["step_s"] / ours["step_s"], "of 1", predicted=0.7,
                limit=1.0,
            )  # fmt: skip


def capped(record: Record, options: argparse.Namespace) -> None:
    """Train with a budget far below the model data, with other trainers and allocator settings for comparison."""
    checkpointing = {"checkpointing": True, "device": options.device}
    if options.small:
        tiny = {"model": "tiny", "batch": 2, "sequence": 16}
        _measured(record, "tiny, FSDP2", tiny | checkpointing | {"trainer": "fsdp2"}, options)
        return
    middle = {"model": "3b", "batch": 4, "sequence": 2048} | checkpointing
    within = {"trainer": "engine", "device_memory": 24 * GIB}
    _measured(record, "3b in 24 GiB, engine", middle | within | {"plan": True}, options, budget=24 * GIB)
    _measured(record, "3b, FSDP2 with CPU offload", middle | {"trainer": "fsdp2", "steps": 3}, options)
    if importlib.util.find_spec("deepspeed") is not None:
        _measured(
            record, "3b, DeepSpeed ZeRO-3 with CPU offload", middle | {"trainer": "deepspeed", "steps": 3}, options
        )
    else:
        record.fact("DeepSpeed", "not installed")
    _measured(record, "3b, plain, whole GPU", middle | {"trainer": "plain"}, options)
    _measured(record, "3b in 24 GiB, engine, update=True", middle | within | {"update": True}, options, budget=24 * GIB)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    _measured(
        record, "3b in 24 GiB, engine, no expandable segments", middle | within, options, settings, budget=24 * GIB
    )


def large(record: Record, options: argparse.Namespace) -> None:
    """Train a model that exceeds the GPU: 8 billion parameters within 24 GiB, the rest in RAM."""
    model, sequence, budget = ("tiny", 16, 64 << 20) if options.small else ("8b", 2048, 24 * GIB)
    run = {"model": model, "batch": 2, "sequence": sequence, "checkpointing": True, "device": options.device}
    name = f"{model} in {budget / GIB:g} GiB, engine"
    planned = {"trainer": "engine", "device_memory": budget, "plan": not options.small}
    _measured(record, name, run | planned, options, budget=budget)


def _same_losses(record: Record, model: str, run: dict[str, Any]) -> None:
    """Compare the losses of plain PyTorch and the engine bit by bit, with deterministic kernels.

    The fused AdamW of the plain trainer rounds differently, so only the first loss, before any update, must be equal.
    """
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    results = [_train(run | {"trainer": trainer}, settings) for trainer in ("plain", "engine")]
    problems = [result["error"] for result in results if "error" in result]
    if problems:
        record.check(f"{model}: first loss equals plain PyTorch", False, problems[0])
        return
    expected, ours = (result["losses"][0] for result in results)
    record.check(f"{model}: first loss equals plain PyTorch", expected == ours, f"{expected!r} and {ours!r}")


def _measured(
    record: Record,
    name: str,
    run: dict[str, Any],
    options: argparse.Namespace,
    settings: dict[str, str] | None = None,
    budget: int | None = None,
) -> dict[str, Any] | None:
    """Train in a separate process and record the results; return None if it failed."""
    result = _train(run, settings or {})
    if "error" in result:
        record.check(f"{name} trains", False, result["error"])
        return None
    _record_step(record, name, run, result)
    for label, key, unit, scale in (
        ("peak allocated", "allocated", "GiB", GIB),
        ("peak reserved", "reserved", "GiB", GIB),
        ("peak of inactive split blocks", "inactive_split", "GiB", GIB),
        ("allocator retries", "alloc_retries", "", 1),
        ("engine retries per step", "memory_retries", "", 1),
        ("stream synchronizations per step", "cudaStreamSynchronize", "", 1),
        ("event synchronizations per step", "cudaEventSynchronize", "", 1),
        ("time with a kernel running", "busy", "of 1", 1),
        ("time with a copy running", "copying", "of 1", 1),
        ("transferred per step", "moved", "GiB", GIB),
        ("first step", "first_s", "s", 1),
        ("model build", "build_s", "s", 1),
    ):
        if key in result:
            limit = budget / GIB if budget is not None and key in ("allocated", "reserved") else None
            record.figure(f"{name}: {label}", result[key] / scale, unit, limit=limit)
    if budget is not None and "allocated" in result:
        record.check(f"{name}: allocated memory of planned steps is within the budget", result["allocated"] <= budget)
    return result


def _record_step(record: Record, name: str, run: dict[str, Any], result: dict[str, Any]) -> None:
    tokens = run["batch"] * run["sequence"]
    numel = result.get("parameters")
    predicted = limit = None
    if numel is not None:
        predicted, limit = step_s(numel, tokens, run)
    record.figure(f"{name}: step", result["step_s"], "s", predicted=predicted, limit=limit)
    record.figure(f"{name}: tokens per second", tokens / result["step_s"], "1/s")
    if numel is not None:
        record.figure(f"{name}: model operations", 6 * numel * tokens / result["step_s"] / 1e12, "TFLOP/s", limit=989)
    if "predicted_s" in result:
        record.figure(
            f"{name}: step, measured / predicted by engine.plan",
            result["step_s"] / result["predicted_s"],
            "of 1",
            predicted=1.0,
        )


def step_s(numel: int, tokens: int, run: dict[str, Any]) -> tuple[float, float]:
    """Return the predicted step time, and the lower bound by overlapped compute and link time, in seconds.

    With everything on the device, computation or launches dominate. With a budget, states are updated on the host: 28
    bytes of memory traffic per parameter, at an estimated rate, 2 bytes D2H and up to 4 H2D.
    """
    flops = (8 if run.get("checkpointing") else 6) * numel * tokens
    if run.get("device_memory") is None:
        return max(flops / FLOPS, LAUNCH_BOUND_S) + 28 * numel / 2.6e12, flops / PEAK_FLOPS
    link_s, host_s = 4 * numel / LINK_BYTES, 30 * numel / HOST_BYTES
    # Without update=True the update runs after backward.
    backward_s = max(flops / FLOPS, link_s)
    predicted = max(backward_s, host_s) if run.get("update") else backward_s + host_s
    return predicted, max(flops / PEAK_FLOPS, 4 * numel / 63e9)


def _train(run: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "gpu_stages.trainer", json.dumps(run)]
    done = run_logged(command, os.environ | settings, limit_s=LIMIT_S.get(run["model"], 120), cwd=os.getcwd())
    lines = done.text.splitlines()
    # Libraries may print after the result.
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if not results:
        messages = [line for line in lines if "Error" in line] or lines
        return {"error": ": ".join([done.problem or "no result", *messages[-1:]])[:400]}
    result: dict[str, Any] = json.loads(results[-1])
    return result
