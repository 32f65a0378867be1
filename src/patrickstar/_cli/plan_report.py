"""Output of ``patrickstar plan``: a page, or plain data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from patrickstar._cli.console import print_text
from patrickstar._cli.planned_model import PlannedModel
from patrickstar._cli.upgrades import ENDURANCE, Upgrade, drive_days
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.checkpoint_cost import checkpoint_cost
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import ChannelLoad, Estimate, estimate
from patrickstar._perf_model.text_tables import channels_table, memory_table, rows
from patrickstar.errors import BudgetError


@dataclass(frozen=True)
class Plan:
    """Best estimate of a model on a machine, or on a cluster of such machines.

    Attributes:
        max_batch: Largest batch that fits.
        one_gpu, one_node: Best estimates of the same model there; None if it does not fit, or is not smaller.
        upgrades: What further parts would bring.
    """

    model: PlannedModel
    machine: Machine
    best: Estimate
    max_batch: int
    one_gpu: Estimate | None = None
    one_node: Estimate | None = None
    upgrades: Sequence[Upgrade] = ()

    def efficiency(self, reference: Estimate | None) -> float | None:
        """Return the tokens per second and GPU relative to those of a smaller mesh."""
        if reference is None:
            return None
        return _tokens_per_gpu_s(self.best) / _tokens_per_gpu_s(reference)


def _tokens_per_gpu_s(step: Estimate) -> float:
    return step.tokens_per_s / step.mesh.processes


def lock_free(machine: Machine, best: Estimate) -> Estimate | None:
    """Return the estimate with lock-free updates, for one process; None if they do not fit or would gain nothing."""
    if best.processes > 1 or not best.busiest.name.startswith("disk"):
        return None
    try:
        return estimate(best.workload, machine, best.mesh, lock_free=True)
    except BudgetError:
        return None


def plan_as_dict(plan: Plan) -> dict[str, object]:
    """Return the plan as plain data, in bytes, seconds and operations; bytes of host and disk are per node."""
    best, machine = plan.best, plan.machine
    late = lock_free(machine, best)
    checkpoint = checkpoint_cost(best.workload, machine, best.mesh)
    experts = best.workload.experts
    return {
        "model": {"name": plan.model.name, "params": best.workload.all_params, "sequence": plan.model.sequence},
        "machine": machine.model_dump(),
        "mesh": asdict(best.mesh),
        "processes": best.processes,
        "batch": best.workload.batch,
        "largest_batch": plan.max_batch,
        "activation_checkpointing": best.workload.checkpointing,
        "step_s": best.seconds,
        "bound_s": best.bound_s,
        "limited_by": best.busiest.name,
        "tflops_per_process": best.tflops,
        "tokens_per_s": best.tokens_per_s,
        "efficiency": {"one_gpu": plan.efficiency(plan.one_gpu), "one_node": plan.efficiency(plan.one_node)},
        "upgrades": {
            each.name: None if each.estimate is None else each.estimate.tokens_per_s for each in plan.upgrades
        },
        "drive_days": drive_days(machine, best),
        "free_tokens": best.free_tokens,
        "imbalance": experts.imbalance if experts is not None else None,
        "lock_free": None if late is None else {"step_s": late.seconds, "staleness": late.staleness},
        "checkpoint": None if checkpoint is None else asdict(checkpoint),
        "shares": asdict(best.shares),
        "expert_shares": None if best.expert_shares is None else asdict(best.expert_shares),
        "lanes": [asdict(channel) | {"idle_s": best.seconds - channel.seconds} for channel in best.channels],
        "non_model_bytes": best.workload.non_model_bytes,
        "model_data_bytes": best.model_data_bytes,
        "device_bytes": best.device_bytes,
        "host_bytes": best.host_bytes,
        "disk_bytes": best.disk_bytes,
    }


def print_plan(console: Console, plan: Plan) -> None:
    best = plan.best
    work, busiest = best.workload, best.busiest
    unit = "process" if best.mesh.tp == 1 else "tensor-parallel group"
    activations = "recomputed in backward" if work.checkpointing else "kept for backward"
    summary = (
        ("model", f"{plan.model.name}, {work.all_params / 1e9:.2f} billion parameters: it fits"),
        ("machine", _described(plan.machine, best.mesh)),
        (
            "batch",
            f"{work.batch} x {plan.model.sequence} tokens per {unit}, activations {activations}; "
            f"at most {plan.max_batch} fit",
        ),
        ("model data", f"{format_size(best.model_data_bytes)} per process, on all tiers together"),
        (
            "step",
            f"{best.seconds:.2f} s, of which the busiest resource alone takes {busiest.seconds:.2f} s: {busiest.name}",
        ),
        ("speed", f"{best.tflops:.1f} TFLOPS per process, {best.tokens_per_s:,.0f} tokens/s"),
        *_efficiency_row(plan),
        *_blocking_row(best),
        ("transfers", f"hidden behind computation from {best.free_tokens:,} tokens per process and step"),
        ("delayed", "updates would gain nothing here: a step takes as long as its busiest resource in either case"),
        *_lock_free_row(plan.machine, best),
        *_checkpoint_row(plan.machine, best),
        *_drive_row(plan.machine, best),
        *(("with", _upgrade(each, best)) for each in plan.upgrades),
    )
    parts = (
        _answer(plan),
        rows(summary),
        channels_table(((load.name, load.seconds, _amount(load)) for load in best.channels), best.seconds),
        memory_table(_tiers(plan.machine, best)),
        _choices(best),
        _config(plan.machine, best),
    )
    print_text(console, "\n".join(parts))


def _answer(plan: Plan) -> str:
    best, name = plan.best, plan.model.name.partition(",")[0]
    speed = f"{best.tokens_per_s:,.0f} tokens/s, {best.seconds:.2f} s per step"
    return f"{name} fits {plan.machine.name} and trains at {speed}; the limit is {best.busiest.name}."


def _config(machine: Machine, best: Estimate) -> str:
    """Return the configuration to paste. Budgets follow from the machine that trains."""
    disk = ', disk="FOLDER ON THE DRIVE"' if machine.disk is not None and best.disk_bytes else ""
    torchrun = "" if best.processes == 1 else f"torchrun --nproc-per-node {best.mesh.gpus} script.py\n"
    recompute = "model.activation_checkpointing_enable()\n" if best.workload.checkpointing else ""
    config = f'ps.Config(precision="bf16"{disk}, optimizer=ps.AdamW(lr=1e-4))'
    return f"to set:\n{torchrun}{recompute}engine, optimizer = ps.initialize(model, {config})"


def _drive_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return how long the drive of a node lasts."""
    days = drive_days(machine, best)
    if days is None or machine.disk is None:
        return []
    endurance = f"{ENDURANCE * machine.disk.capacity / 1e12:,.0f} TB"
    return [("drive", f"lasts {days:,.1f} days of training, if it may be written {endurance} (usual for its capacity)")]


def _upgrade(upgrade: Upgrade, best: Estimate) -> str:
    if upgrade.estimate is None:
        return f"{upgrade.name}: it does not fit"
    gain = upgrade.estimate.tokens_per_s / best.tokens_per_s - 1
    return f"{upgrade.name}: {upgrade.estimate.tokens_per_s:,.0f} tokens/s ({gain:+.0%})"


def _described(machine: Machine, mesh: Mesh) -> str:
    devices = f"{mesh.gpus} GPUs" if mesh.gpus > 1 else "one device"
    if mesh.nodes == 1:
        text = f"{machine.name}, {devices}"
    else:
        text = f"{mesh.nodes} nodes, each {machine.name} with {devices}: {mesh.processes} processes"
    if mesh.nodes > 1 and mesh.dense.replicas == 1:
        text += "; one replica, whose parameters are gathered from all nodes"
    elif mesh.nodes > 1:
        nodes = "one node" if mesh.replica_nodes == 1 else f"{mesh.replica_nodes} nodes"
        params = "parameters" if mesh.ep == 1 else "dense parameters"
        text += f"; {mesh.dense.replicas} replicas of {nodes}, each with a copy of the {params}"
    parts = [f"{name} parallelism {size}" for name, size in (("tensor", mesh.tp), ("expert", mesh.ep)) if size > 1]
    return "; ".join([text, *parts])


def _efficiency_row(plan: Plan) -> list[tuple[str, str]]:
    """Return the tokens per second and GPU relative to one GPU and to one node."""
    smaller = [
        ("one GPU", plan.one_gpu, plan.best.mesh.processes > 1),
        ("one node", plan.one_node, plan.best.mesh.nodes > 1),
    ]
    texts = []
    for name, reference, is_smaller in smaller:
        if is_smaller:
            share = plan.efficiency(reference)
            texts.append(f"{share:.2f} times {name}'s" if share is not None else f"{name} alone cannot train it")
    return [("efficiency", f"tokens/s per GPU: {', '.join(texts)}")] if texts else []


def _blocking_row(best: Estimate) -> list[tuple[str, str]]:
    """Return what computation waits for, if operators contain collectives."""
    if not best.mesh.lockstep:
        return []
    compute = next(channel for channel in best.channels if channel.name == "compute")
    text = f"{compute.blocking_s:.2f} s of the computation waits for collectives of tensor and expert parallelism"
    experts = best.workload.experts
    if experts is not None:
        text += f"; the busiest process has {experts.imbalance:.2f} times the mean number of routed tokens"
    return [("waits", text)]


def _lock_free_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return what lock-free updates would change, if states are on disk."""
    if best.shares.in_ram >= 1 or best.processes > 1:
        return []
    late = lock_free(machine, best)
    if late is None:
        return [("lock-free", "updates would gain nothing: their buffers do not fit, or no step waits for the disk")]
    text = f"updates would make it a step of {late.seconds:.2f} s with max_staleness={late.staleness} (not exact)"
    return [("lock-free", text)]


def _checkpoint_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return the cost of a checkpoint on the disks of the nodes, or over their network."""
    cost = checkpoint_cost(best.workload, machine, best.mesh)
    if cost is None:
        return []
    where = "the disk" if machine.disk is not None else "the network"
    each = " of each node" if best.mesh.nodes > 1 else ""
    text = f"{format_size(cost.nbytes)}: {cost.save_s:.1f} s to write at the rate of {where}{each}, {cost.load_s:.1f} s"
    return [("checkpoint", f"{text} to read after a restart")]


def _amount(channel: ChannelLoad) -> str:
    return f"{channel.amount / 1e12:,.1f}e12 op." if channel.name == "compute" else format_size(int(channel.amount))


def _tiers(machine: Machine, best: Estimate) -> list[tuple[str, int, int]]:
    non_model, each = best.workload.non_model_bytes, "each " if best.mesh.nodes > 1 else ""
    if machine.gpu is not None:
        tiers = [
            ("each GPU", best.device_bytes, machine.gpu.memory),
            ("- non-model data", non_model, machine.gpu.memory),
            (f"{each}host", best.host_bytes, machine.host.memory),
        ]
    else:
        tiers = [
            ("RAM", best.device_bytes + best.host_bytes, machine.host.memory),
            ("- non-model data", non_model, machine.host.memory),
        ]
    if machine.disk is not None:
        tiers.append((f"{each}disk", best.disk_bytes, machine.disk.capacity))
    return tiers


def _choices(best: Estimate) -> str:
    shares = best.shares
    streamed = max(0.0, 1 - shares.resident - shares.on_host)
    in_ram = f"; of those outside the device, {shares.in_ram:.0%} are stored in RAM" if shares.in_ram < 1 else ""
    paged = f", {shares.paged:.0%} are stored on disk" if shares.paged else ""
    experts = ""
    if best.expert_shares is not None:
        of = best.expert_shares
        experts = (
            f" Of the experts' states {of.resident:.0%} stay on the device and {of.on_host:.0%} are updated on the "
            f"host; of their parameters {of.retained:.0%} stay on the device."
        )
    return (
        f"of the optimizer states {shares.resident:.0%} stay on the device, {shares.on_host:.0%} are updated on the "
        f"host and {streamed:.0%} are copied to the device for their update{in_ram}; of the parameters "
        f"{shares.retained:.0%} stay on the device from forward to backward{paged}.{experts} These shares minimize the "
        f"time of the busiest resource, {best.busiest.name} (a linear program); the batch maximizes tokens per second."
    )
