"""Groups of processes in meshes with replicas: their order, and groups within the data-parallel one."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toys import inputs, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed.param_sharding import ParamSharding
from patrickstar._distributed.process_group import World
from patrickstar._engine import distribution
from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError

from . import ranks
from .test_exactness import CPU

WIDTH = 32


@ranks.in_processes(2)
def test_groups_with_a_pytorch_that_orders_processes():
    """Make groups where PyTorch has no parameter for their order."""
    new_group = dist.new_group

    def older(ranks=None, timeout=None, backend=None):
        return new_group(ranks, timeout, backend)

    dist.new_group = older
    world = World(CPU)
    assert world.group(((0, 1),)).size == 2
    with pytest.raises(ConfigError, match=r"processes \[1, 0\].*PyTorch 2.12 or newer"):
        world.group(((1, 0),))


class Experts(nn.Module):
    """Model with a parameter that only half of the processes hold, as experts."""

    def __init__(self, group: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(1 + group)
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(inputs).tanh())


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
@ranks.in_processes(4)
def test_parameters_of_smaller_groups_keep_flat_transport(groups):
    """Train with a parameter that groups within the data-parallel one share."""
    world, count = World(CPU), WIDTH * WIDTH
    shard_params = distribution.shard_params

    def share_expert(*args: Any) -> dict[str, ParamSharding]:
        shardings = shard_params(*args)
        group = args[1].share(world.rank, groups)
        assert group.replicas == 1, "only whole data-parallel groups are divided into replicas"
        return shardings | {"expert.weight": replace(shardings["expert.weight"], group=group)}

    distribution.shard_params = share_expert
    states = []
    for mesh in [ranks.mesh(dp_shard=4), ranks.mesh(dp_replicate=2, dp_shard=2)]:
        config = ps.Config(device="cpu", precision="fp32", chunk_size="1KiB", optimizer=ps.SGD(lr=0.25))
        build = partial(Experts, int(world.rank in groups[1]))
        engine = Engine(build, config, meter=testing.NoMeter(), world=world, mesh=mesh)
        train(engine, [inputs(1, WIDTH, seed=10 * step + world.rank)[0] for step in range(2)])
        states.append(engine.state_dict()["expert.weight"])
        last, two = engine.stats.last, mesh.ndim == 2
        same_replica = groups[0] == [0, 1]
        # The expert is shared by two processes; the dense layer by all four, in one or in two levels.
        elsewhere = 0 if same_replica or not two else 4 * count // 2
        dense = (4 * count // 2 + 4 * count // 4, 4 * count // 4) if two else (4 * count * 3 // 4, 0)
        for total, other in [
            (last.gathered_bytes, last.inter_replica_gathered_bytes),
            (last.reduced_bytes, last.inter_replica_reduced_bytes),
        ]:
            assert (total, other) == (4 * count // 2 + dense[0], elsewhere + dense[1])
        engine.close(keep=False)
        world = World(CPU)
    assert (states[0] - states[1]).abs().max() < 1e-6, "the expert's gradients are added alike"
