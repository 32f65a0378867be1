"""The job of ``patrickstar plan``: does a model fit a machine, how fast will it be, and where will the time go."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from rich.console import Console

from patrickstar._cli.presets import PRESETS, Preset
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.perf_model import BATCHES, Estimate, best_estimate, largest_batch
from patrickstar._perf_model.text_tables import ChannelRow, TierRow, channels_table, memory_table, rows
from patrickstar._perf_model.workload import Workloads, gpt_workload
from patrickstar.errors import BudgetError, ConfigError

FAMILY = (
    (2048, (20, 40)),
    (2304, (64,)),
    (3072, (53, 72)),
    (4096, (50, 60, 78, 90, 110, 130)),
    (8192, range(40, 241, 10)),
)
"""Hidden sizes and layers of ever larger GPTs: those of the paper, then wider ones."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``patrickstar plan``, under the names they have there."""

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
class Planned:
    """A model to plan for: what it is called, and the work of its steps."""

    name: str
    sequence: int
    work_of: Workloads


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan. Raises ConfigError for names that mean nothing, BudgetError where nothing fits."""
    machine = adjusted(_machine(options.machine), options.device_memory, options.host_memory)
    processes = process_count(machine, options.gpus)
    if options.largest:
        found = largest(machine, processes, options)
        if found is None:
            raise BudgetError(f"no GPT of the family fits {machine.name} at {options.least_tflops:g} TFLOPS per GPU")
        model, best = found
    else:
        model = find_planned(options.model, options.sequence, machine)
        try:
            best = _best(model, machine, processes, options)
        except BudgetError as error:
            hint = _smaller_batch(model, machine, processes, options)
            raise BudgetError(f"{error}{hint}", error.short_bytes) from None
    most = largest_batch(model.work_of, machine, processes, best.workload.checkpointing)
    if options.as_json:
        console.print_json(json.dumps(as_dict(model, machine, best, most)))
        return
    print_plan(console, model, machine, best, most)


def _machine(place: str) -> Machine:
    """`here` is this machine, measured."""
    if place != "here":
        return find_machine(place)
    # Imported when it is needed: PyTorch takes seconds, and nothing else here needs it.
    from patrickstar._dry_run.machine_profile import profile_machine
    from patrickstar.config import Config

    return profile_machine(Config().find_device())


def adjusted(machine: Machine, device_memory: str | None, host_memory: str | None) -> Machine:
    """The machine with other budgets."""
    changes: dict[str, object] = {}
    if host_memory is not None:
        changes["host"] = machine.host.model_copy(update={"memory": parse_size(host_memory)})
    if device_memory is not None:
        if machine.gpu is None:
            raise ConfigError(f"--device-memory: {machine.name} has no GPU; its memory is --host-memory")
        changes["gpu"] = machine.gpu.model_copy(update={"memory": parse_size(device_memory)})
    return machine.model_copy(update=changes)


def process_count(machine: Machine, gpus: int | None) -> int:
    """One process per GPU."""
    there = machine.gpu.count if machine.gpu is not None else 1
    if gpus is not None and not 1 <= gpus <= there:
        raise ConfigError(f"--gpus {gpus}: {machine.name} has {there}")
    return gpus if gpus is not None else there


def find_planned(place: str, sequence: int, machine: Machine) -> Planned:
    """The model that `place` means: a preset, whose work is known by counting, or a configuration, which is traced.

    Raises ConfigError, with the nearest names, for a name that is neither.
    """
    if place in PRESETS:
        return _planned_gpt(place, _gpt(PRESETS[place], sequence))
    if not Path(place).exists():
        nearest = get_close_matches(place, PRESETS, n=3, cutoff=0.3) or list(PRESETS)
        raise ConfigError(f"{place!r} is no model known here, and no file; did you mean {', '.join(nearest)}?")
    # Imported when it is needed, as above.
    from patrickstar._cli.model_source import find_model
    from patrickstar._cli.train import check_sequence, language_model_workloads

    source = find_model(place)
    check_sequence(sequence, source)
    return Planned(source.name, sequence, language_model_workloads(source, sequence, machine))


def _gpt(preset: Preset, sequence: int) -> Gpt:
    return Gpt(preset.layers, preset.hidden, preset.heads, preset.vocab_size, sequence)


def _planned_gpt(name: str, gpt: Gpt) -> Planned:
    return Planned(f"{name}, {gpt.layers} layers x {gpt.hidden}", gpt.sequence, partial(gpt_workload, gpt))


def _tried(options: PlanOptions) -> tuple[Sequence[bool], Sequence[int]]:
    """With and without checkpointing, and batches."""
    again = options.activation_checkpointing
    return (True, False) if again is None else (again,), BATCHES if options.batch is None else (options.batch,)


def _best(model: Planned, machine: Machine, processes: int, options: PlanOptions) -> Estimate:
    checkpointing, batches = _tried(options)
    return best_estimate(model.work_of, machine, processes, checkpointing, batches)


def _smaller_batch(model: Planned, machine: Machine, processes: int, options: PlanOptions) -> str:
    """What to say of batches that do fit, if there are any."""
    checkpointing, batches = _tried(options)
    batch, hints = min(batches), []
    # What was asked for and does not fit may do so if activations are computed again.
    for again in sorted({*checkpointing, True}):
        limit = batch if again in checkpointing else batch + 1
        most = largest_batch(model.work_of, machine, processes, again, limit)
        if most:
            hints.append(f"--batch {most}" + (" --activation-checkpointing" if again else ""))
    return f"; {' or '.join(hints)} fits" if hints else ""


def largest(machine: Machine, processes: int, options: PlanOptions) -> tuple[Planned, Estimate] | None:
    """The largest GPT of the family that fits and reaches the bar."""
    found = None
    for hidden, depths in FAMILY:
        for layers in depths:
            gpt = Gpt(layers, hidden, 16, 50257, options.sequence)
            model = _planned_gpt("a GPT", gpt)
            try:
                best = _best(model, machine, processes, options)
            except BudgetError:
                continue
            if best.tflops >= options.least_tflops and (found is None or gpt.numel > found[1].workload.params):
                found = model, best
    return found


def as_dict(model: Planned, machine: Machine, best: Estimate, most: int) -> dict[str, object]:
    """The plan as plain data; bytes, seconds and operations."""
    return {
        "model": {"name": model.name, "params": best.workload.params, "sequence": model.sequence},
        "machine": machine.model_dump(),
        "processes": best.processes,
        "batch": best.workload.batch,
        "largest_batch": most,
        "activation_checkpointing": best.workload.checkpointing,
        "step_s": best.seconds,
        "bound_s": best.bound_s,
        "tflops_per_process": best.tflops,
        "free_tokens": best.free_tokens,
        "shares": asdict(best.shares),
        "lanes": [asdict(lane) | {"idle_s": best.seconds - lane.seconds} for lane in best.channels],
        "non_model_bytes": best.workload.non_model_bytes,
        "device_bytes": best.device_bytes,
        "host_bytes": best.host_bytes,
        "disk_bytes": best.disk_bytes,
    }


def print_plan(console: Console, model: Planned, machine: Machine, best: Estimate, most: int) -> None:
    """Print it as people read it."""
    work = best.workload
    who = f"{best.processes} GPUs" if best.processes > 1 else "one device"
    again = "computed again in backward" if work.checkpointing else "kept for backward"
    said = (
        ("model", f"{model.name}, {work.params / 1e9:.2f} billion parameters: it fits"),
        ("machine", f"{machine.name}, {who}"),
        ("batch", f"{work.batch} x {model.sequence} tokens per process, activations {again}; at most {most} fit"),
        ("step", f"{best.seconds:.2f} s, of which the busiest resource alone takes {best.bound_s:.2f} s"),
        ("speed", f"{best.tflops:.1f} TFLOPS per process, {best.processes * work.tokens / best.seconds:,.0f} tokens/s"),
        ("moving is free", f"from {best.free_tokens:,} tokens per process and step"),
    )
    parts = (
        rows(said),
        channels_table(_channels(best), best.seconds),
        memory_table(_tiers(machine, best)),
        _choices(best),
    )
    # Wrapped by the terminal alone: a file has no width.
    console.print("\n".join(parts), soft_wrap=True, markup=False, highlight=False)


def _channels(best: Estimate) -> list[ChannelRow]:
    def amount(name: str, value: float) -> str:
        return f"{value / 1e12:,.1f}e12 op." if name == "compute" else format_size(int(value))

    return [ChannelRow(lane.name, lane.seconds, amount(lane.name, lane.amount)) for lane in best.channels]


def _tiers(machine: Machine, best: Estimate) -> list[TierRow]:
    non_model = best.workload.non_model_bytes
    if machine.gpu is not None:
        rows = [
            TierRow("each GPU", best.device_bytes, machine.gpu.memory),
            TierRow("- non-model data", non_model, machine.gpu.memory),
            TierRow("host", best.host_bytes, machine.host.memory),
        ]
    else:
        rows = [
            TierRow("RAM", best.device_bytes + best.host_bytes, machine.host.memory),
            TierRow("- non-model data", non_model, machine.host.memory),
        ]
    if machine.disk is not None:
        rows.append(TierRow("disk", best.disk_bytes, machine.disk.capacity))
    return rows


def _choices(best: Estimate) -> str:
    shares = best.shares
    streamed = max(0.0, 1 - shares.resident - shares.on_host)
    in_ram = f"; of those that are not there, {shares.in_ram:.0%} lie in RAM" if shares.in_ram < 1 else ""
    paged = f", {shares.paged:.0%} lie on disk" if shares.paged else ""
    slowest = max(best.channels, key=lambda lane: lane.seconds)
    return (
        f"of the optimizer states {shares.resident:.0%} live on the device, {shares.on_host:.0%} are updated on the "
        f"host and {streamed:.0%} come to the device for their update{in_ram}; {shares.kept:.0%} of the parameters "
        f"stay there from forward to backward{paged}. With these shares the busiest resource, {slowest.name}, is done "
        f"first (a linear program); the batch is the one with the most tokens per second."
    )
