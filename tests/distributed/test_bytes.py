"""Exact bytes of communication and of the model data of each process: replicas, groups, and DTensor models."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.models import Waves
from probes import after_allocations, manager_of, shards_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from toys import Shape, inputs, layers, mean_square, train, update

import patrickstar as ps
from patrickstar._distributed import gloo_collectives
from patrickstar._distributed.param_sharding import ParamSharding
from patrickstar._distributed.process_group import World
from patrickstar._engine import distribution

from . import ranks
from .test_exactness import CPU, compare, mesh_of, random_script

WIDTH = 32
SLOW = pytest.mark.slow
SIZES = [(2, 1), pytest.param(2, 2, marks=SLOW), (4, 1), (4, 2), (4, 4)]
"""Numbers of processes and of replicas."""


@pytest.mark.pairwise
@pytest.mark.parametrize("size, replicas", SIZES)
@pytest.mark.parametrize("gathers", [1, 2])
@pytest.mark.parametrize("reduce_dtype", ["16-bit", "fp32"])
@ranks.in_processes()
def test_a_step_sends_the_bytes_of_the_table(size, replicas, gathers, reduce_dtype):
    """Count the bytes of steps with one or two gathers each, in chunks and on the wire."""
    world, count = World(CPU), 16 * WIDTH * WIDTH
    shards = size // replicas
    mesh = None if size == 2 and replicas == 1 else ranks.mesh(dp_replicate=replicas, dp_shard=shards)
    group = 2 * WIDTH * WIDTH * size
    config = ps.Config(
        device="cpu",
        chunk_size=2 * WIDTH * WIDTH,
        device_memory=None if gathers == 1 else 2 * group + 64,
        reduce_dtype=reduce_dtype,
    )
    build = partial(layers, WIDTH, 16, nn.Tanh, bias=False)
    engine = ps.Engine(build, config, meter=ps.testing.NoMeter(), poison=True, world=world, mesh=mesh)
    model_data_bytes = 14 * count // size + (2 * count // shards if replicas > 1 else 0)
    assert engine.layout.model_data_bytes == model_data_bytes
    assert engine.layout.padding_bytes == 0
    assert engine.layout.chunk_count == 16 // size
    assert engine.layout.chunks[0].compute_bytes == group
    peak_bytes = 0

    def record_peak(chunk):
        nonlocal peak_bytes
        held = engine.inspect()
        peak_bytes = max(peak_bytes, held.device.chunk_bytes + held.host.chunk_bytes)

    after_allocations(engine, record_peak)
    prefetches, manager = [], manager_of(engine)
    start_fetch = manager.transfers.start_fetch

    def fetch_and_record(chunk, urgent):
        prefetches.append(not urgent)
        start_fetch(chunk, urgent)

    manager.transfers.start_fetch = fetch_and_record
    for _ in range(3):
        prefetches.clear()
        sent = record_sends(world)
        loss = mean_square(engine(torch.randn(4, WIDTH)))
        if gathers == 2:
            for chunk in manager.param16.values():
                if chunk.device.present:
                    manager.drop(chunk)
            shards_of(engine).update_param_views()
        update(engine, loss)
    last = engine.stats.last
    assert len(prefetches) == engine.layout.chunk_count * gathers
    assert sum(prefetches) >= engine.layout.chunk_count - 2, "the trace says which chunks to gather early"
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


@pytest.mark.parametrize(
    "size, replicas", [(2, 1), (4, 2), *(pytest.param(*each, marks=SLOW) for each in [(4, 1), (2, 2)])]
)
@pytest.mark.parametrize("seeds", [ranks.seeds(3)])
@ranks.in_processes()
def test_chunks_are_gathered_one_by_one_if_a_group_does_not_fit(size, replicas, seeds):
    shape = Shape(("mlp", "plain", "mlp"))
    for seed in seeds:
        world = World(CPU)
        config = ps.Config(device="cpu", precision="fp32", chunk_size=1000, device_memory=2 * world.size * 1000 - 200)
        script = random_script(random.Random(seed), seed)
        torch.manual_seed(0)
        engine = ps.Engine(shape.build, config, meter=ps.testing.NoMeter(), world=world, mesh=mesh_of(replicas))
        owners = [
            {rank for rank in range(world.size) if c.shard_bounds[rank] < c.shard_bounds[rank + 1]}
            for c in engine.layout.chunks
        ]
        assert owners == [{index % world.size} for index in range(len(owners))]
        assert max(chunk.compute_bytes for chunk in engine.layout.chunks) <= 1024
        engine.close(keep=False)
        compare(shape.build, config, script, seed, replicas)


@ranks.in_processes(2)
def test_groups_with_a_pytorch_that_orders_processes():
    """Make groups where PyTorch has no parameter for their order."""
    new_group = dist.new_group

    def older(ranks=None, timeout=None, backend=None):
        return new_group(ranks, timeout, backend)

    dist.new_group = older
    world = World(CPU)
    assert world.group(((0, 1),)).size == 2
    with pytest.raises(ps.errors.ConfigError, match=r"processes \[1, 0\].*PyTorch 2.12 or newer"):
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
        engine = ps.Engine(build, config, meter=ps.testing.NoMeter(), world=world, mesh=mesh)
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


LAYERS = 4
CHUNK_BYTES = 2 * WIDTH * WIDTH


class Layer(nn.Module):
    """Matrix that all processes have, and one that DTensors divide by rows, without padding in chunks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        whole = torch.randn(2 * WIDTH, WIDTH) / WIDTH
        self.divided = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        local = self.divided.to_local()
        hidden = hidden + (hidden @ self.plain.t()) @ self.plain
        return hidden + (hidden @ local.t()) @ local


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(mesh) for _ in range(LAYERS)))


@pytest.mark.parametrize("tp", [2, 1])
@ranks.in_processes(4)
def test_a_step_holds_and_sends_the_bytes_of_the_formula(tp):
    """`tp`: 2 for tensor parallelism, 1 for experts."""
    grid = ranks.mesh(dp=4 // tp, tp=tp)
    divided_over = grid["tp"] if tp > 1 else ranks.mesh(ep=4)
    plain, own = LAYERS * 2 * WIDTH * WIDTH, LAYERS * 2 * WIDTH * WIDTH // divided_over.size()
    shares = 2 if tp == 2 else 1  # processes that hold the same part of a divided matrix
    # A group of chunks is one matrix, or the process's part of several.
    config = ps.Config(device="cpu", precision="bf16", chunk_size=CHUNK_BYTES)
    limit_bytes = 1 << 30
    for gathers, meter in ((1, ps.testing.NoMeter()), (2, Waves(0))):
        engine = ps.Engine(lambda: build(divided_over), config, meter=meter, world=World(CPU), mesh=grid["dp"])
        batches = engine.data_size
        assert engine.layout.model_data_bytes == 14 * plain // batches + 14 * own // shares
        assert engine.layout.padding_bytes == 0
        train(engine, inputs(4, WIDTH))
        last = engine.stats.last
        sent = 2 * plain * (batches - 1) // batches + 2 * own * (shares - 1) // shares
        assert last.reduced_bytes == sent, (last, sent)
        # The last layers of forward are the first of backward, so that some stay.
        assert sent <= last.gathered_bytes <= gathers * sent, (last, sent)
        assert last.device_peak_model_bytes <= limit_bytes
        limit_bytes = 2 * max(chunk.compute_bytes for chunk in engine.layout.chunks)
        config = config.model_copy(update={"device_memory": limit_bytes})
        engine.close(keep=False)
