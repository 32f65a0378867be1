"""Two levels of transport, in meshes with replicas: exact results, and bytes inside and between replicas."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import after_allocations, manager_of, model_data_of
from torch import nn
from toys import layers, mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed import gloo_collectives
from patrickstar._distributed.param_sharding import ParamSharding
from patrickstar._distributed.process_group import World
from patrickstar._engine import distribution
from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError

from . import ranks
from .test_bytes import one_owner
from .test_checkpoints import resume, save_and_go_on
from .test_exactness import CPU, any_budget, branches, everything_evicted
from .test_habits import gradients, saving
from .test_loops import SCRIPTS, from_disk, scripts

MESHES = [(4, 2), (4, 4), (2, 2)]
"""Numbers of processes and of replicas."""


def in_small_pieces(**options: Any) -> None:
    """Train with reductions of many pieces; runs in each process."""
    gloo_collectives.PAGE_BYTES = 2048
    everything_evicted(**options)


FUNCTIONS = [everything_evicted, in_small_pieces, any_budget, branches]


@pytest.mark.parametrize(
    "function, size, replicas",
    [(everything_evicted, 4, 2), (any_budget, 4, 4), (in_small_pieces, 2, 2), (branches, 2, 2)],
)
def test_exact(function, size, replicas):
    ranks.run(size, function, seeds=ranks.seeds(24 // size, 300), replicas=replicas)


@ranks.joined
def with_an_older_new_group() -> None:
    """Make groups where PyTorch has no parameter for their order; runs in each process."""
    new_group = dist.new_group

    def older(ranks=None, timeout=None, backend=None):
        return new_group(ranks, timeout, backend)

    dist.new_group = older
    world = World(CPU)
    assert world.group(((0, 1),)).size == 2
    with pytest.raises(ConfigError, match=r"processes \[1, 0\].*PyTorch 2.12 or newer"):
        world.group(((1, 0),))


def test_groups_with_a_pytorch_that_orders_processes():
    ranks.run(2, with_an_older_new_group)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("size, replicas", MESHES)
def test_many_more_cases(function, size, replicas):
    ranks.run(size, function, seeds=list(range(10_000 * size, 10_000 * size + 30)), replicas=replicas)


@pytest.mark.parametrize("size, replicas", [pytest.param(4, 2, marks=pytest.mark.slow), (2, 2)])
def test_unusual_loops(size, replicas):
    ranks.run(size, scripts, names=list(SCRIPTS), replicas=replicas)


@pytest.mark.slow
def test_masters_and_states_on_disk(tmp_path):
    ranks.run(2, from_disk, seeds=ranks.seeds(2), folder=str(tmp_path), replicas=2, more_bytes=232_000)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_and_saving(precision, tmp_path):
    ranks.run(4, gradients, precision=precision, replicas=2)
    ranks.run(4, saving, precision=precision, folder=str(tmp_path), replicas=2)


@pytest.mark.parametrize("size, replicas", [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_chunks_of_one_owner(size, replicas):
    ranks.run(size, one_owner, seeds=ranks.seeds(3), replicas=replicas)


@pytest.mark.slow
def test_checkpoints_cross_meshes(tmp_path):
    seeds = ranks.seeds(3, 1)
    ranks.run(4, save_and_go_on, folder=str(tmp_path), seeds=seeds, replicas=2)
    ranks.run(4, resume, folder=str(tmp_path), seeds=seeds, same=True, replicas=2)
    for size, replicas in [(4, 1), (1, 1), (4, 4), (2, 2)]:  # each loads what the one before has saved
        ranks.run(size, resume, folder=str(tmp_path), seeds=seeds, same=False, replicas=replicas)
        for seed in seeds:
            (tmp_path / str(seed)).rename(tmp_path / f"loaded-{size}-{replicas}-{seed}")
            (tmp_path / f"again-{seed}").rename(tmp_path / str(seed))


WIDTH = 32


@ranks.joined
def count_bytes(replicas: int, gathers: int, reduce_dtype: str) -> None:
    """Count the bytes of steps with one or two gathers each, in chunks and on the wire; runs in each process."""
    world = World(CPU)
    size, count = world.size, 16 * WIDTH * WIDTH
    shards = size // replicas
    mesh = ranks.mesh(dp_replicate=replicas, dp_shard=shards)
    group = 2 * WIDTH * WIDTH * size
    config = ps.Config(
        device="cpu",
        chunk_size=2 * WIDTH * WIDTH,
        device_memory=None if gathers == 1 else 2 * group + 64,
        reduce_dtype=reduce_dtype,
    )
    build = partial(layers, WIDTH, 16, nn.Tanh, bias=False)
    engine = Engine(build, config, meter=testing.NoMeter(), poison=True, world=world, mesh=mesh)
    manager, data = manager_of(engine), model_data_of(engine)
    model_data_bytes = 14 * count // size + (2 * count // shards if replicas > 1 else 0)
    assert engine.layout.model_data_bytes == model_data_bytes
    assert engine.layout.padding_bytes == 0
    peak_bytes = 0

    def record_peak(chunk):
        nonlocal peak_bytes
        held = engine.inspect()
        peak_bytes = max(peak_bytes, held.device.chunk_bytes + held.host.chunk_bytes)

    after_allocations(engine, record_peak)
    for _ in range(3):
        sent = record_sends(world)
        loss = mean_square(engine(torch.randn(4, WIDTH)))
        if gathers == 2:
            for chunk in manager.param16.values():
                if chunk.device_resident:
                    manager.drop(chunk)
            data.update_param_views()
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    last = engine.stats.last
    itemsize = 2 if reduce_dtype == "16-bit" else 4
    gathered, reduced = last.inter_replica_gathered_bytes, last.inter_replica_reduced_bytes
    assert gathered == 2 * count * (replicas - 1) // size
    assert reduced == 4 * count * (replicas - 1) // size
    assert last.gathered_bytes - gathered == 2 * count * gathers * (shards - 1) // shards
    assert last.reduced_bytes - reduced == itemsize * count * (shards - 1) // shards
    if reduce_dtype == "16-bit":  # the table of docs/distributed.md
        inside = last.gathered_bytes + last.reduced_bytes - gathered - reduced
        assert inside == 2 * count * (gathers + 1) * (shards - 1) // shards
        assert gathered + reduced == 6 * count * (replicas - 1) // size
    own = world.rank // shards
    assert last.gathered_bytes + last.reduced_bytes == sum(sent.values())
    assert gathered + reduced == sum(nbytes for rank, nbytes in sent.items() if rank // shards != own)
    if gathers == 2 and reduce_dtype == "16-bit":
        assert peak_bytes <= model_data_bytes + 2 * group, (peak_bytes, model_data_bytes, group)
    engine.close()


def record_sends(world: World) -> Counter[int]:
    """Count the bytes of chunks that this process sends from now on, by receiver."""
    sent: Counter[int] = Counter()

    class Recorded:
        """`torch.distributed` with a send that counts."""

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        @staticmethod
        def isend(tensor: torch.Tensor, group_dst: int, group: dist.ProcessGroup) -> Any:
            sent[dist.get_global_rank(group, group_dst)] += tensor.nbytes
            return dist.isend(tensor, group_dst=group_dst, group=group)

    def gather_into(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        for rank in dist.get_process_group_ranks(group):
            if rank != world.rank:
                sent[rank] += part.nbytes
        gather(whole, part, group)

    gather = getattr(gloo_collectives.gather_into, "inner", gloo_collectives.gather_into)
    gather_into.inner = gather
    gloo_collectives.gather_into, gloo_collectives.dist = gather_into, Recorded()
    return sent


@pytest.mark.pairwise
@pytest.mark.parametrize("size, replicas", [pytest.param(2, 2, marks=pytest.mark.slow), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("gathers", [1, 2])
@pytest.mark.parametrize("reduce_dtype", ["16-bit", "fp32"])
def test_a_step_sends_the_bytes_of_the_table(size, replicas, gathers, reduce_dtype):
    ranks.run(size, count_bytes, replicas=replicas, gathers=gathers, reduce_dtype=reduce_dtype)


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


@ranks.joined
def experts(groups: list[list[int]]) -> None:
    """Train with a parameter that groups within the data-parallel one share; runs in each process."""
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
        for step in range(2):
            inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + world.rank))
            engine.backward(mean_square(engine(inputs)))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
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


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_parameters_of_smaller_groups_keep_flat_transport(groups):
    ranks.run(4, experts, groups=groups)
