"""Performance model: the fastest step on a machine with full overlap, and the placement that reaches it.

Bytes per tier and seconds per channel are linear in the shares of model data that each tier holds. One linear program
minimizes the time of the busiest channel; another finds the missing bytes if the model does not fit.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.linear_program import SLACK, Expression, Variables, minimize, value
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.workload import (
    LOCK_FREE_BYTES,
    PARAM_BYTES,
    STATE_BYTES,
    UPDATE_BYTES,
    Workload,
    Workloads,
)
from patrickstar.errors import BudgetError

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Candidate batch sizes in sequences per process."""

_KEPT, _RESIDENT, _ON_HOST, _STREAMED, _REFETCHED, _IN_RAM, _ON_DISK, _PAGED, _TIME, _EXTRA = range(10)
_VAR = Variables(10)

PAGED_READ_BYTES, PAGED_WRITE_BYTES = 2 * PARAM_BYTES, PARAM_BYTES
"""Disk traffic of a parameter stored on disk: read for forward and backward, written after its update."""


@dataclass(frozen=True)
class Shares:
    """Placement of a process's model data, and where it is updated; each share is from 0 to 1."""

    retained: float
    """Parameters that stay on the device from forward to backward, and to the next forward."""
    resident: float
    """Parameters whose states are on the device, and which are updated there."""
    on_host: float
    """Parameters updated on the host; the states of the rest are streamed to the device for the update."""
    in_ram: float
    """Part of the states outside the device that is in host memory; the rest is on disk."""
    paged: float
    """Parameters that are stored on disk, too."""


@dataclass(frozen=True)
class ChannelLoad:
    """Load of one resource in a step."""

    name: str
    seconds: float
    amount: float
    """Bytes or operations."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of one step of all processes."""

    workload: Workload
    processes: int
    shares: Shares
    channels: tuple[ChannelLoad, ...]
    fill_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    sweep_s: float = 0.0
    """Seconds in which the disk reads and writes all states on it once."""

    @property
    def staleness(self) -> int:
        """Steps that pass until lock-free updates have swept all states on disk; 0 without any."""
        return math.ceil(self.sweep_s / self.seconds - SLACK) if self.seconds else 0

    @property
    def bound_s(self) -> float:
        """Seconds of the busiest channel, minimal over all shares."""
        return max(channel.seconds for channel in self.channels)

    @property
    def seconds(self) -> float:
        return self.bound_s + self.fill_s

    @property
    def tflops(self) -> float:
        """Throughput of one process in 10^12 operations per second."""
        return self.workload.operations / self.seconds / 1e12

    @property
    def free_tokens(self) -> int:
        """Tokens per process and step from which on computation hides all transfers."""
        compute = next(channel for channel in self.channels if channel.name == "compute")
        transfer_s = max(channel.seconds for channel in self.channels if channel is not compute)
        return math.ceil(self.workload.tokens * transfer_s / compute.seconds) if compute.seconds else 0


class Tier(Enum):
    """Memory tiers; the values are their names in messages."""

    DEVICE = "device memory"
    HOST = "host memory"
    DISK = "disk"


def estimate(work: Workload, machine: Machine, processes: int = 1, *, lock_free: bool = False) -> Estimate:
    """Estimate the fastest step of `processes` on a machine, each with an equal part of the model data.

    Args:
        lock_free: No step waits for states on disk; the host has the buffers of lock-free updates (Angel-PTM §4.3).

    Raises:
        BudgetError: The model does not fit; the message names the smallest sufficient changes.
    """
    busy = _channels(work, machine, processes, lock_free)
    used = _used(work, processes)
    if lock_free:
        used[Tier.HOST] = used[Tier.HOST] + _VAR.one * float(LOCK_FREE_BYTES * work.params)
    limits = [*_capacity_limits(used, machine), *(seconds - _VAR[_TIME] for _, seconds, _ in busy)]
    fastest = minimize(_VAR[_TIME], limits, _TOTALS)
    if fastest is None:
        raise _budget_error(work, machine, processes)
    # Of equally fast solutions, the one with the fewest transfers: less disk wear, and slack for unforeseen load.
    time_limit = _VAR[_TIME] - _VAR.one * fastest[_TIME] * (1 + SLACK)
    solution = minimize(np.sum([seconds for _, seconds, _ in busy], axis=0), [*limits, time_limit], _TOTALS)
    solution = fastest if solution is None else solution
    channels = tuple(
        ChannelLoad(name, value(seconds, solution), value(amount, solution)) for name, seconds, amount in busy
    )
    off_device = solution[_IN_RAM] + solution[_ON_DISK]
    return Estimate(
        work,
        processes,
        Shares(
            float(solution[_KEPT]),
            float(solution[_RESIDENT]),
            float(solution[_ON_HOST]),
            float(solution[_IN_RAM] / off_device) if off_device > SLACK else 1.0,
            float(solution[_PAGED]),
        ),
        channels,
        work.fill_share * max(channel.seconds for channel in channels if channel.name != "compute"),
        math.floor(value(used[Tier.DEVICE], solution)),
        math.floor(value(used[Tier.HOST], solution)),
        math.floor(value(used[Tier.DISK], solution)),
        value(_sweep(work, machine), solution),
    )


def min_transfer_bytes(work: Workload, machine: Machine, processes: int = 1) -> tuple[int, int]:
    """Return lower bounds of the bytes of a step between host and device, and to and from disk, per process.

    Each bound is minimized separately and assumes no non-model data, because a plan may use the memory that non-model
    data leaves free below its peak. Embedding lookups on the host are not considered.

    Raises:
        BudgetError: The model does not fit.
    """
    work = replace(work, non_model_bytes=0, working_bytes=0)
    amounts = {name: amount for name, _, amount in _channels(work, machine, processes)}
    limits = _capacity_limits(_used(work, processes), machine)
    bounds = []
    for pair in (("host to device", "device to host"), ("disk read", "disk write")):
        transferred = np.sum([amounts.get(name, 0 * _VAR.one) for name in pair], axis=0)
        solution = minimize(transferred / 1e9, limits, _TOTALS)
        if solution is None:
            raise _budget_error(work, machine, processes)
        bounds.append(math.ceil(value(transferred, solution)))
    return bounds[0], bounds[1]


def min_extra_bytes(work: Workload, machine: Machine, processes: int, tier: Tier) -> int | None:
    """Return the bytes that a tier must gain for the model to fit; None if no amount is enough."""
    used = _used(work, processes)
    used[tier] = used[tier] - _VAR[_EXTRA] * 1e9
    solution = minimize(_VAR[_EXTRA], _capacity_limits(used, machine), _TOTALS)
    return None if solution is None else math.ceil(solution[_EXTRA] * 1e9 * (1 + SLACK)) + 1


def best_estimate(
    work_of: Workloads,
    machine: Machine,
    processes: int,
    checkpointing: Sequence[bool] = (True, False),
    batches: Sequence[int] = BATCHES,
) -> Estimate:
    """Return the estimate with the most tokens per second over batch sizes, with and without checkpointing.

    Ties go to the smallest batch.

    Raises:
        BudgetError: No batch fits; the error is that of the smallest.
    """
    estimates: list[Estimate] = []
    first_error: BudgetError | None = None
    for recompute in checkpointing:
        for batch in sorted(batches):
            try:
                estimates.append(estimate(work_of(batch, recompute), machine, processes))
            except BudgetError as error:
                first_error = first_error or error
                break  # larger batches need more memory
    if not estimates:
        assert first_error is not None, "no batch was given"
        raise first_error

    def merit(candidate: Estimate) -> tuple[float, int, bool]:
        speed = candidate.workload.tokens / candidate.seconds
        return float(f"{speed:.4g}"), -candidate.workload.tokens, not candidate.workload.checkpointing

    return max(estimates, key=merit)


def fits(work: Workload, machine: Machine, processes: int) -> bool:
    """Return whether some placement respects all budgets."""
    return minimize(_VAR.one, _capacity_limits(_used(work, processes), machine), _TOTALS) is not None


def largest_batch(
    work_of: Workloads, machine: Machine, processes: int, checkpointing: bool, below: int = 1 << 20
) -> int:
    """Return the largest number of sequences per process that fits; 0 if not even one does."""

    def possible(batch: int) -> bool:
        return fits(work_of(batch, checkpointing), machine, processes)

    if not possible(1):
        return 0
    largest, too_large = 1, 2
    while too_large < below and possible(too_large):
        largest, too_large = too_large, 2 * too_large
    too_large = min(too_large, below)
    return largest + bisect_left(range(largest + 1, too_large), True, key=lambda batch: not possible(batch))


_TOTALS = [
    _VAR[_RESIDENT] + _VAR[_ON_HOST] + _VAR[_STREAMED] - _VAR.one,
    _VAR[_RESIDENT] + _VAR[_IN_RAM] + _VAR[_ON_DISK] - _VAR.one,
]
"""Equality constraints: every parameter is updated on some tier, and every state is stored on some tier."""


def _used(work: Workload, processes: int) -> dict[Tier, Expression]:
    """Bytes used on one process's device, and by all processes on the host and its disk."""
    shard, total = work.params / processes, float(work.params)
    on_host = _VAR.one - _VAR[_KEPT] - _VAR[_RESIDENT] - _VAR[_PAGED]
    return {
        Tier.DEVICE: _VAR.one * (work.non_model_bytes + work.working_bytes)
        + shard * (PARAM_BYTES * _VAR[_KEPT] + (PARAM_BYTES + STATE_BYTES) * _VAR[_RESIDENT]),
        Tier.HOST: total * (PARAM_BYTES * on_host + STATE_BYTES * _VAR[_IN_RAM]),
        Tier.DISK: total * (STATE_BYTES * _VAR[_ON_DISK] + PARAM_BYTES * _VAR[_PAGED]),
    }


def _capacity_limits(used: dict[Tier, Expression], machine: Machine) -> list[Expression]:
    """Inequality constraints: expressions that must not be above zero."""
    disk_bytes = machine.disk.capacity if machine.disk is not None else 0
    if machine.gpu is not None:
        in_memory = [
            used[Tier.DEVICE] - _VAR.one * machine.gpu.memory,
            used[Tier.HOST] - _VAR.one * machine.host.memory,
        ]
    else:  # one memory for both tiers
        in_memory = [used[Tier.DEVICE] + used[Tier.HOST] - _VAR.one * machine.host.memory]
    # Parameters are kept, resident or paged, at most one of them.
    exclusive = _VAR[_KEPT] + _VAR[_RESIDENT] + _VAR[_PAGED] - _VAR.one
    # Parameters that are updated on the device but not kept there are fetched again for the next forward.
    refetched = _VAR[_STREAMED] - _VAR[_KEPT] - _VAR[_REFETCHED]
    return [*in_memory, used[Tier.DISK] - _VAR.one * disk_bytes, exclusive, refetched]


def _sweep(work: Workload, machine: Machine) -> Expression:
    """Seconds in which the disk reads and writes all states on it once, in both directions at the same time."""
    if machine.disk is None:
        return 0 * _VAR.one
    return work.params * STATE_BYTES * _VAR[_ON_DISK] / min(machine.disk.read, machine.disk.write)


def _channels(
    work: Workload, machine: Machine, processes: int, lock_free: bool = False
) -> list[tuple[str, Expression, Expression]]:
    """Name, busy seconds and amount of each resource for one process; seconds of shared resources count all.

    `lock_free`: without the states on disk, for which no step waits.
    """
    shard = work.params / processes
    fetched = _VAR.one - _VAR[_KEPT] - _VAR[_RESIDENT]
    disk, rate = machine.disk, machine.matmul_rate(work.matrix_size)
    d2h_bytes = shard * (PARAM_BYTES * _VAR[_ON_HOST] + STATE_BYTES * _VAR[_STREAMED])
    h2d_bytes = d2h_bytes + shard * PARAM_BYTES * (fetched + _VAR[_REFETCHED])
    states_bytes = (0 if lock_free else STATE_BYTES) * _VAR[_ON_DISK]
    read_bytes = shard * (states_bytes + PAGED_READ_BYTES * _VAR[_PAGED])
    write_bytes = shard * (states_bytes + PAGED_WRITE_BYTES * _VAR[_PAGED])
    host_update = UPDATE_BYTES * _VAR[_ON_HOST] + 2 * STATE_BYTES * _VAR[_STREAMED]
    device_update_bytes = shard * UPDATE_BYTES * (_VAR[_RESIDENT] + _VAR[_STREAMED])
    ram_bytes = shard * (host_update + PARAM_BYTES * fetched) + read_bytes + write_bytes
    compute = _VAR.one * (work.operations / rate)
    if machine.gpu is not None:
        compute = compute + device_update_bytes / machine.gpu.memory_bandwidth
    else:
        ram_bytes = ram_bytes + device_update_bytes
    h2d, d2h = machine.transfer_rates(processes)
    memory = machine.host.update_bandwidth(processes, max(1, machine.host.cores // processes))
    channels = [
        ("compute", compute, _VAR.one * work.operations),
        ("host to device", h2d_bytes / h2d, h2d_bytes),
        ("device to host", d2h_bytes / d2h, d2h_bytes),
        ("host memory", ram_bytes * processes / memory, ram_bytes),
    ]
    if disk is not None:
        channels.append(("disk read", read_bytes * processes / disk.read, read_bytes))
        channels.append(("disk write", write_bytes * processes / disk.write, write_bytes))
    if processes > 1:
        assert machine.links is not None and machine.links.gpu_gpu is not None
        # Two all-gathers of parameters, one reduce-scatter of gradients (PatrickStar §7: 6(p-1)/p bytes per parameter).
        sent_bytes = _VAR.one * (3 * PARAM_BYTES * (processes - 1) / processes * work.params)
        channels.append(("between GPUs", sent_bytes / machine.links.gpu_gpu, sent_bytes))
    return channels


def _budget_error(work: Workload, machine: Machine, processes: int) -> BudgetError:
    tiers = Tier if machine.gpu is not None else (Tier.HOST, Tier.DISK)
    needs = {tier: min_extra_bytes(work, machine, processes, tier) for tier in tiers}
    remedies = [f"{format_size(nbytes)} more {tier.value}" for tier, nbytes in needs.items() if nbytes is not None]
    memory = machine.device_memory
    if work.non_model_bytes + work.working_bytes > memory:
        problem = (
            f"{format_size(work.non_model_bytes)} of non-model data and {format_size(work.working_bytes)} of "
            f"parameters used at the same time exceed the device memory of {format_size(memory)}"
        )
        remedies = [
            *(["a smaller batch"] if work.batch > 1 else []),
            *([] if work.checkpointing else ["activation checkpointing"]),
            *remedies,
        ]
    else:
        total = format_size((PARAM_BYTES + STATE_BYTES) * work.params)
        devices = f"{processes} devices" if processes > 1 else "the device"
        problem = f"the model data of {total} do not fit on {devices}, the host and its disk"
    short = min((nbytes for nbytes in needs.values() if nbytes is not None), default=None)
    return BudgetError(f"{problem}. Try {', or '.join(remedies) or 'more device memory and more host memory'}", short)
