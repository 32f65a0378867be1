"""Performance model: the fastest step on a machine or a cluster with full overlap, and the placement that reaches it.

Bytes per tier and seconds per channel are linear in the shares of model data that each tier holds. One linear program
minimizes the time of the busiest channel; another finds the missing bytes if the model does not fit.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.frozen_data import FrozenShares
from patrickstar._perf_model.linear_program import SLACK, value
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import ONE_PROCESS, Mesh, one_divides_the_other
from patrickstar._perf_model.model_data import Shares
from patrickstar._perf_model.step_program import MemoryTier, StepProgram, total
from patrickstar._perf_model.workload import Workload, Workloads
from patrickstar.errors import BudgetError

ALL_OR_NONE = (1.0, 0.0)
"""Candidate shares of the layers that are recomputed in backward."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Candidate batch sizes in sequences per process."""
MOST = 1 << 20
"""More sequences than any process trains in a step."""


@dataclass(frozen=True)
class ChannelLoad:
    """Load of one resource in a step."""

    name: str
    seconds: float
    amount: float
    """Bytes or operations."""
    blocking_s: float = 0.0
    """Part of the seconds, for collectives that computation waits for; it is proportional to the tokens."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of one step of all processes."""

    workload: Workload
    mesh: Mesh
    shares: Shares
    channels: tuple[ChannelLoad, ...]
    bound_s: float
    """Least seconds of the busiest resource over all placements: no step is faster."""
    fill_s: float
    model_data_bytes: int
    """Bytes of one process on all tiers."""
    device_bytes: int
    host_bytes: int
    """Bytes of all processes of a node."""
    disk_bytes: int
    """Bytes of all processes of a node."""
    sweep_s: float = 0.0
    """Seconds in which the disk reads and writes all states on it once."""
    expert_shares: Shares | None = None
    frozen_shares: FrozenShares | None = None

    @property
    def processes(self) -> int:
        return self.mesh.processes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all processes; tensor-parallel processes have the same tokens."""
        return self.mesh.batches * self.workload.tokens / self.seconds

    @property
    def busiest(self) -> ChannelLoad:
        """Channel that limits the speed."""
        return max(self.channels, key=lambda channel: channel.seconds)

    @property
    def staleness(self) -> int:
        """Steps that pass until lock-free updates have swept all states on disk; 0 without any."""
        return math.ceil(self.sweep_s / self.seconds - SLACK) if self.seconds else 0

    @property
    def seconds(self) -> float:
        return self.busiest.seconds + self.fill_s

    @property
    def tflops(self) -> float:
        """Throughput of one process in 10^12 operations per second."""
        return self.workload.all_operations / self.seconds / 1e12

    @property
    def free_tokens(self) -> int:
        """Tokens per process and step from which on computation hides all transfers that it does not wait for."""
        compute = next(channel for channel in self.channels if channel.name == "compute")
        if not compute.seconds:
            return 0
        return max(
            math.ceil(
                self.workload.tokens * (channel.seconds - channel.blocking_s) / (compute.seconds - channel.blocking_s)
            )
            for channel in self.channels
            if channel is not compute
        )


def estimate(work: Workload, machine: Machine, mesh: Mesh = ONE_PROCESS, *, lock_free: bool = False) -> Estimate:
    """Estimate the fastest step of the processes of a mesh, each with an equal part of the model data.

    It takes as long as the busiest resource, and the share of the transfers that fills the pipeline before it.

    Args:
        work: Workload of one process of this mesh.
        machine: Each node of the cluster.
        lock_free: No step waits for states on disk; the host has the buffers of lock-free updates (Angel-PTM §4.3).

    Raises:
        BudgetError: The model does not fit; the message names the smallest sufficient changes.
        ConfigError: The mesh has several nodes, and the machine has no network.
    """
    program = StepProgram(work, machine, mesh, lock_free)
    busy = program.channels()
    hidden = [channel.seconds - program.one * channel.blocking_s for channel in busy if channel.name != "compute"]
    limits = [
        *(channel.seconds - program.time for channel in busy),
        *(transfers - program.transfers for transfers in hidden),
    ]
    bound = program.minimize(program.time, *limits)
    if bound is None:
        raise _budget_error(work, machine, mesh)
    step = program.time + work.fill_share * program.transfers
    fastest = program.minimize(step, *limits)
    assert fastest is not None, "what has a least time of its busiest resource fits"
    # Of equally fast solutions, the one with the fewest transfers: less disk wear, and slack for unforeseen load.
    limit = step - program.one * value(step, fastest)
    solution = program.minimize(total([channel.seconds for channel in busy]), *limits, limit)
    solution = fastest if solution is None else solution
    loads = tuple(
        ChannelLoad(channel.name, value(channel.seconds, solution), value(channel.amount, solution), channel.blocking_s)
        for channel in busy
    )
    transfers_s = max(load.seconds - load.blocking_s for load in loads if load.name != "compute")
    dense, *experts = (data.shares(solution) for data in program.model_data)
    return Estimate(
        work,
        mesh,
        dense,
        loads,
        min(value(program.time, bound), max(load.seconds for load in loads)),
        work.fill_share * transfers_s,
        round(program.nbytes),
        math.floor(value(program.used[MemoryTier.DEVICE], solution)),
        math.floor(value(program.used[MemoryTier.HOST], solution)),
        math.floor(value(program.used[MemoryTier.DISK], solution)),
        value(program.sweep, solution),
        experts[0] if experts else None,
        None if program.frozen is None else program.frozen.shares(solution),
    )


def min_extra_bytes(work: Workload, machine: Machine, mesh: Mesh, tier: MemoryTier) -> int | None:
    """Return the bytes that a tier of each node must gain for the model to fit; None if no amount is enough."""
    program = StepProgram(work, machine, mesh)
    program.used[tier] = program.used[tier] - program.extra * 1e9
    solution = program.minimize(program.extra)
    return None if solution is None else math.ceil(value(program.extra, solution) * 1e9 * (1 + SLACK)) + 1


def best_estimate(
    work_of: Workloads,
    machine: Machine,
    mesh: Mesh,
    checkpointing: Sequence[float] = ALL_OR_NONE,
    batches: Sequence[int] = BATCHES,
    below_bytes: float = math.inf,
) -> Estimate:
    """Return the estimate with the most tokens per second over batch sizes and shares of recomputed layers.

    Ties go to the smallest batch.

    Args:
        below_bytes: The step needs less memory on the device than this.

    Raises:
        BudgetError: No batch fits; the error is that of the smallest.
    """
    estimates: list[Estimate] = []
    first_error: BudgetError | None = None
    for share in checkpointing:
        for batch in sorted(batches):
            work = work_of(batch, share, mesh)
            if work.device_bytes >= below_bytes:
                break
            try:
                estimates.append(estimate(work, machine, mesh))
            except BudgetError as error:
                first_error = first_error or error
                break  # larger batches need more memory
    if not estimates:
        raise first_error or BudgetError(f"no smaller step than one of {below_bytes} bytes was found")

    def merit(candidate: Estimate) -> tuple[float, int, float]:
        speed = candidate.workload.tokens / candidate.seconds
        return float(f"{speed:.4g}"), -candidate.workload.tokens, -candidate.workload.checkpointing

    return max(estimates, key=merit)


def fits(work: Workload, machine: Machine, mesh: Mesh) -> bool:
    """Return whether some placement respects all budgets."""
    program = StepProgram(work, machine, mesh)
    return program.minimize(program.one) is not None


def with_smallest_replicas(
    work_of: Workloads, machine: Machine, mesh: Mesh, checkpointing: Sequence[float], batch: int
) -> Mesh:
    """Return the mesh with the smallest replicas that fit in memory, or else with a disk; as it is if none fits.

    Each further replica costs a copy of the parameters.

    Args:
        mesh: Processes; its replicas have the smallest number of nodes that is considered.
        batch: Number of sequences.
    """
    candidates = [
        replace(mesh, replica_nodes=nodes)
        for nodes in range(mesh.replica_nodes, mesh.nodes + 1)
        if mesh.nodes % nodes == 0 and one_divides_the_other(nodes * mesh.gpus, mesh.ep)
    ]
    if len(candidates) == 1:
        return mesh
    for tiers in (machine.model_copy(update={"disk": None}), machine):
        for candidate in candidates:
            if any(fits(work_of(batch, recompute, candidate), tiers, candidate) for recompute in checkpointing):
                return candidate
    return mesh


def largest_batch(work_of: Workloads, machine: Machine, mesh: Mesh, checkpointing: float, below: int = MOST) -> int:
    """Return the largest number of sequences per process that fits; 0 if not even one does."""

    def possible(batch: int) -> bool:
        return fits(work_of(batch, checkpointing, mesh), machine, mesh)

    if not possible(1):
        return 0
    largest, too_large = 1, 2
    while too_large < below and possible(too_large):
        largest, too_large = too_large, 2 * too_large
    too_large = min(too_large, below)
    return largest + bisect_left(range(largest + 1, too_large), True, key=lambda batch: not possible(batch))


def _budget_error(work: Workload, machine: Machine, mesh: Mesh) -> BudgetError:
    tiers = MemoryTier if machine.gpu is not None else (MemoryTier.HOST, MemoryTier.DISK)
    needs = {tier: min_extra_bytes(work, machine, mesh, tier) for tier in tiers}
    where = " per node" if mesh.nodes > 1 else ""
    remedies = [
        f"{format_size(nbytes)} more {tier.value}{where if tier is not MemoryTier.DEVICE else ''}"
        for tier, nbytes in needs.items()
        if nbytes is not None
    ]
    memory, other = machine.device_memory, f"{format_size(work.non_model_bytes)} of non-model data"
    if work.device_bytes > memory:
        used = f"{format_size(work.device_bytes - work.non_model_bytes)} of parameters used at the same time"
        problem = f"{other} and {used} exceed the device memory of {format_size(memory)}"
        remedies = [
            *(["a smaller batch"] if work.batch > 1 else []),
            *(["activation checkpointing"] if work.checkpointing < 1 else []),
            *remedies,
        ]
    else:
        nbytes = StepProgram(work, machine, mesh).nbytes * mesh.processes
        devices = f"{mesh.processes} devices" if mesh.processes > 1 else "the device"
        disk = "" if machine.disk is None else " with its disk" if mesh.nodes == 1 else " with disks"
        below = f"the host{disk}" if mesh.nodes == 1 else f"the hosts{disk} of {mesh.nodes} nodes"
        problem = f"{format_size(round(nbytes))} of model data and {other} do not fit on {devices} and {below}"
    short = min((nbytes for nbytes in needs.values() if nbytes is not None), default=None)
    return BudgetError(f"{problem}. Try {', or '.join(remedies) or 'more device memory and more host memory'}", short)
