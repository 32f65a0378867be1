"""Replicas of a model on several nodes, as small as memory allows."""

from dataclasses import replace
from functools import partial

from patrickstar._models.presets import PRESETS
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import fits, with_smallest_replicas
from patrickstar._perf_model.workload import shape_workload

SERVER = find_machine("8xA100-40GB-11TB")


def test_replicas_are_the_smallest_that_fit_in_memory():
    gpt = Gpt(128, 25_600, heads=160, sequence=1024)
    diskless, mesh = SERVER.model_copy(update={"disk": None}), Mesh(nodes=20, gpus=8)

    def workloads(mesh):
        return lambda batch, recompute: shape_workload(gpt, batch, recompute, mesh)

    for machine in (diskless, SERVER):
        chosen = with_smallest_replicas(workloads, machine, mesh, (True,), batch=1)
        assert chosen.replica_nodes > 1, "a copy of 2 TB does not fit in one node"
        for nodes in (1, 2, 4, 5, 10, 20):
            candidate = replace(mesh, replica_nodes=nodes)
            assert fits(workloads(candidate)(1, True), diskless, candidate) is (nodes >= chosen.replica_nodes)
    small = PRESETS["gpt-1b"]
    found = with_smallest_replicas(lambda mesh: partial(shape_workload, small, mesh=mesh), SERVER, mesh, (True,), 1)
    assert found == mesh
    tiny = diskless.model_copy(update={"host": SERVER.host.model_copy(update={"memory": 10**6})})
    assert with_smallest_replicas(workloads, tiny, mesh, (True,), 1) == mesh, "the error is that of the given mesh"
    on_disk = tiny.model_copy(update={"disk": SERVER.disk.model_copy(update={"capacity": 10**13})})
    chosen = with_smallest_replicas(workloads, on_disk, mesh, (True,), 1)
    assert fits(workloads(chosen)(1, True), on_disk, chosen)
