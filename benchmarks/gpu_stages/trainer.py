"""Train one model with one trainer, and record seconds, losses and memory."""

import resource
import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import torch

import patrickstar as ps
from gpu_stages.peers import PEERS, Step, StepAndClose, sum_of
from gpu_stages.record import Record
from gpu_stages.shapes import build_on_meta, pattern
from gpu_stages.timing import once
from patrickstar._engine.engine import Engine

WARM_UP_STEPS = {"engine": 4}
"""Traced iteration, iteration that verifies the trace, first planned iteration, first speculation. Others take two."""
RECORDED_STEPS = 2
VARIANT_STEPS = 6
"""Steps of a variant, the first of which trace, and lock memory for speculation."""
GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """Configuration of one training run.

    Args:
        trainer: "engine", "plain", "fsdp2" or "deepspeed".
        model: A name of `shapes.LLAMAS`, or a preset of the command line.
        device: "cuda" or "cpu".
        batch: Samples per step.
        sequence: Tokens per sample.
        parts: Number of backwards that a step's batch is divided among; it divides `batch`.
        steps: Number of timed steps.
        max_norm: Limit of the gradients' norm.
        checkpointing: Use activation checkpointing.
        device_memory: Device budget of the engine in bytes; by default the memory of the device.
        host_memory: Host budget of the engine in bytes.
        disk: Directory of the engine's swap file.
        log: File of the recorded steps (engine only).
        variants: Time steps that are not clipped, and steps with `update=True`, too (engine only).
    """

    trainer: str
    model: str
    device: str
    batch: int
    sequence: int
    parts: int = 1
    steps: int = 3
    max_norm: float = 1.0
    checkpointing: bool = True
    device_memory: int | None = None
    host_memory: int | None = None
    disk: str | None = None
    log: str = ""
    variants: bool = False


def train(record: Record, options: SimpleNamespace) -> None:
    """Train; the options are those of `Run`."""
    run = Run(**vars(options))
    device = torch.device(run.device)
    start = time.perf_counter()
    engine = build_engine(run) if run.trainer == "engine" else None
    step, close = PEERS[run.trainer](run) if engine is None else step_of(engine, run)
    record.figure("model build", time.perf_counter() - start, "s")
    ids, losses = tokens(run, device), []

    def timed(count: int, step: Step = step) -> list[float]:
        times = []
        for _ in range(count):
            times.append(once(lambda: losses.append(step(ids).item()), device))
            print(f"step of {times[-1]:.3f} s, loss {losses[-1]:.6f}", flush=True)
        return times

    first_s, *_ = timed(WARM_UP_STEPS.get(run.trainer, 2))
    record.figure("first step", first_s, "s")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = median(timed(run.steps))
    record.figure("step", step_s, "s")
    record.figure("tokens per second", run.batch * run.sequence / step_s, "1/s")
    record.fact("losses", ", ".join(f"{loss:.6f}" for loss in losses))
    limit = None if run.device_memory is None else run.device_memory / GIB
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        for name in ("allocated", "reserved"):
            record.figure(f"peak {name}", stats[f"{name}_bytes.all.peak"] / GIB, "GiB", limit=limit)
        record.figure("allocator retries", stats["num_alloc_retries"], "")
    if engine is not None:
        describe(engine, record)
        part = ids.chunk(run.parts)[0]
        with engine.record(run.log) if run.log else nullcontext():
            timed(RECORDED_STEPS)
        plan(engine, run, part, record)
        for update in (False, True) if run.variants else ():
            other, _ = step_of(engine, run, clip=False, update=update)
            name = "update=True" if update else "not clipped"
            times = timed(VARIANT_STEPS, other)[-run.steps :]
            record.figure(f"step, {name}", median(times), "s", note=", ".join(f"{each:.3f}" for each in times))
            log = run.log.replace(".jsonl", f"-{name.replace(' ', '-')}.jsonl")
            with engine.record(log) if run.log else nullcontext():
                timed(RECORDED_STEPS, other)
    record.figure("closed in", once(close, device), "s")
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host_limit = None if run.host_memory is None else run.host_memory / GIB
    record.figure("peak of the process's memory", peak_bytes / GIB, "GiB", limit=host_limit)


def plan(engine: Engine, run: Run, part: torch.Tensor, record: Record) -> None:
    """Record what `engine.plan` says about a backward, and how long it takes."""
    start = time.perf_counter()
    report = engine.plan(input_ids=part, labels=part)
    record.figure("plan", time.perf_counter() - start, "s", note="time of planning")
    busy = {"compute": report.compute_s, "host": report.host_s}
    busy |= {used.name: used.busy_s for used in report.channels}
    for name, seconds in busy.items():
        record.figure(f"planned: {name}", seconds, "s")
    for name, seconds in {"predicted step": report.seconds, "bound of the plan": report.bound_s}.items():
        record.figure(name, seconds, "s", note="one backward" if run.parts > 1 else "")


def build_engine(run: Run) -> Engine:
    """Return this library's engine."""
    config = ps.Config(device=run.device, device_memory=run.device_memory, host_memory=run.host_memory, disk=run.disk)
    model = build_on_meta(run.model, run.checkpointing)
    return ps.initialize(model, config, weights=lambda name: pattern(model, name))[0]


def step_of(engine: Engine, run: Run, *, clip: bool = True, update: bool = False) -> StepAndClose:
    """Return a step function of an engine and its close function; with `update` it updates in the last backward."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses, parts = [], ids.chunk(run.parts)
        for number, part in enumerate(parts):
            loss = engine(input_ids=part, labels=part).loss / len(parts)
            last = number + 1 == len(parts)
            engine.backward(loss, accumulate=not last, update=update and last)
            losses.append(loss.detach())
        if clip:
            engine.clip_grad_norm_(run.max_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return sum_of(losses)

    return step, engine.close


def describe(engine: Engine, record: Record) -> None:
    """Record what the last step's statistics and the layout say."""
    last = engine.stats.last
    record.figure("parameters", engine.layout.numel / 1e9, "1e9")
    for name in ("h2d_bytes", "d2h_bytes", "device_peak_non_model_bytes", "host_peak_model_bytes"):
        record.figure(name.removesuffix("_bytes"), getattr(last, name) / GIB, "GiB")
    record.figure("host waits", last.stall_s, "s")
    record.figure("early updates confirmed", last.speculation_hits, f"of {last.speculated}")
    record.figure("retries of the engine", last.memory_retries, "")


def tokens(run: Run, device: torch.device) -> torch.Tensor:
    """Return random token ids, the same for every trainer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (run.batch, run.sequence), generator=generator).to(device)
