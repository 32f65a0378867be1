"""The command ``patrickstar plan``: predict whether a model fits a machine, its speed, and what limits it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from patrickstar._cli.plan_report import Plan, plan_as_dict, print_plan
from patrickstar._cli.planned_model import PlannedModel, find_planned_model, planned_shape
from patrickstar._cli.upgrades import upgrades
from patrickstar._layout.byte_size import parse_size
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_parts import machine_of_parts, parse_disk
from patrickstar._perf_model.machine_spec import Machine, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import BATCHES, Estimate, best_estimate, largest_batch
from patrickstar._perf_model.replicas import with_smallest_replicas
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
    machine: str | None
    gpu: str | None
    nodes: int
    gpus: int | None
    tp: int
    ep: int
    capacity_factor: float | None
    device_memory: str | None
    host_memory: str | None
    disk: str | None
    batch: int | None
    sequence: int
    activation_checkpointing: bool | None
    largest: bool
    least_tflops: float
    as_json: bool


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan. Raise ConfigError for unknown names and impossible meshes, BudgetError if nothing fits."""
    machine = with_budgets(_machine(options), options.device_memory, options.host_memory)
    mesh = Mesh(options.nodes, process_count(machine, options.gpus), options.tp, options.ep)
    if options.largest:
        fitting = largest(machine, mesh, options)
        if fitting is None:
            raise BudgetError(f"no GPT of the family fits {machine.name} at {options.least_tflops:g} TFLOPS per GPU")
        model, best = fitting
        mesh = best.mesh
    else:
        model = find_planned_model(options.model, options.sequence, machine, options.capacity_factor)
        mesh = _with_replicas(model, machine, mesh, options)
        try:
            best = _best(model, machine, mesh, options)
        except BudgetError as error:
            hint = _smaller_batch(model, machine, mesh, options)
            raise BudgetError(f"{error}{hint}", error.short_bytes) from None
    max_batch = largest_batch(model.workloads(mesh), machine, mesh, best.workload.checkpointing)
    found = Plan(
        model,
        machine,
        best,
        max_batch,
        one_gpu=_smaller(model, machine, mesh, Mesh(), options),
        one_node=_smaller(model, machine, mesh, Mesh(1, mesh.gpus, mesh.tp, min(mesh.ep, mesh.gpus)), options),
        # Of many nodes each estimate takes a second.
        upgrades=upgrades(machine, mesh, partial(_best_or_none, model, options)) if mesh.nodes == 1 else [],
    )
    if options.as_json:
        console.print_json(json.dumps(plan_as_dict(found)))
        return
    print_plan(console, found)


DEFAULT_MACHINE = "8xV100-32GB"


def _machine(options: PlanOptions) -> Machine:
    """Return the machine of parts, or of a name or file; `here` is this machine, measured."""
    if options.gpu is not None:
        if options.machine is not None:
            raise ConfigError(
                f"--gpu {options.gpu} and --machine {options.machine} exclude each other: both are machines"
            )
        return machine_of_parts(options.gpu, options.gpus or 1, options.host_memory, options.disk)
    machine = _named(options.machine or DEFAULT_MACHINE)
    if options.disk is None:
        return machine
    return machine.model_copy(update={"disk": parse_disk(options.disk)})


def _named(name: str) -> Machine:
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
    """Return the number of processes per node, one per GPU."""
    available = machine.gpu.count if machine.gpu is not None else 1
    if gpus is not None and not 1 <= gpus <= available:
        raise ConfigError(f"--gpus {gpus}: {machine.name} has {available}")
    return gpus if gpus is not None else available


def _candidates(options: PlanOptions) -> tuple[Sequence[bool], Sequence[int]]:
    """Return the choices of activation checkpointing and the batch sizes to compare."""
    recompute = options.activation_checkpointing
    return (True, False) if recompute is None else (recompute,), BATCHES if options.batch is None else (options.batch,)


def _with_replicas(model: PlannedModel, machine: Machine, mesh: Mesh, options: PlanOptions) -> Mesh:
    checkpointing, batches = _candidates(options)
    return with_smallest_replicas(model.workloads, machine, mesh, checkpointing, min(batches))


def _best(model: PlannedModel, machine: Machine, mesh: Mesh, options: PlanOptions) -> Estimate:
    checkpointing, batches = _candidates(options)
    return best_estimate(model.workloads(mesh), machine, mesh, checkpointing, batches)


def _best_or_none(model: PlannedModel, options: PlanOptions, machine: Machine, mesh: Mesh) -> Estimate | None:
    """Return the best estimate; None if the model does not fit."""
    try:
        return _best(model, machine, mesh, options)
    except BudgetError:
        return None


def _smaller(model: PlannedModel, machine: Machine, mesh: Mesh, smaller: Mesh, options: PlanOptions) -> Estimate | None:
    """Return the best estimate on fewer GPUs; None if they are not fewer, or the model does not fit them."""
    if smaller.processes == mesh.processes:
        return None
    return _best_or_none(model, options, machine, smaller)


def _smaller_batch(model: PlannedModel, machine: Machine, mesh: Mesh, options: PlanOptions) -> str:
    """Return a hint with the batches that fit, empty if there are none."""
    checkpointing, batches = _candidates(options)
    batch, hints = min(batches), []
    # A batch that does not fit may fit with activation checkpointing.
    for recompute in sorted({*checkpointing, True}):
        limit = batch if recompute in checkpointing else batch + 1
        max_batch = largest_batch(model.workloads(mesh), machine, mesh, recompute, limit)
        if max_batch:
            hints.append(f"--batch {max_batch}" + (" --activation-checkpointing" if recompute else ""))
    return f"; {' or '.join(hints)} fits" if hints else ""


def largest(machine: Machine, mesh: Mesh, options: PlanOptions) -> tuple[PlannedModel, Estimate] | None:
    """Return the largest GPT of the family that fits and reaches the minimum speed, with its estimate."""
    largest_fitting = None
    for hidden, depths in GPT_FAMILY:
        for layers in depths:
            gpt = Gpt(layers, hidden, heads=16, sequence=options.sequence)
            model = planned_shape("a GPT", gpt, options.capacity_factor)
            try:
                best = _best(model, machine, _with_replicas(model, machine, mesh, options), options)
            except BudgetError:
                continue
            if best.tflops >= options.least_tflops and (
                largest_fitting is None or gpt.numel > largest_fitting[1].workload.all_params
            ):
                largest_fitting = model, best
    return largest_fitting
