"""Data-parallel processes of a device mesh: which batch each process computes, and its replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patrickstar._distributed.collectives import Levels
from patrickstar._distributed.process_group import Processes, RankGroup, World
from patrickstar._layout.shard_group import ShardGroup
from patrickstar.errors import ConfigError

PIPELINE = ("pp", "pipeline")
"""Usual names of the dimension of a mesh that divides layers."""


@dataclass(frozen=True)
class DataMesh:
    """Processes that compute distinct batches of one step.

    Attributes:
        partition: Ranks of each data-parallel group, in the order of their batches. With tensor parallelism there are
            several groups, which compute the same batches.
        batch_of: Number of the batch of each process, by rank.
        replicas: Number of replicas (nodes) that the processes of a group form; 1 without a second mesh dimension.
    """

    partition: tuple[tuple[int, ...], ...]
    batch_of: tuple[int, ...]
    replicas: int = 1

    @classmethod
    def of(cls, world: Processes, mesh: Any) -> "DataMesh":
        """Read a `DeviceMesh`, by default all processes; return a `DataMesh` as it is. All processes must call this.

        Raises:
            ConfigError: The mesh has no or more than two dimensions, or does not divide all processes evenly.
        """
        if isinstance(mesh, DataMesh):
            return mesh
        rows = world.all_gather_object(_ranks(mesh))
        if mesh is None and all(row is None for row in rows):
            return cls((tuple(range(world.size)),), tuple(range(world.size)))
        for rank, row in enumerate(rows):
            if row is None or rank not in row["ranks"]:
                held = "no mesh" if row is None else f"one of processes {', '.join(map(str, row['ranks']))}"
                raise ConfigError(
                    f"rank {rank} passed {held} to ps.initialize: each process has to pass the data-parallel "
                    f"dimensions of one mesh of all {world.size} processes, mesh[...], which contain itself"
                )
        for rank, row in enumerate(rows):
            if any(rows[other] != row for other in row["ranks"]):
                raise ConfigError(
                    f"processes {', '.join(map(str, row['ranks']))} are one data-parallel group for rank {rank}, but "
                    f"not for all of its members: all have to create the mesh with the same sizes and names"
                )
        partition = tuple(dict.fromkeys(tuple(row["ranks"]) for row in rows))
        if len({(len(row["ranks"]), row["replicas"]) for row in rows}) != 1:
            sizes = "; ".join(f"{row['ranks']} in {row['replicas']} replicas" for row in rows)
            raise ConfigError(f"data-parallel groups differ in their numbers of processes or replicas: {sizes}")
        batch_of = tuple(row["ranks"].index(rank) for rank, row in enumerate(rows))
        return cls(partition, batch_of, rows[0]["replicas"])

    @property
    def size(self) -> int:
        """Number of distinct batches of a step."""
        return len(self.partition[0])

    def group(self, world: World) -> RankGroup:
        """Return the data-parallel group of this process."""
        return world.group(self.partition)

    @property
    def shard_size(self) -> int:
        """Number of processes of one replica."""
        return self.size // self.replicas

    def levels(self, world: World) -> Levels | None:
        """Return this process's shard and replicate groups, None without replicas. All processes must call this."""
        if self.replicas == 1:
            return None
        size = self.shard_size
        shard = tuple(ranks[first : first + size] for ranks in self.partition for first in range(0, self.size, size))
        replicate = tuple(ranks[shard::size] for ranks in self.partition for shard in range(size))
        return Levels(world.group(shard), world.group(replicate))

    def share(self, rank: int, partition: Sequence[Sequence[int]]) -> ShardGroup:
        """Return a process's group in a partition of all processes, whose members share chunks.

        In a data-parallel group of replicas, members of one replicate group follow each other. Other groups, such as
        those of experts, are not divided into replicas.
        """
        groups = {frozenset(ranks): ranks for ranks in self.partition}
        if self.replicas == 1 or not all(frozenset(ranks) in groups for ranks in partition):
            return ShardGroup.of(rank, partition)
        size = self.shard_size
        ordered = [
            [member for shard in range(size) for member in groups[frozenset(ranks)][shard::size]] for ranks in partition
        ]
        return ShardGroup.of(rank, ordered, self.replicas)


SINGLE_BATCH = DataMesh(((0,),), (0,))
"""The mesh of a single process."""


def _ranks(mesh: Any) -> dict[str, Any] | None:
    if mesh is None:
        return None
    root = mesh._get_root_mesh()
    for name, size in zip(root.mesh_dim_names or (), root.mesh.shape, strict=False):
        if name in PIPELINE and size > 1:
            raise ConfigError(
                f"the mesh has the pipeline dimension {name!r} of size {size}: processes with different layers can't "
                f"share chunks; use its processes for data or tensor parallelism"
            )
    dims = mesh.mesh.dim()
    if dims not in (1, 2):
        raise ConfigError(
            f"mesh has {dims} dimensions; pass its data-parallel ones: one that shards, or (replicate, shard), as in "
            f"mesh['dp_replicate', 'dp_shard']"
        )
    return {"ranks": mesh.mesh.flatten().tolist(), "replicas": mesh.mesh.shape[0] if dims == 2 else 1}
