"""Meshes: groups partition the processes, and impossible sizes are refused."""

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._perf_model.mesh import DataParallelGroup, Mesh
from patrickstar.errors import ConfigError

given = fixed_draws(200)
powers = st.integers(0, 4).map(lambda power: 1 << power)


@st.composite
def meshes(draw):
    gpus, nodes = draw(powers), draw(powers)
    tp = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if gpus % size == 0]))
    sizes = [size for size in (2, 4, 8, 16, 32) if nodes * gpus % size == 0 and size % tp == 0]
    ep = draw(st.sampled_from([1, *sizes]))
    return Mesh(nodes, gpus, tp, ep, draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if nodes % size == 0])))


def members(mesh, rank):
    """Return the ranks that compute with the same experts as `rank`: equal positions in expert-parallel groups."""
    return [other for other in range(mesh.processes) if other % mesh.ep == rank % mesh.ep]


@given(meshes())
def test_groups_have_as_many_processes_as_share_the_parameters(mesh):
    assert mesh.dense.shards * mesh.dense.replicas == mesh.batches == mesh.processes // mesh.tp
    assert mesh.dense.replicas == mesh.nodes // mesh.replica_nodes and mesh.dense.nodes == mesh.replica_nodes
    if mesh.ep == 1:
        assert mesh.experts == mesh.dense
        return
    ranks = members(mesh, 0)
    nodes = [rank // mesh.gpus for rank in ranks]
    replicas = [node // mesh.replica_nodes for node in nodes]
    first = {node for node in nodes if node < mesh.replica_nodes}
    assert mesh.experts == DataParallelGroup(replicas.count(0), len(set(replicas)), len(first))
    assert mesh.expert_nodes == len({rank // mesh.gpus for rank in range(mesh.ep)})
    # Processes with the same tokens are not in one group, or their gradients would be added twice.
    assert len({rank // mesh.tp for rank in ranks}) == len(ranks)


def test_experts_over_all_processes_are_in_groups_of_one():
    mesh = Mesh(nodes=96, gpus=8, ep=768)
    assert mesh.experts == DataParallelGroup(1, 1) and mesh.expert_nodes == 96 and mesh.lockstep
    assert Mesh(nodes=96, gpus=8, tp=2, ep=8).dense == DataParallelGroup(4, 96)
    assert Mesh(nodes=96, gpus=8, replica_nodes=96).dense == DataParallelGroup(768, 1, 96)
    assert not Mesh(nodes=96, gpus=8).lockstep


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"nodes": 0}, "nodes=0, gpus=1, tp=1, ep=1, replica_nodes=1: each must be at least 1"),
        ({"nodes": 4, "replica_nodes": 3}, "replica_nodes=3 does not divide the 4 nodes"),
        ({"nodes": 6, "gpus": 8, "ep": 16, "replica_nodes": 3}, "ep=16, replicas of 24 processes: one must divide"),
        ({"gpus": 8, "tp": 3}, "tp=3 does not divide the 8 GPUs of a node; try tp=1, 2, 4 or 8"),
        ({"nodes": 2, "gpus": 4, "tp": 8}, "tp=8 does not divide the 4 GPUs of a node; try tp=1, 2 or 4"),
        ({"gpus": 4, "ep": 3}, "ep=3 does not divide the 4 processes; try ep=1, 2 or 4"),
        ({"nodes": 3, "gpus": 8, "ep": 12}, "ep=12 must divide the 8 GPUs of a node or be a multiple of them"),
        ({"gpus": 8, "tp": 4, "ep": 2}, "ep=2 must be a multiple of tp=4"),
    ],
)
def test_impossible_sizes_are_refused(sizes, says):
    with pytest.raises(ConfigError, match=says):
        Mesh(**sizes)
