"""How fast a step can be on a machine, with everything overlapped, and where model data should lie for that.

Bytes follow from shares of the model data, linearly; so do the seconds of every lane. The shares with which the busiest
lane is done first are a linear program's, and what is missing where nothing fits is another's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.linear_program import SLACK, Expression, Variables, least, value
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.workload import PARAM_BYTES, STATE_BYTES, UPDATE_BYTES, Workload, Workloads
from patrickstar.errors import BudgetError

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sequences per process that are tried."""

_KEPT, _RESIDENT, _ON_HOST, _STREAMED, _LEFT, _IN_RAM, _ON_DISK, _PAGED, _LONGEST, _MORE = range(10)
_OF = Variables(10)

PAGED_READ_BYTES, PAGED_WRITE_BYTES = 2 * PARAM_BYTES, PARAM_BYTES
"""Of a parameter that lies on disk: read for forward and for backward, written when it was updated."""


@dataclass(frozen=True)
class Shares:
    """Which part of a process's model data lies where, and is updated where (each from 0 to 1)."""

    kept: float
    """Of the parameters: those that stay on the device from forward to backward, and to the next forward."""
    resident: float
    """Those whose whole state lives on the device, and which are updated there."""
    on_host: float
    """Those updated on the host; the rest have their state streamed to the device for their update."""
    in_ram: float
    """Of the state that is not on the device: what lies in the host's memory, the rest on disk."""
    paged: float
    """Of the parameters: those that lie on disk, too."""


@dataclass(frozen=True)
class SimulatedChannel:
    """What one resource does in a step."""

    name: str
    seconds: float
    amount: float
    """Bytes, or operations."""


@dataclass(frozen=True)
class Estimate:
    """A step of all processes."""

    workload: Workload
    processes: int
    shares: Shares
    channels: tuple[SimulatedChannel, ...]
    fill_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def bound_s(self) -> float:
        """The busiest lane. No other shares have one that is done sooner."""
        return max(lane.seconds for lane in self.channels)

    @property
    def seconds(self) -> float:
        """What a step takes."""
        return self.bound_s + self.fill_s

    @property
    def tflops(self) -> float:
        """Of one process, 10^12 operations per second."""
        return self.workload.operations / self.seconds / 1e12

    @property
    def free_tokens(self) -> int:
        """Tokens per process and step from which on moving model data costs no time: computing takes as long."""
        compute = next(lane for lane in self.channels if lane.name == "compute")
        others = max(lane.seconds for lane in self.channels if lane is not compute)
        return math.ceil(self.workload.tokens * others / compute.seconds) if compute.seconds else 0


class Room(Enum):
    """What a model may need more of."""

    DEVICE = "device memory"
    HOST = "host memory"
    DISK = "disk"


def estimate(work: Workload, machine: Machine, processes: int = 1) -> Estimate:
    """The fastest step of `processes` on a machine, each with an equal part of the model data.

    Raises BudgetError, with the smallest changes that help, where the model fits with no shares.
    """
    busy = _channels(work, machine, processes)
    used = _used(work, processes)
    within = [*_conditions(used, machine), *(seconds - _OF[_LONGEST] for _, seconds, _ in busy)]
    fastest = least(_OF[_LONGEST], within, _WHOLE)
    if fastest is None:
        raise _does_not_fit(work, machine, processes)
    # Of what is equally fast, the least movement: it wears no disk and leaves room for what was not foreseen.
    longest = _OF[_LONGEST] - _OF.one * fastest[_LONGEST] * (1 + SLACK)
    at = least(np.sum([seconds for _, seconds, _ in busy], axis=0), [*within, longest], _WHOLE)
    at = fastest if at is None else at
    found = tuple(SimulatedChannel(name, value(seconds, at), value(amount, at)) for name, seconds, amount in busy)
    below = at[_IN_RAM] + at[_ON_DISK]
    return Estimate(
        work,
        processes,
        Shares(
            float(at[_KEPT]),
            float(at[_RESIDENT]),
            float(at[_ON_HOST]),
            float(at[_IN_RAM] / below) if below > SLACK else 1.0,
            float(at[_PAGED]),
        ),
        found,
        work.fill_share * max(lane.seconds for lane in found if lane.name != "compute"),
        *(math.floor(value(used[room], at)) for room in Room),
    )


def least_moved_bytes(work: Workload, machine: Machine, processes: int = 1) -> tuple[int, int]:
    """The fewest bytes that any step of one process moves between host and device, and the fewest to and from disk.

    Each by itself, and as if non-model data took nothing: at most moments it takes less than at its peak, and a plan
    may use that. Lookups on the host aside, no plan has less of either. Raises BudgetError where the model fits with
    no shares.
    """
    work = replace(work, non_model_bytes=0, working_bytes=0)
    amounts = {name: amount for name, _, amount in _channels(work, machine, processes)}
    within = _conditions(_used(work, processes), machine)
    found = []
    for pair in (("host to device", "device to host"), ("disk read", "disk write")):
        moved = np.sum([amounts.get(name, 0 * _OF.one) for name in pair], axis=0)
        at = least(moved / 1e9, within, _WHOLE)
        if at is None:
            raise _does_not_fit(work, machine, processes)
        found.append(math.ceil(value(moved, at)))
    return found[0], found[1]


def least_more(work: Workload, machine: Machine, processes: int, room: Room) -> int | None:
    """Bytes of one kind of room that a model needs beside what a machine has; None where no amount helps."""
    used = _used(work, processes)
    used[room] = used[room] - _OF[_MORE] * 1e9
    at = least(_OF[_MORE], _conditions(used, machine), _WHOLE)
    return None if at is None else math.ceil(at[_MORE] * 1e9 * (1 + SLACK)) + 1


def best_estimate(
    work_of: Workloads,
    machine: Machine,
    processes: int,
    checkpointing: Sequence[bool] = (True, False),
    batches: Sequence[int] = BATCHES,
) -> Estimate:
    """The step with the most tokens a second over batches that fit, with activations kept or computed again.

    Of equals, the smallest. Raises the BudgetError of the smallest batch where none fits.
    """
    found: list[Estimate] = []
    refused: BudgetError | None = None
    for again in checkpointing:
        for batch in sorted(batches):
            try:
                found.append(estimate(work_of(batch, again), machine, processes))
            except BudgetError as error:
                refused = refused or error
                break  # larger ones need more
    if not found:
        assert refused is not None, "no batch was given"
        raise refused

    def merit(one: Estimate) -> tuple[float, int, bool]:
        speed = one.workload.tokens / one.seconds
        return float(f"{speed:.4g}"), -one.workload.tokens, not one.workload.checkpointing

    return max(found, key=merit)


def fits(work: Workload, machine: Machine, processes: int) -> bool:
    """Whether there are shares with which nothing is over its budget."""
    return least(_OF.one, _conditions(_used(work, processes), machine), _WHOLE) is not None


def largest_batch(
    work_of: Workloads, machine: Machine, processes: int, checkpointing: bool, below: int = 1 << 20
) -> int:
    """The most sequences per process that fit; 0 where one alone does not."""

    def possible(batch: int) -> bool:
        return fits(work_of(batch, checkpointing), machine, processes)

    if not possible(1):
        return 0
    most, too_many = 1, 2
    while too_many < below and possible(too_many):
        most, too_many = too_many, 2 * too_many
    too_many = min(too_many, below)
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if possible(middle) else (most, middle)
    return most


_WHOLE = [
    _OF[_RESIDENT] + _OF[_ON_HOST] + _OF[_STREAMED] - _OF.one,
    _OF[_RESIDENT] + _OF[_IN_RAM] + _OF[_ON_DISK] - _OF.one,
]
"""Every parameter is updated somewhere, and every state lies somewhere."""


def _used(work: Workload, processes: int) -> dict[Room, Expression]:
    """Bytes that one process takes of its device, and all of the host and its disk."""
    part, whole = work.params / processes, float(work.params)
    below = _OF.one - _OF[_KEPT] - _OF[_RESIDENT] - _OF[_PAGED]
    return {
        Room.DEVICE: _OF.one * (work.non_model_bytes + work.working_bytes)
        + part * (PARAM_BYTES * _OF[_KEPT] + (PARAM_BYTES + STATE_BYTES) * _OF[_RESIDENT]),
        Room.HOST: whole * (PARAM_BYTES * below + STATE_BYTES * _OF[_IN_RAM]),
        Room.DISK: whole * (STATE_BYTES * _OF[_ON_DISK] + PARAM_BYTES * _OF[_PAGED]),
    }


def _conditions(used: dict[Room, Expression], machine: Machine) -> list[Expression]:
    disk_bytes = machine.disk.capacity if machine.disk is not None else 0
    if machine.gpu is not None:
        in_memory = [
            used[Room.DEVICE] - _OF.one * machine.gpu.memory,
            used[Room.HOST] - _OF.one * machine.host.memory,
        ]
    else:  # one memory for both tiers
        in_memory = [used[Room.DEVICE] + used[Room.HOST] - _OF.one * machine.host.memory]
    # What stays on the device lies nowhere else.
    above = _OF[_KEPT] + _OF[_RESIDENT] + _OF[_PAGED] - _OF.one
    # Of what is updated on the device, all that does not stay there comes again for the next forward.
    left = _OF[_STREAMED] - _OF[_KEPT] - _OF[_LEFT]
    return [*in_memory, used[Room.DISK] - _OF.one * disk_bytes, above, left]


def _channels(work: Workload, machine: Machine, processes: int) -> list[tuple[str, Expression, Expression]]:
    """Each resource with the seconds it is busy and what it moves, for one process; what is shared counts all."""
    part = work.params / processes
    below = _OF.one - _OF[_KEPT] - _OF[_RESIDENT]
    disk, rate = machine.disk, machine.matmul_rate(work.matrix_size)
    down = part * (PARAM_BYTES * _OF[_ON_HOST] + STATE_BYTES * _OF[_STREAMED])
    up = down + part * PARAM_BYTES * (below + _OF[_LEFT])
    read = part * (STATE_BYTES * _OF[_ON_DISK] + PAGED_READ_BYTES * _OF[_PAGED])
    written = part * (STATE_BYTES * _OF[_ON_DISK] + PAGED_WRITE_BYTES * _OF[_PAGED])
    updated = UPDATE_BYTES * _OF[_ON_HOST] + 2 * STATE_BYTES * _OF[_STREAMED]
    above = part * UPDATE_BYTES * (_OF[_RESIDENT] + _OF[_STREAMED])
    ram = part * (updated + PARAM_BYTES * below) + read + written
    compute = _OF.one * (work.operations / rate)
    if machine.gpu is not None:
        compute = compute + above / machine.gpu.memory_bandwidth
    else:
        ram = ram + above
    h2d, d2h = machine.crossing_rates(processes)
    memory = machine.host.update_bandwidth(processes, max(1, machine.host.cores // processes))
    channels = [
        ("compute", compute, _OF.one * work.operations),
        ("host to device", up / h2d, up),
        ("device to host", down / d2h, down),
        ("host memory", ram * processes / memory, ram),
    ]
    if disk is not None:
        channels.append(("disk read", read * processes / disk.read, read))
        channels.append(("disk write", written * processes / disk.write, written))
    if processes > 1:
        assert machine.links is not None and machine.links.gpu_gpu is not None
        # Two gathers of parameters and a scatter of gradients (PatrickStar §7: 6(p-1)/p bytes per parameter).
        sent = _OF.one * (3 * PARAM_BYTES * (processes - 1) / processes * work.params)
        channels.append(("between GPUs", sent / machine.links.gpu_gpu, sent))
    return channels


def _does_not_fit(work: Workload, machine: Machine, processes: int) -> BudgetError:
    rooms = Room if machine.gpu is not None else (Room.HOST, Room.DISK)
    needs = {room: least_more(work, machine, processes, room) for room in rooms}
    ways = [f"{format_size(nbytes)} more {room.value}" for room, nbytes in needs.items() if nbytes is not None]
    memory = machine.device_memory
    if work.non_model_bytes + work.working_bytes > memory:
        what = (
            f"the device's {format_size(memory)} don't hold {format_size(work.non_model_bytes)} of non-model data "
            f"beside {format_size(work.working_bytes)} of parameters that are needed at once"
        )
        ways = [
            *(["a smaller batch"] if work.batch > 1 else []),
            *([] if work.checkpointing else ["activation checkpointing"]),
            *ways,
        ]
    else:
        total = format_size((PARAM_BYTES + STATE_BYTES) * work.params)
        devices = f"{processes} devices" if processes > 1 else "the device"
        what = f"the model data of {total} has no room on {devices}, the host and its disk"
    short = min((nbytes for nbytes in needs.values() if nbytes is not None), default=None)
    return BudgetError(f"{what}. What helps: {', or '.join(ways) or 'more of device and host memory both'}", short)
