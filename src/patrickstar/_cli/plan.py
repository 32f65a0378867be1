"""The command ``patrickstar plan``: predict whether a model fits a machine, its speed, and what limits it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from rich.console import Console

from patrickstar._cli.console import print_text
from patrickstar._cli.presets import EXPERT_PRESETS, PRESETS, T5_PRESETS
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.perf_model import (
    BATCHES,
    ChannelLoad,
    Estimate,
    best_estimate,
    estimate,
    largest_batch,
)
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.text_tables import channels_table, memory_table, rows
from patrickstar._perf_model.workload import Workloads, gpt_workload, t5_workload
from patrickstar.errors import BudgetError, ConfigError

GPT_FAMILY = (
    (2048, (20, 40)),
    (2304, (64,)),
    (3072, (53, 72)),
    (4096, (50, 60, 78, 90, 110, 130)),
    (8192, range(40, 241, 10)),
)
"""Hidden sizes and numbers of layers of increasingly large GPTs: those of the paper, then wider ones."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``patrickstar plan``, by their names on the command line."""

    model: str
    machine: str
    gpus: int | None
    device_memory: str | None
    host_memory: str | None
    batch: int | None
    sequence: int
    activation_checkpointing: bool | None
    largest: bool
    least_tflops: float
    as_json: bool


@dataclass(frozen=True)
class PlannedModel:
    """Model to plan for, with the workload of its steps."""

    name: str
    sequence: int
    workloads: Workloads


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan. Raise ConfigError for unknown names, BudgetError if nothing fits."""
    machine = with_budgets(_machine(options.machine), options.device_memory, options.host_memory)
    processes = process_count(machine, options.gpus)
    if options.largest:
        fitting = largest(machine, processes, options)
        if fitting is None:
            raise BudgetError(f"no GPT of the family fits {machine.name} at {options.least_tflops:g} TFLOPS per GPU")
        model, best = fitting
    else:
        model = find_planned_model(options.model, options.sequence, machine)
        try:
            best = _best(model, machine, processes, options)
        except BudgetError as error:
            hint = _smaller_batch(model, machine, processes, options)
            raise BudgetError(f"{error}{hint}", error.short_bytes) from None
    max_batch = largest_batch(model.workloads, machine, processes, best.workload.checkpointing)
    if options.as_json:
        console.print_json(json.dumps(plan_as_dict(model, machine, best, max_batch)))
        return
    print_plan(console, model, machine, best, max_batch)


def _machine(name: str) -> Machine:
    """Return the machine of a name or file; `here` is this machine, measured."""
    if name != "here":
        return find_machine(name)
    # Imported here because PyTorch takes seconds to load, and nothing else in this command needs it.
    from patrickstar._dry_run.machine_profile import profile_machine
    from patrickstar.config import Config

    return profile_machine(Config().find_device())


def with_budgets(machine: Machine, device_memory: str | None, host_memory: str | None) -> Machine:
    changes: dict[str, object] = {}
    if host_memory is not None:
        changes["host"] = machine.host.model_copy(update={"memory": parse_size(host_memory)})
    if device_memory is not None:
        if machine.gpu is None:
            raise ConfigError(f"--device-memory: {machine.name} has no GPU; use --host-memory for its memory")
        changes["gpu"] = machine.gpu.model_copy(update={"memory": parse_size(device_memory)})
    return machine.model_copy(update=changes)


def process_count(machine: Machine, gpus: int | None) -> int:
    """Return the number of processes, one per GPU."""
    available = machine.gpu.count if machine.gpu is not None else 1
    if gpus is not None and not 1 <= gpus <= available:
        raise ConfigError(f"--gpus {gpus}: {machine.name} has {available}")
    return gpus if gpus is not None else available


def find_planned_model(name: str, sequence: int, machine: Machine) -> PlannedModel:
    """Find a model by preset, whose workload is computed by formulas, or configuration, which is traced in a dry run.

    The configuration is a file, or that of a preset with experts.

    Raises:
        ConfigError: The name is neither; the message suggests the nearest names.
    """
    if name in PRESETS:
        return _planned_gpt(name, replace(PRESETS[name], sequence=sequence))
    if name in T5_PRESETS:
        return _planned_t5(name, replace(T5_PRESETS[name], sequence=sequence))
    if name not in EXPERT_PRESETS and not Path(name).exists():
        known = [*PRESETS, *EXPERT_PRESETS, *T5_PRESETS]
        nearest = get_close_matches(name, known, n=3, cutoff=0.3) or known
        raise ConfigError(f"{name!r} is neither a known model nor a file; did you mean {', '.join(nearest)}?")
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._cli.model_source import find_model
    from patrickstar._cli.train import check_sequence, language_model_workloads

    source = find_model(name)
    check_sequence(sequence, source)
    return PlannedModel(source.name, sequence, language_model_workloads(source, sequence, machine))


def _planned_gpt(name: str, gpt: Gpt) -> PlannedModel:
    return PlannedModel(f"{name}, {gpt.layers} layers x {gpt.hidden}", gpt.sequence, partial(gpt_workload, gpt))


def _planned_t5(name: str, t5: T5) -> PlannedModel:
    layers = f"{t5.layers} encoder and {t5.layers} decoder layers"
    return PlannedModel(f"{name}, {layers} x {t5.hidden}", t5.sequence, partial(t5_workload, t5))


def _candidates(options: PlanOptions) -> tuple[Sequence[bool], Sequence[int]]:
    """Return the choices of activation checkpointing and the batch sizes to compare."""
    recompute = options.activation_checkpointing
    return (True, False) if recompute is None else (recompute,), BATCHES if options.batch is None else (options.batch,)


def _best(model: PlannedModel, machine: Machine, processes: int, options: PlanOptions) -> Estimate:
    checkpointing, batches = _candidates(options)
    return best_estimate(model.workloads, machine, processes, checkpointing, batches)


def _smaller_batch(model: PlannedModel, machine: Machine, processes: int, options: PlanOptions) -> str:
    """Return a hint with the batches that fit, empty if there are none."""
    checkpointing, batches = _candidates(options)
    batch, hints = min(batches), []
    # A batch that does not fit may fit with activation checkpointing.
    for recompute in sorted({*checkpointing, True}):
        limit = batch if recompute in checkpointing else batch + 1
        max_batch = largest_batch(model.workloads, machine, processes, recompute, limit)
        if max_batch:
            hints.append(f"--batch {max_batch}" + (" --activation-checkpointing" if recompute else ""))
    return f"; {' or '.join(hints)} fits" if hints else ""


def largest(machine: Machine, processes: int, options: PlanOptions) -> tuple[PlannedModel, Estimate] | None:
    """Return the largest GPT of the family that fits and reaches the minimum speed, with its estimate."""
    largest_fitting = None
    for hidden, depths in GPT_FAMILY:
        for layers in depths:
            gpt = Gpt(layers, hidden, heads=16, sequence=options.sequence)
            model = _planned_gpt("a GPT", gpt)
            try:
                best = _best(model, machine, processes, options)
            except BudgetError:
                continue
            if best.tflops >= options.least_tflops and (
                largest_fitting is None or gpt.numel > largest_fitting[1].workload.params
            ):
                largest_fitting = model, best
    return largest_fitting


def plan_as_dict(model: PlannedModel, machine: Machine, best: Estimate, max_batch: int) -> dict[str, object]:
    """Return the plan as plain data, in bytes, seconds and operations."""
    late = lock_free(machine, best)
    return {
        "model": {"name": model.name, "params": best.workload.params, "sequence": model.sequence},
        "machine": machine.model_dump(),
        "processes": best.processes,
        "batch": best.workload.batch,
        "largest_batch": max_batch,
        "activation_checkpointing": best.workload.checkpointing,
        "step_s": best.seconds,
        "bound_s": best.bound_s,
        "tflops_per_process": best.tflops,
        "free_tokens": best.free_tokens,
        "lock_free": None if late is None else {"step_s": late.seconds, "staleness": late.staleness},
        "shares": asdict(best.shares),
        "lanes": [asdict(channel) | {"idle_s": best.seconds - channel.seconds} for channel in best.channels],
        "non_model_bytes": best.workload.non_model_bytes,
        "device_bytes": best.device_bytes,
        "host_bytes": best.host_bytes,
        "disk_bytes": best.disk_bytes,
    }


def print_plan(console: Console, model: PlannedModel, machine: Machine, best: Estimate, max_batch: int) -> None:
    work = best.workload
    devices = f"{best.processes} GPUs" if best.processes > 1 else "one device"
    activations = "recomputed in backward" if work.checkpointing else "kept for backward"
    summary = (
        ("model", f"{model.name}, {work.params / 1e9:.2f} billion parameters: it fits"),
        ("machine", f"{machine.name}, {devices}"),
        (
            "batch",
            f"{work.batch} x {model.sequence} tokens per process, activations {activations}; at most {max_batch} fit",
        ),
        ("step", f"{best.seconds:.2f} s, of which the busiest resource alone takes {best.bound_s:.2f} s"),
        ("speed", f"{best.tflops:.1f} TFLOPS per process, {best.processes * work.tokens / best.seconds:,.0f} tokens/s"),
        ("transfers", f"hidden behind computation from {best.free_tokens:,} tokens per process and step"),
        ("delayed", "updates would gain nothing here: a step takes as long as its busiest resource in either case"),
        *_lock_free_row(machine, best),
    )
    parts = (
        rows(summary),
        channels_table(((load.name, load.seconds, _amount(load)) for load in best.channels), best.seconds),
        memory_table(_tiers(machine, best)),
        _choices(best),
    )
    print_text(console, "\n".join(parts))


def lock_free(machine: Machine, best: Estimate) -> Estimate | None:
    """Return the estimate with lock-free updates, for one process; None if they do not fit or would gain nothing."""
    slowest = max(best.channels, key=lambda channel: channel.seconds)
    if best.processes > 1 or not slowest.name.startswith("disk"):
        return None
    try:
        return estimate(best.workload, machine, best.processes, lock_free=True)
    except BudgetError:
        return None


def _lock_free_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return what lock-free updates would change, if states are on disk."""
    if best.shares.in_ram >= 1 or best.processes > 1:
        return []
    late = lock_free(machine, best)
    if late is None:
        return [("lock-free", "updates would gain nothing: their buffers do not fit, or no step waits for the disk")]
    text = f"updates would make it a step of {late.seconds:.2f} s with max_staleness={late.staleness} (not exact)"
    return [("lock-free", text)]


def _amount(channel: ChannelLoad) -> str:
    return f"{channel.amount / 1e12:,.1f}e12 op." if channel.name == "compute" else format_size(int(channel.amount))


def _tiers(machine: Machine, best: Estimate) -> list[tuple[str, int, int]]:
    non_model = best.workload.non_model_bytes
    if machine.gpu is not None:
        rows = [
            ("each GPU", best.device_bytes, machine.gpu.memory),
            ("- non-model data", non_model, machine.gpu.memory),
            ("host", best.host_bytes, machine.host.memory),
        ]
    else:
        rows = [
            ("RAM", best.device_bytes + best.host_bytes, machine.host.memory),
            ("- non-model data", non_model, machine.host.memory),
        ]
    if machine.disk is not None:
        rows.append(("disk", best.disk_bytes, machine.disk.capacity))
    return rows


def _choices(best: Estimate) -> str:
    shares = best.shares
    streamed = max(0.0, 1 - shares.resident - shares.on_host)
    in_ram = f"; of those outside the device, {shares.in_ram:.0%} are stored in RAM" if shares.in_ram < 1 else ""
    paged = f", {shares.paged:.0%} are stored on disk" if shares.paged else ""
    slowest = max(best.channels, key=lambda channel: channel.seconds)
    return (
        f"of the optimizer states {shares.resident:.0%} stay on the device, {shares.on_host:.0%} are updated on the "
        f"host and {streamed:.0%} are copied to the device for their update{in_ram}; of the parameters "
        f"{shares.retained:.0%} stay on the device from forward to backward{paged}. These shares minimize the time of "
        f"the busiest resource, {slowest.name} (a linear program); the batch maximizes tokens per second."
    )
