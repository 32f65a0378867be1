"""Sharding of parameters over processes by DTensors, and the processes that add their gradients."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patrickstar._distributed.data_mesh import DataMesh
from patrickstar._distributed.process_group import Processes
from patrickstar._layout.local_boxes import MeshShard, local_boxes, local_shape
from patrickstar._layout.process_partition import partition_processes
from patrickstar._layout.shard_geometry import Box
from patrickstar._layout.shard_group import ShardGroup
from patrickstar.errors import ModelError


@dataclass(frozen=True)
class ParamSharding:
    """Part of a parameter that this process holds.

    Attributes:
        group: Processes that add their gradients of this part, and share its chunks.
        owner_group: True if this group counts the part in norms and checkpoints: others may hold the same part.
        numel: Elements of the largest part.
        rank: Rank of this process.
        mixes_batches: True if operators exchange data of several batches over the DTensor's mesh: experts do.
        parts: Parts of all processes, by rank: boxes of the local tensor and of the global one. Empty if every process
            holds the whole parameter.
    """

    group: ShardGroup
    owner_group: bool
    numel: int
    rank: int
    mixes_batches: bool = False
    parts: tuple[tuple[tuple[Box, Box], ...], ...] = ()

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """Return this process's part of the parameter's whole value."""
        if not self.parts:
            return value
        own = self.parts[self.rank]
        sizes = [max(local.offsets[dim] + local.sizes[dim] for local, _ in own) for dim in range(value.dim())]
        part = value.new_empty(sizes)
        for local, held in own:
            part[_index(local)] = value[_index(held)]
        return part

    def assemble(self, part: torch.Tensor, out: torch.Tensor, world: Processes) -> None:
        """Gather the parts of all processes into `out`, the whole value; every process must call this."""
        seen = set()
        for rank, boxes in enumerate(self.parts):
            held = tuple(held for _, held in boxes)
            if held in seen:
                continue
            seen.add(held)
            for local, whole in boxes:
                if not whole.numel:
                    continue
                piece = part[_index(local)].contiguous() if rank == self.rank else part.new_empty(whole.sizes)
                world.broadcast(piece, rank)
                out[_index(whole)] = piece


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor. Does not import its package, half a second, for a model without any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(param: Any) -> torch.Tensor:
    """Return the tensor that this process holds of a parameter: the parameter itself, or a DTensor's local tensor."""
    local: torch.Tensor = param._local_tensor if is_dtensor(param) else param
    return local


def whole_value(tensor: Any) -> torch.Tensor:
    """Return a tensor, of a DTensor its whole value; for that, all processes of its mesh must call this together."""
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole


def check_parallelism(module: nn.Module) -> None:
    """Raise ModelError for a model under another kind of data parallelism, or with DTensors that chunks can't hold."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, child in module.named_modules():
        kind = None
        if isinstance(child, nn.parallel.DistributedDataParallel):
            kind = "DistributedDataParallel"
        elif fsdp is not None and isinstance(child, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
            kind = "FSDP"
        if kind is not None:
            raise ModelError(
                f"{f'module {name!r}' if name else 'the model'} is under {kind}, and the engine itself shards "
                f"parameters and averages gradients: pass the model without it"
            )
    for name, param in module.named_parameters():
        if is_dtensor(param):
            partial = [placement for placement in _placements(param) if placement.is_partial()]
            if partial:
                raise ModelError(
                    f"parameter {name!r} has placement {partial[0]}: its elements are sums over processes, which can't "
                    f"be updated one by one; redistribute it to Shard or Replicate"
                )
            found, expected = tuple(local_part(param).shape), local_shape(param.shape, mesh_shards(param))
            if found != expected:
                raise ModelError(
                    f"parameter {name!r} of shape {tuple(param.shape)} has a local tensor of shape {found} in this "
                    f"process, but its placements {list(_placements(param))} give {expected}; create it with "
                    f"distribute_tensor, or pass the shape of the whole tensor to DTensor.from_local"
                )
    for name, buffer in module.named_buffers():
        if is_dtensor(buffer):
            raise ModelError(
                f"buffer {name!r} is a DTensor, and the engine stores buffers whole in each process: register a plain "
                f"tensor, such as its full_tensor()"
            )


def _placements(param: Any) -> Any:
    return param.placements


def mesh_ranks(param: Any) -> list[int]:
    """Return the ranks of a DTensor's mesh."""
    ranks: list[int] = param.device_mesh.mesh.flatten().tolist()
    return ranks


def mesh_shards(param: Any) -> list[MeshShard]:
    """Return the shardings of a DTensor in the order of its mesh's dimensions."""
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
    return [
        MeshShard(placement.dim, size, own, int(getattr(placement, "split_factor", 1)))
        for placement, size, own in zip(_placements(param), mesh.mesh.shape, coordinate, strict=True)
        if not placement.is_replicate()
    ]


def shard_params(world: Processes, mesh: DataMesh, module: nn.Module) -> dict[str, ParamSharding]:
    """Return the sharding of each parameter. All processes must call this together.

    Raises:
        ModelError: Processes that hold one part of a parameter would miss or repeat a batch.
    """
    own = {}
    for name, param in module.named_parameters():
        if is_dtensor(param):
            boxes = [[(*b.offsets, *b.sizes) for b in pair] for pair in local_boxes(param.shape, mesh_shards(param))]
            own[name] = {"mesh": mesh_ranks(param), "boxes": boxes}
    rows = world.all_gather_object(own)
    whole = _partition(mesh, [()] * world.size, [[rank] for rank in range(world.size)])
    assert whole is not None, "every process computes one batch"
    shardings = {}
    for name, param in module.named_parameters():
        if not any(name in row for row in rows):
            shardings[name] = _sharding(world.rank, mesh, whole, [()] * world.size, local_part(param).numel())
            continue
        if not all(name in row for row in rows):
            plain = next(rank for rank, row in enumerate(rows) if name not in row)
            raise ModelError(f"parameter {name!r} is a DTensor in some processes, but not in rank {plain}")
        parts = tuple(
            tuple((_box(local, param.dim()), _box(held, param.dim())) for local, held in row[name]["boxes"])
            for row in rows
        )
        held = [tuple(box for _, box in part) for part in parts]
        partition = _partition(mesh, held, [row[name]["mesh"] for row in rows])
        if partition is None:
            raise ModelError(
                f"parameter {name!r}: the processes that hold one part of it do not compute each of the {mesh.size} "
                f"batches of a step once, so its gradient can't be averaged; the mesh of ps.initialize has to contain "
                f"the data-parallel dimensions, and no others"
            )
        largest = max(sum(box.numel for box in part) for part in held)
        mixes_batches = any(len({mesh.batch_of[rank] for rank in row[name]["mesh"]}) > 1 for row in rows)
        shardings[name] = _sharding(world.rank, mesh, partition, held, largest, mixes_batches, parts)
    return shardings


def linked_processes(world: Processes, module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Divide all processes into sets that are linked by collectives in the model's operators.

    All processes must call this together.
    """
    meshes = {tuple(mesh_ranks(param)) for param in module.parameters() if is_dtensor(param)}
    root = list(range(world.size))

    def find(rank: int) -> int:
        while root[rank] != rank:
            rank = root[rank]
        return rank

    for row in world.all_gather_object(sorted(meshes)):
        for ranks in row:
            lowest = min(find(rank) for rank in ranks)
            for rank in ranks:
                root[find(rank)] = lowest
    sets: dict[int, list[int]] = {}
    for rank in range(world.size):
        sets.setdefault(find(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in sets.values())


def _partition(mesh: DataMesh, held: Sequence[Any], meshes: Sequence[Sequence[int]]) -> Any:
    batches = [{mesh.batch_of[rank] for rank in ranks} for ranks in meshes]
    return partition_processes(held, batches, mesh.size)


def _sharding(
    rank: int,
    mesh: DataMesh,
    partition: tuple[tuple[int, ...], ...],
    held: Sequence[Any],
    numel: int,
    mixes_batches: bool = False,
    parts: Any = (),
) -> ParamSharding:
    group = mesh.share(rank, partition)
    first = next(number for number, ranks in enumerate(partition) if held[ranks[0]] == held[rank])
    return ParamSharding(group, first == group.number, numel, rank, mixes_batches, parts)


def _box(values: Sequence[int], dims: int) -> Box:
    return Box(tuple(values[:dims]), tuple(values[dims:]))
