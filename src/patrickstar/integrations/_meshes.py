"""Device meshes of data, tensor and expert parallelism, from their sizes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from patrickstar.errors import ConfigError

# [Note: ranks of a mesh]
# Dense parameters see the processes as (replica, data shard, tensor), experts as (copy of the experts, expert), both
# with the last dimension consecutive in rank. So a tensor group and an expert group are neighbours, and an expert group
# consists of whole tensor groups of one replica. Example: 8 processes, tp 2, ep 4:
#
#     rank              0  1    2  3    4  5    6  7
#     tensor groups     0  0    1  1    2  2    3  3      each holds one batch
#     expert groups     0  0    0  0    1  1    1  1      each holds all experts, a quarter of them per process


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the parallel dimensions of a run.

    Args:
        world: Number of processes.
        tp: Processes that share one batch and hold slices of the dense layers.
        ep: Processes that together hold all experts. They include whole tensor groups, so `ep` is a multiple of `tp`.
        replicas: Replicas (nodes) between which only gradients and new parameters are exchanged.

    Raises:
        ConfigError: A size is not positive, or the processes can't be divided so.
    """

    world: int
    tp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "ep", "replicas"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"the mesh has {name}={value!r}; a size is a positive integer")
        if self.world % (self.replicas * self.tp):
            raise ConfigError(
                f"{self.world} processes can't be divided into replicas={self.replicas} times groups of tp={self.tp}: "
                f"start a multiple of {self.replicas * self.tp} processes, or change tp or replicas"
            )
        if self.ep > 1 and self.ep % self.tp:
            raise ConfigError(
                f"ep={self.ep} is not a multiple of tp={self.tp}: an expert group consists of whole tensor groups, "
                f"whose processes share one batch"
            )
        if self.world // self.replicas % self.ep:
            raise ConfigError(
                f"the {self.world // self.replicas} processes of a replica can't be divided into groups of ep={self.ep}"
            )

    @property
    def data(self) -> int:
        """Number of distinct batches per forward."""
        return self.world // self.tp

    @property
    def shards(self) -> int:
        """Number of distinct batches per forward in one replica."""
        return self.data // self.replicas

    def data_rank(self, rank: int) -> int:
        """Return the number of the batch that a process computes, below `data`."""
        return rank // self.tp

    def __str__(self) -> str:
        """Return a text such as "8 processes: 4 batches, tp 2, ep 4, 2 replicas"."""
        parts = [
            f"{self.data} {'batch' if self.data == 1 else 'batches'}",
            *([f"tp {self.tp}"] if self.tp > 1 else []),
            *([f"ep {self.ep}"] if self.ep > 1 else []),
            *([f"{self.replicas} replicas"] if self.replicas > 1 else []),
        ]
        return f"{self.world} {'process' if self.world == 1 else 'processes'}: {', '.join(parts)}"


class Meshes(NamedTuple):
    """Device meshes of a run.

    Attributes:
        data: Processes with distinct batches, for `patrickstar.initialize(mesh=...)`: 1-D (`dp_shard`), or 2-D
            (`dp_replicate`, `dp_shard`) if there are replicas.
        tp: 1-D mesh of the processes that share this process's batch; None if each has its own.
        ep: 1-D mesh of the processes that together hold all experts; None if each holds all.
        dense: Mesh with the dimensions of `data`, and `tp` if there is one.
    """

    data: DeviceMesh
    tp: DeviceMesh | None
    ep: DeviceMesh | None
    dense: DeviceMesh


def meshes(sizes: MeshSizes, device_type: str) -> Meshes:
    """Create the device meshes of a run. Every process must call this.

    Args:
        sizes: Sizes of the parallel dimensions; `sizes.world` is the number of all processes.
        device_type: Type of the compute device, "cuda" or "cpu".

    Returns:
        The meshes. See [Note: ranks of a mesh].

    Raises:
        ConfigError: torch.distributed is not initialized, or with another number of processes.
    """
    if not dist.is_initialized():
        raise ConfigError("the processes of a mesh have not joined: call patrickstar.join() before")
    if dist.get_world_size() != sizes.world:
        raise ConfigError(f"the mesh is for {sizes.world} processes, and {dist.get_world_size()} have joined")
    shape = {"dp_replicate": sizes.replicas, "dp_shard": sizes.shards, "tp": sizes.tp}
    dims = {name: size for name, size in shape.items() if size > 1 or name == "dp_shard"}
    dense = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    data = tuple(name for name in dims if name != "tp")
    experts = None
    if sizes.ep > 1:
        expert_dims = ("dp", "ep")
        experts = init_device_mesh(device_type, (sizes.world // sizes.ep, sizes.ep), mesh_dim_names=expert_dims)["ep"]
    return Meshes(dense[data], dense["tp"] if sizes.tp > 1 else None, experts, dense)
