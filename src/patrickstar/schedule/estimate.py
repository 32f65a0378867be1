"""How fast a step can be on a machine, with everything overlapped, and where model data should lie for that.

Bytes and operations follow from five shares of the model data; the best of them are found by trying all on a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patrickstar.errors import BudgetError
from patrickstar.layout.sizes import format_size
from patrickstar.schedule.gpt import SAVED_BYTES_PER_SCORE, Gpt
from patrickstar.schedule.machine import Machine

PARAM_BYTES = 2
"""Of a parameter in the dtype that operators compute in, and of its gradient, which takes its place."""
STATE_BYTES = 12
"""Of a parameter's master and two moments."""
UPDATE_BYTES = 2 * PARAM_BYTES + 2 * STATE_BYTES
"""What an update on the host reads and writes: gradient, parameter, states."""
GRID = 21
"""Shares that are tried of each kind: every twentieth."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sequences per process that are tried."""
FILL_LAYERS = 2
"""Layers whose movement nothing hides: the first to come and the last to go."""


@dataclass(frozen=True)
class Workload:
    """One step of one process, as far as an estimate needs to know it."""

    params: int
    layers: int
    tokens: int
    operations: float
    matrix_size: int
    """The smallest side of most matrix products: the larger, the faster they are."""
    non_model_bytes: int
    """The most non-model data on the device: activations kept for backward, and what operators take."""
    working_bytes: int
    """Parameters that have to be on the device at once: of two layers."""


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


@dataclass(frozen=True)
class Lane:
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
    lanes: tuple[Lane, ...]
    fill_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def bound_s(self) -> float:
        """The busiest lane: with these shares no step is faster."""
        return max(lane.seconds for lane in self.lanes)

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
        compute = next(lane for lane in self.lanes if lane.name == "compute")
        others = max(lane.seconds for lane in self.lanes if lane is not compute)
        return int(np.ceil(self.workload.tokens * others / compute.seconds)) if compute.seconds else 0


def estimate(work: Workload, machine: Machine, processes: int = 1) -> Estimate:
    """The fastest step of `processes` on a machine, each with an equal part of the model data.

    Raises BudgetError, with the smallest change that helps, where the model fits with no shares.
    """
    part = work.params / processes
    grid = np.linspace(0.0, 1.0, GRID)
    kept, resident, on_host, in_ram = np.meshgrid(grid, grid, grid, grid, indexing="ij")
    memory = machine.device_memory
    device = (
        work.non_model_bytes + work.working_bytes + part * (PARAM_BYTES * kept + (PARAM_BYTES + STATE_BYTES) * resident)
    )
    below = np.maximum(0.0, 1.0 - kept - resident)
    host = part * (PARAM_BYTES * (1.0 - resident) + STATE_BYTES * (1.0 - resident) * in_ram) * processes
    disk = part * STATE_BYTES * (1.0 - resident) * (1.0 - in_ram) * processes
    possible = (kept + resident <= 1.0 + 1e-9) & (resident + on_host <= 1.0 + 1e-9)
    disk_capacity = machine.disk.capacity if machine.disk is not None else 0
    fits = possible & (device <= memory) & (host <= machine.host.memory) & (disk <= disk_capacity)
    if machine.gpu is None:  # one memory for both tiers
        fits &= device + host <= memory
    if not fits.any():
        raise _does_not_fit(work, machine, processes)
    streamed = 1.0 - resident - on_host
    lanes = _lanes(work, machine, processes, (below, on_host, streamed, resident, in_ram))
    seconds = np.max([lane[1] for lane in lanes], axis=0)
    # Of what is equally fast, the least movement: it wears no disk and leaves room for what was not foreseen.
    moved = np.sum([lane[1] for lane in lanes], axis=0)
    best = np.lexsort((moved[fits], np.round(seconds[fits], 9)))[0]
    at = tuple(axis[best] for axis in np.nonzero(fits))
    found = tuple(Lane(name, float(time[at]), float(amount[at])) for name, time, amount in lanes)
    moving = [lane.seconds for lane in found if lane.name != "compute"]
    return Estimate(
        work,
        processes,
        Shares(float(kept[at]), float(resident[at]), float(on_host[at]), float(in_ram[at])),
        found,
        FILL_LAYERS / work.layers * max(moving),
        int(device[at]),
        int(host[at]),
        int(disk[at]),
    )


def work_of(gpt: Gpt, batch: int, checkpointing: bool = True) -> Workload:
    """A step of one process over `batch` sequences. Attention is fused: it keeps no scores."""
    tokens = batch * gpt.sequence
    layer = gpt.saved_bytes(batch) - SAVED_BYTES_PER_SCORE * gpt.score_numel(batch)
    kept = gpt.checkpoint_bytes(batch) + layer if checkpointing else gpt.layers * layer
    return Workload(
        params=gpt.numel,
        layers=gpt.layers,
        tokens=tokens,
        operations=gpt.operations(tokens, checkpointing),
        matrix_size=min(gpt.hidden, tokens),
        non_model_bytes=kept + gpt.logit_bytes(batch),
        working_bytes=2 * PARAM_BYTES * gpt.layer_numel,
    )


def best_estimate(
    gpt: Gpt, machine: Machine, processes: int, checkpointing: bool = True, batches: Sequence[int] = BATCHES
) -> Estimate:
    """The step with the most operations a second over batches that fit; of equals, the smallest.

    Raises the BudgetError of the smallest batch where none fits.
    """
    found: list[Estimate] = []
    refused: BudgetError | None = None
    for batch in batches:
        try:
            found.append(estimate(work_of(gpt, batch, checkpointing), machine, processes))
        except BudgetError as error:
            refused = refused or error
    if not found:
        assert refused is not None, "no batch was given"
        raise refused
    return max(found, key=lambda one: (round(one.tflops, 3), -one.workload.tokens))


Array = NDArray[np.float64]


def _lanes(
    work: Workload, machine: Machine, processes: int, shares: tuple[Array, Array, Array, Array, Array]
) -> list[tuple[str, Array, Array]]:
    """Each resource with the seconds it is busy and what it moves, for one process; what is shared counts all."""
    below, on_host, streamed, resident, in_ram = shares
    part = work.params / processes
    zero = np.zeros_like(below)
    gpu, disk = machine.gpu, machine.disk
    if gpu is not None:
        rate = gpu.matmul_rate(work.matrix_size)
    else:
        assert machine.host.matmul_tflops is not None
        rate = machine.host.matmul_tflops * 1e12
    up = part * (PARAM_BYTES * on_host + STATE_BYTES * streamed + PARAM_BYTES * below)
    down = part * (PARAM_BYTES * on_host + STATE_BYTES * streamed)
    paged = part * STATE_BYTES * (1.0 - resident) * (1.0 - in_ram)
    ram = part * (UPDATE_BYTES * on_host + 2 * STATE_BYTES * streamed + PARAM_BYTES * below) + 2 * paged
    h2d, d2h = machine.crossing_rates(processes)
    memory = machine.host.update_bandwidth(processes, max(1, machine.host.cores // processes))
    lanes = [
        ("compute", zero + work.operations / rate, zero + work.operations),
        ("host to device", up / h2d, up),
        ("device to host", down / d2h, down),
        ("host memory", ram * processes / memory, ram),
    ]
    if disk is not None:
        lanes.append(("disk read", paged * processes / disk.read, paged))
        lanes.append(("disk write", paged * processes / disk.write, paged))
    if processes > 1:
        assert machine.links is not None and machine.links.gpu_gpu is not None
        # Two gathers of parameters and a scatter of gradients (PatrickStar §7: 6(p-1)/p bytes per parameter).
        sent = zero + 3 * PARAM_BYTES * (processes - 1) / processes * work.params
        lanes.append(("between GPUs", sent / machine.links.gpu_gpu, sent))
    return lanes


def _does_not_fit(work: Workload, machine: Machine, processes: int) -> BudgetError:
    memory = machine.device_memory
    least = work.non_model_bytes + work.working_bytes
    if least > memory:
        short = least - memory
        return BudgetError(
            f"the device's {format_size(memory)} don't hold {format_size(work.non_model_bytes)} of non-model data "
            f"beside {format_size(work.working_bytes)} of parameters that are needed at once: a smaller batch, "
            f"activation checkpointing, or {format_size(short)} more device memory",
            short,
        )
    total = (PARAM_BYTES + STATE_BYTES) * work.params
    room = (memory - least) * processes + (machine.disk.capacity if machine.disk else 0)
    room += machine.host.memory if machine.gpu is not None else 0
    short = max(1, total - room)
    return BudgetError(
        f"the model data of {format_size(total)} is more than {format_size(room)}, which {processes} devices, the host "
        f"and its disk have for it: {format_size(short)} more host memory, or a disk of as many",
        short,
    )
