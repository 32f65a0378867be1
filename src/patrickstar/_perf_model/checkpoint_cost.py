"""Size of a checkpoint, and the time to write and to read it."""

from dataclasses import dataclass

from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.workload import STATE_BYTES, Workload


@dataclass(frozen=True)
class CheckpointCost:
    """Cost of one checkpoint of all processes.

    Attributes:
        nbytes: Bytes of masters and optimizer states; a frozen base is left out (`engine.save(frozen=False)`).
        save_s: Seconds in which each node writes its part to its disk, or sends it to a storage.
        load_s: Seconds in which each node reads its part; a restart takes these, and the start of the processes.
    """

    nbytes: int
    save_s: float
    load_s: float


def checkpoint_cost(work: Workload, machine: Machine, mesh: Mesh) -> CheckpointCost | None:
    """Return the cost of a checkpoint on the nodes' disks, or over the network; None if there is neither."""
    nbytes = STATE_BYTES * work.trained_params
    if machine.disk is not None:
        write, read = machine.disk.write, machine.disk.read
    elif machine.network is not None:
        write = read = machine.network.bandwidth
    else:
        return None
    return CheckpointCost(nbytes, nbytes / mesh.nodes / write, nbytes / mesh.nodes / read)
