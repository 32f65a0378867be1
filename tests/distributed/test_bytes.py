"""Exact bytes of communication, within and between replicas, and of the model data of each process."""

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import after_allocations, manager_of, model_data_of
from torch import nn
from toys import Shape, layers, mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed import gloo_collectives
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine

from . import ranks
from .test_exactness import CPU, compare, mesh_of, random_script

WIDTH = 32


SIZES = [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), (4, 1), (4, 2), (4, 4)]
"""Numbers of processes and of replicas."""


@pytest.mark.pairwise
@pytest.mark.parametrize("size, replicas", SIZES)
@pytest.mark.parametrize("gathers", [1, 2])
@pytest.mark.parametrize("reduce_dtype", ["16-bit", "fp32"])
@ranks.in_processes()
def test_a_step_sends_the_bytes_of_the_table(size, replicas, gathers, reduce_dtype):
    """Count the bytes of steps with one or two gathers each, in chunks and on the wire."""
    world, count = World(CPU), 16 * WIDTH * WIDTH
    shards, mesh = size // replicas, mesh_of(replicas)
    group = 2 * WIDTH * WIDTH * size
    config = ps.Config(
        device="cpu",
        chunk_size=2 * WIDTH * WIDTH,
        device_memory=None if gathers == 1 else 2 * group + 64,
        reduce_dtype=reduce_dtype,
    )
    build = partial(layers, WIDTH, 16, nn.Tanh, bias=False)
    engine = Engine(build, config, meter=testing.NoMeter(), poison=True, world=world, mesh=mesh)
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
                if chunk.device_resident:
                    manager.drop(chunk)
            model_data_of(engine).update_param_views()
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
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


@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 1), (4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [ranks.seeds(3)])
@ranks.in_processes()
def test_chunks_are_gathered_one_by_one_if_a_group_does_not_fit(size, replicas, seeds):
    mesh = mesh_of(replicas)
    shape = Shape(("mlp", "plain", "mlp"))
    for seed in seeds:
        world = World(CPU)
        config = ps.Config(device="cpu", precision="fp32", chunk_size=1000, device_memory=2 * world.size * 1000 - 200)
        script = random_script(random.Random(seed), world.rank, seed)
        torch.manual_seed(0)
        engine = Engine(shape.build, config, meter=testing.NoMeter(), world=world, mesh=mesh)
        owners = [
            {rank for rank in range(world.size) if c.shard_bounds[rank] < c.shard_bounds[rank + 1]}
            for c in engine.layout.chunks
        ]
        assert owners == [{index % world.size} for index in range(len(owners))]
        assert max(chunk.compute_bytes for chunk in engine.layout.chunks) <= 1024
        engine.close(keep=False)
        world = World(CPU)
        compare(world, shape.build, config, script, seed, replicas, mesh=mesh, meter=testing.NoMeter())
