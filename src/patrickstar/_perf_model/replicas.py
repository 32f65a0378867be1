"""Choice of the number of nodes per replica: each further replica costs a copy of the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh, one_divides_the_other
from patrickstar._perf_model.perf_model import fits
from patrickstar._perf_model.workload import Workloads


def with_smallest_replicas(
    workloads: Callable[[Mesh], Workloads], machine: Machine, mesh: Mesh, checkpointing: Sequence[bool], batch: int
) -> Mesh:
    """Return the mesh with the smallest replicas that fit in memory, or else with a disk; as it is if none fits.

    Args:
        workloads: Returns the workloads of one process of a mesh.
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
            if any(fits(workloads(candidate)(batch, recompute), tiers, candidate) for recompute in checkpointing):
                return candidate
    return mesh
