"""Data-parallel groups of a mesh, and the order in which their processes own shards."""

from types import SimpleNamespace

import pytest
import torch

from patrickstar._distributed.data_mesh import DataMesh
from patrickstar.errors import ConfigError


def mesh_of(ranks: list) -> SimpleNamespace:
    """Return the part of a `DeviceMesh` that is read."""
    mesh = SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=None, _get_root_mesh=lambda: mesh)
    return mesh


class World:
    """All processes, of which each passes one of `meshes`."""

    def __init__(self, *meshes: SimpleNamespace) -> None:
        self.size = len(meshes)
        self.rows = [
            {"ranks": mesh.mesh.flatten().tolist(), "replicas": mesh.mesh.shape[0] if mesh.mesh.dim() == 2 else 1}
            for mesh in meshes
        ]

    def all_gather_object(self, own: object) -> list:
        assert own in self.rows
        return self.rows


def read(*meshes: SimpleNamespace) -> DataMesh:
    return DataMesh.of(World(*meshes), meshes[0])


def test_owners_of_a_shard_follow_each_other():
    mesh = read(*[mesh_of([[0, 1, 2], [3, 4, 5]])] * 6)
    assert (mesh.size, mesh.replicas, mesh.shard_size) == (6, 2, 3)
    group = mesh.share(4, [range(6)])
    assert group.partition == ((0, 3, 1, 4, 2, 5),)
    assert (group.position, group.replicas, group.replicate_positions) == (3, 2, range(2, 4))


def test_tensor_parallel_processes_have_groups_of_their_own():
    first, second = mesh_of([[0, 2], [4, 6]]), mesh_of([[1, 3], [5, 7]])
    mesh = read(*[first, second] * 4)
    assert mesh.batch_of == (0, 0, 1, 1, 2, 2, 3, 3)
    group = mesh.share(5, mesh.partition)
    assert group.partition == ((0, 4, 2, 6), (1, 5, 3, 7))
    assert (group.number, group.position, group.replicas) == (1, 1, 2)


@pytest.mark.parametrize("partition", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))])
def test_smaller_groups_are_not_divided_into_replicas(partition):
    group = read(*[mesh_of([[0, 1], [2, 3]])] * 4).share(3, partition)
    assert (group.partition, group.replicas) == (partition, 1)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 1, 2, 3]]])
def test_one_replica_is_plain_sharding(ranks):
    group = read(*[mesh_of(ranks)] * 4).share(1, [range(4)])
    assert (group.partition, group.position, group.replicas) == (((0, 1, 2, 3),), 1, 1)


def test_groups_with_other_replicas_are_refused():
    with pytest.raises(ConfigError, match=r"\[0, 1\] in 2 replicas; \[0, 1\] in 2 replicas; \[2, 3\] in 1 replicas"):
        read(*[mesh_of([[0], [1]])] * 2, *[mesh_of([2, 3])] * 2)
