"""Gains of a plan by more memory, a drive, packed pages, GPUs, split masters or late updates; life of its drive."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._layout.packed_page import CODEC_RATE, packed_bytes
from patrickstar._perf_model.machine_parts import NVME_READ, NVME_WRITE, rate_through_host
from patrickstar._perf_model.machine_spec import DiskDrive, Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import Estimate, estimate
from patrickstar.errors import BudgetError

BestEstimate = Callable[[Machine, Mesh], Estimate | None]
"""Returns the best estimate of a model on a machine and a mesh, None if it does not fit."""

MORE_MEMORY = 32 * 10**9
SPLITTING = "update=ps.InBackward(), without clipping"
NEW_DRIVE = DiskDrive(capacity=2 * 10**12, read=NVME_READ, write=NVME_WRITE)
ENDURANCE = 600
"""Bytes that a usual NVMe drive may be written over its life, by its capacity: 600 TB for 1 TB, as data sheets say."""


@dataclass(frozen=True)
class Upgrade:
    """Change of a machine, and the best estimate with it; None if the model does not fit with it either."""

    name: str
    estimate: Estimate | None

    def gain(self, best: Estimate) -> float:
        """Return the gain in tokens per second over an estimate of the machine as it is, relative to that."""
        assert self.estimate is not None, "the model does not fit"
        return self.estimate.tokens_per_s / best.tokens_per_s - 1


def upgrades(machine: Machine, mesh: Mesh, best: BestEstimate, splitting: BestEstimate) -> list[Upgrade]:
    """Return what each next part would bring.

    Args:
        splitting: Returns the best estimate with split masters ([Note: split masters]).
    """
    found = [Upgrade(name, best(changed, wider)) for name, changed, wider in _changes(machine, mesh)]
    if machine.precision == "bf16" and mesh.processes == 1:
        found.append(Upgrade(SPLITTING, splitting(machine, mesh)))
    return found


def _changes(machine: Machine, mesh: Mesh) -> Iterator[tuple[str, Machine, Mesh]]:
    host = machine.host.model_copy(update={"memory": machine.host.memory + MORE_MEMORY})
    each = " in each node" if mesh.nodes > 1 else ""
    yield f"32 GB more host memory{each}", machine.model_copy(update={"host": host}), mesh
    disk = machine.disk
    if disk is None:
        yield f"a drive of 2 TB{each}", machine.model_copy(update={"disk": NEW_DRIVE}), mesh
    else:
        twice = DiskDrive(capacity=2 * disk.capacity, read=2 * disk.read, write=2 * disk.write)
        yield f"a second drive{each}", machine.model_copy(update={"disk": twice}), mesh
        # Beside computation on the same cores packing takes more time than it saves.
        if machine.gpu is not None:
            yield "packed pages", machine.model_copy(update={"disk": _packed(disk, machine.host.cores)}), mesh
    gpu, links = machine.gpu, machine.links
    if gpu is not None and links is not None and mesh.gpus == gpu.count and mesh.ep == mesh.tp == 1:
        more = gpu.model_copy(update={"count": 2 * gpu.count})
        name = "a second GPU" if gpu.count == 1 else f"{2 * gpu.count} GPUs"
        through_host = rate_through_host(links.d2h, machine.host.memory_bandwidth, more.count)
        wired = links if links.gpu_gpu is not None else links.model_copy(update={"gpu_gpu": through_host})
        yield (
            f"{name}{each}",
            machine.model_copy(update={"gpu": more, "links": wired}),
            replace(mesh, gpus=2 * mesh.gpus),
        )


def _packed(disk: DiskDrive, cores: int) -> DiskDrive:
    """Return a drive with the rates of unpacked bytes that it has with packed pages, whose places are as large."""
    share = packed_bytes(PAGE_BYTES // 4) / PAGE_BYTES
    each_way = cores * CODEC_RATE / 2
    rates = {"read": min(disk.read / share, each_way), "write": min(disk.write / share, each_way)}
    return disk.model_copy(update=rates)


def lock_free(machine: Machine, best: Estimate) -> Estimate | None:
    """Return the estimate with lock-free updates, for one process; None if they do not fit or would gain nothing."""
    if best.processes > 1 or not best.busiest.name.startswith("disk"):
        return None
    try:
        work = replace(best.workload, splits_masters=machine.precision == "bf16")
        return estimate(work, machine, best.mesh, lock_free=True)
    except BudgetError:
        return None


def drive_days(machine: Machine, best: Estimate, step_s: float) -> float | None:
    """Return the days after which the drives of a node, with steps of `step_s`, have been written to their limit."""
    tokens = drive_tokens(machine, best)
    return None if tokens is None else tokens / (best.mesh.batches * best.workload.tokens) * step_s / 86400


def drive_tokens(machine: Machine, best: Estimate) -> float | None:
    """Return the tokens after which the drives of the nodes have been written to their limit; None if none is."""
    written = drive_bytes(best)
    if machine.disk is None or not written:
        return None
    return ENDURANCE * machine.disk.capacity / written * best.mesh.batches * best.workload.tokens


def drive_bytes(best: Estimate) -> int:
    """Return the bytes that a step writes to the drive of a node."""
    return round(sum(load.amount for load in best.channels if load.name == "disk write") * best.mesh.gpus)
