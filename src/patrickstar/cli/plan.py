"""The job of ``patrickstar plan``: does a model fit a machine, how fast will it be, and where will the time go."""

import json
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patrickstar.cli.presets import PRESETS, Preset
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.layout.sizes import format_size, parse_size
from patrickstar.schedule.estimate import BATCHES, Estimate, best_estimate
from patrickstar.schedule.gpt import Gpt
from patrickstar.schedule.machine import Machine, find_machine

FAMILY = (
    (2048, (20, 40)),
    (2304, (64,)),
    (3072, (53, 72)),
    (4096, (50, 60, 78, 90, 110, 130)),
    (8192, range(40, 241, 10)),
)
"""Hidden sizes and layers of ever larger GPTs: those of the paper, then wider ones."""

BAR_WIDTH = 24


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
    activation_checkpointing: bool
    largest: bool
    least_tflops: float
    as_json: bool


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan. Raises ConfigError for names that mean nothing, BudgetError where nothing fits."""
    machine = adjusted(_machine(options.machine), options.device_memory, options.host_memory)
    processes = process_count(machine, options.gpus)
    if options.largest:
        found = largest(machine, processes, options)
        if found is None:
            raise BudgetError(f"no GPT of the family fits {machine.name} at {options.least_tflops:g} TFLOPS per GPU")
        gpt, best = found
    else:
        gpt = shape(options.model, options.sequence)
        best = _best(gpt, machine, processes, options)
    if options.as_json:
        console.print_json(json.dumps(as_dict(gpt, machine, best)))
        return
    print_plan(console, gpt, machine, best)


def _machine(place: str) -> Machine:
    """`here` is this machine, measured."""
    if place != "here":
        return find_machine(place)
    # Imported when it is needed: PyTorch takes seconds, and nothing else here needs it.
    from patrickstar.engine.config import Config
    from patrickstar.engine.here import describe

    return describe(Config().find_device())


def adjusted(machine: Machine, device_memory: str | None, host_memory: str | None) -> Machine:
    """The machine with other budgets."""
    changes: dict[str, object] = {}
    if host_memory is not None:
        changes["host"] = machine.host.model_copy(update={"memory": parse_size(host_memory)})
    if device_memory is not None:
        if machine.gpu is None:
            raise ConfigError(f"--device-memory is a GPU's, and {machine.name} has none; give --host-memory")
        changes["gpu"] = machine.gpu.model_copy(update={"memory": parse_size(device_memory)})
    return machine.model_copy(update=changes)


def process_count(machine: Machine, gpus: int | None) -> int:
    """One process per GPU."""
    there = machine.gpu.count if machine.gpu is not None else 1
    if gpus is not None and not 1 <= gpus <= there:
        raise ConfigError(f"--gpus {gpus}: {machine.name} has {there}")
    return gpus if gpus is not None else there


def shape(name: str, sequence: int) -> Gpt:
    """A preset's shape. Raises ConfigError, with the nearest names, for a name that is none."""
    if name not in PRESETS:
        nearest = get_close_matches(name, PRESETS, n=3, cutoff=0.3) or list(PRESETS)
        raise ConfigError(f"{name!r} is no model known here; did you mean {', '.join(nearest)}?")
    return _gpt(PRESETS[name], sequence)


def _gpt(preset: Preset, sequence: int) -> Gpt:
    return Gpt(preset.layers, preset.hidden, preset.heads, preset.vocab_size, sequence)


def _best(gpt: Gpt, machine: Machine, processes: int, options: PlanOptions) -> Estimate:
    batches = (options.batch,) if options.batch is not None else BATCHES
    return best_estimate(gpt, machine, processes, options.activation_checkpointing, batches)


def largest(machine: Machine, processes: int, options: PlanOptions) -> tuple[Gpt, Estimate] | None:
    """The largest GPT of the family that fits and reaches the bar."""
    found = None
    for hidden, depths in FAMILY:
        for layers in depths:
            gpt = Gpt(layers, hidden, 16, 50257, options.sequence)
            try:
                best = _best(gpt, machine, processes, options)
            except BudgetError:
                continue
            if best.tflops >= options.least_tflops and (found is None or gpt.numel > found[0].numel):
                found = gpt, best
    return found


def as_dict(gpt: Gpt, machine: Machine, best: Estimate) -> dict[str, object]:
    """The plan as plain data; bytes, seconds and operations."""
    return {
        "model": asdict(gpt) | {"params": gpt.numel},
        "machine": machine.model_dump(),
        "processes": best.processes,
        "batch": best.workload.tokens // gpt.sequence,
        "step_s": best.seconds,
        "bound_s": best.bound_s,
        "tflops_per_process": best.tflops,
        "free_tokens": best.free_tokens,
        "shares": asdict(best.shares),
        "lanes": [asdict(lane) for lane in best.lanes],
        "device_bytes": best.device_bytes,
        "host_bytes": best.host_bytes,
        "disk_bytes": best.disk_bytes,
    }


def print_plan(console: Console, gpt: Gpt, machine: Machine, best: Estimate) -> None:
    """Print it as people read it."""
    work, batch = best.workload, best.workload.tokens // gpt.sequence
    who = f"{best.processes} GPUs" if best.processes > 1 else "one device"
    for name, text in (
        ("model", f"{gpt.layers} layers x {gpt.hidden}, {gpt.numel / 1e9:.2f} billion parameters: it fits"),
        ("machine", f"{machine.name}, {who}"),
        ("batch", f"{batch} x {gpt.sequence} tokens per process"),
        ("step", f"{best.seconds:.2f} s; nothing can be faster than {best.bound_s:.2f} s"),
        ("speed", f"{best.tflops:.1f} TFLOPS per process, {best.processes * work.tokens / best.seconds:,.0f} tokens/s"),
        ("moving is free", f"from {best.free_tokens:,} tokens per process and step"),
    ):
        console.print(Text.assemble((f"{name:<16}", "bold"), text), soft_wrap=True)
    console.print(_lanes(best))
    console.print(_memory(machine, best))
    console.print(_choices(best), soft_wrap=True, highlight=False)


def _bar(share: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, share))
    return "#" * filled + "." * (BAR_WIDTH - filled)


def _lanes(best: Estimate) -> Table:
    table = Table(title="where the time goes", title_justify="left", box=None)
    for column in ("resource", "busy", "moves", f"{'share':<{BAR_WIDTH}}"):
        table.add_column(column, no_wrap=True)
    for lane in best.lanes:
        amount = f"{lane.amount / 1e12:,.1f}e12 op." if lane.name == "compute" else format_size(int(lane.amount))
        table.add_row(lane.name, f"{lane.seconds:.2f} s", amount, _bar(lane.seconds / best.seconds))
    return table


def _memory(machine: Machine, best: Estimate) -> Table:
    table = Table(title="memory", title_justify="left", box=None)
    for column in ("tier", "used", "of", f"{'':<{BAR_WIDTH}}"):
        table.add_column(column, no_wrap=True)
    if machine.gpu is not None:
        rows = [("each GPU", best.device_bytes, machine.gpu.memory), ("host", best.host_bytes, machine.host.memory)]
    else:
        rows = [("RAM", best.device_bytes + best.host_bytes, machine.host.memory)]
    if machine.disk is not None:
        rows.append(("disk", best.disk_bytes, machine.disk.capacity))
    for name, used, there in rows:
        table.add_row(name, format_size(used), format_size(there), _bar(used / there))
    return table


def _choices(best: Estimate) -> str:
    shares = best.shares
    streamed = max(0.0, 1 - shares.resident - shares.on_host)
    return (
        f"of the optimizer states {shares.resident:.0%} live on the device, {shares.on_host:.0%} are updated on the "
        f"host and {streamed:.0%} come to the device for their update; {shares.kept:.0%} of the parameters stay "
        f"there from forward to backward"
    )
