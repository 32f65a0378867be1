"""Boxes of DTensors against the local tensors that PyTorch cuts."""

import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import patrickstar as ps
from patrickstar._distributed.param_sharding import mesh_shards
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine
from patrickstar._layout.local_boxes import local_boxes
from patrickstar._layout.shard_geometry import Box
from patrickstar.errors import ModelError

from . import ranks


def random_placement(draw: random.Random, dims: int) -> Placement:
    dim = draw.randrange(-dims, dims)
    return draw.choice(
        [Replicate(), Shard(dim), Shard(dim), _StridedShard(dim % dims, split_factor=draw.choice([2, 3]))]
    )


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(map(slice, box.offsets, box.ends))]


@ranks.joined
def compare_boxes(seed: int, count: int) -> None:
    """Distribute random tensors over random meshes; runs in each process."""
    draw = random.Random(seed)
    meshes = [ranks.mesh(a=4), ranks.mesh(a=2, b=2), ranks.mesh(a=1, b=4), ranks.mesh(a=2, b=1, c=2)]
    for _ in range(count):
        mesh = draw.choice(meshes)
        shape = [draw.randint(0, 9) for _ in range(draw.randint(1, 3))]
        placements = [random_placement(draw, len(shape)) for _ in range(mesh.ndim)]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        param = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local, pairs = param.to_local(), local_boxes(param.shape, mesh_shards(param))
        case = f"seed {seed}: {shape}, {placements} on {mesh}"
        assert [max(box.ends[dim] for box, _ in pairs) for dim in range(len(shape))] == list(local.shape), case
        found = torch.full_like(local, -1)
        for box, held in pairs:
            inside(found, box).copy_(inside(whole, held))
        assert torch.equal(found, local), case


@ranks.in_processes(2)
def test_dtensors_that_chunks_cannot_hold_are_refused():
    mesh = ranks.mesh(a=2)
    layer = nn.Linear(4, 4)
    part = torch.zeros(3, 4)
    whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=layer.weight.shape, stride=(4, 1))
    layer.weight = nn.Parameter(whole)
    with pytest.raises(ModelError, match=r"'weight' of shape \(4, 4\) has a local tensor of shape \(3, 4\).*\(2, 4\)"):
        Engine(layer, ps.Config(device="cpu"), world=World(torch.device("cpu")))
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    with pytest.raises(ModelError, match="buffer 'mask' is a DTensor"):
        Engine(layer, ps.Config(device="cpu"), world=World(torch.device("cpu")))


def test_boxes_of_random_dtensors():
    ranks.run(4, compare_boxes, seed=random.randrange(1 << 30), count=200)
