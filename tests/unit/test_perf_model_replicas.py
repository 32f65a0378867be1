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

    work_of = partial(shape_workload, gpt)
    for machine in (diskless, SERVER):
        chosen = with_smallest_replicas(work_of, machine, mesh, (True,), batch=1)
        assert chosen.replica_nodes > 1, "a copy of 2 TB does not fit in one node"
        for nodes in (1, 2, 4, 5, 10, 20):
            candidate = replace(mesh, replica_nodes=nodes)
            assert fits(work_of(1, True, candidate), diskless, candidate) is (nodes >= chosen.replica_nodes)
    small = PRESETS["gpt-1b"]
    found = with_smallest_replicas(partial(shape_workload, small), SERVER, mesh, (True,), 1)
    assert found == mesh
    tiny = diskless.model_copy(update={"host": SERVER.host.model_copy(update={"memory": 10**6})})
    assert with_smallest_replicas(work_of, tiny, mesh, (True,), 1) == mesh, "the error is that of the given mesh"
    on_disk = tiny.model_copy(update={"disk": SERVER.disk.model_copy(update={"capacity": 10**13})})
    chosen = with_smallest_replicas(work_of, on_disk, mesh, (True,), 1)
    assert fits(work_of(1, True, chosen), on_disk, chosen)
