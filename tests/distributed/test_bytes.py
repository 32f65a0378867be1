"""Exact bytes of communication, and of the model data of each process."""

import random
from functools import partial

import pytest
import torch
from probes import after_allocations, manager_of, model_data_of
from torch import nn
from toys import Shape, layers, mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine

from . import ranks
from .test_exactness import CPU, compare, mesh_of, random_script

WIDTH = 32


def counters(fits: bool) -> None:
    """Count the bytes of steps; runs in each process."""
    world = World.find(CPU)
    size, count = world.size, 12 * WIDTH * WIDTH
    group = 2 * WIDTH * WIDTH * size
    config = ps.Config(device="cpu", chunk_size=2 * WIDTH * WIDTH, device_memory=None if fits else 2 * group + 64)
    engine = Engine(
        partial(layers, WIDTH, 12, nn.Tanh, bias=False), config, meter=testing.NoMeter(), poison=True, world=world
    )
    assert engine.layout.chunk_count == 12 // size
    assert engine.layout.model_data_bytes == 14 * count // size
    assert engine.layout.padding_bytes == 0
    assert engine.layout.chunks[0].compute_bytes == group
    peak_bytes = 0

    def record_peak(chunk):
        nonlocal peak_bytes
        held = engine.inspect()
        peak_bytes = max(peak_bytes, held.device.chunk_bytes + held.host.chunk_bytes)

    after_allocations(engine, record_peak)
    prefetches, transfers = [], manager_of(engine).transfers
    start_fetch = transfers.start_fetch

    def fetch_and_record(chunk, urgent):
        prefetches.append(not urgent)
        start_fetch(chunk, urgent)

    transfers.start_fetch = fetch_and_record
    for _ in range(3):
        prefetches.clear()
        loss = mean_square(engine(torch.randn(4, WIDTH)))
        if not fits:
            model_data_of(engine).drop_gathered()
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    last = engine.stats.last
    # In an all-gather, each process sends its shard to the others. In a reduce-scatter, it sends all but its shard.
    part = 2 * count * (size - 1) // size
    assert last.gathered_bytes == (1 if fits else 2) * part, (last, part)
    assert last.reduced_bytes == part
    assert last.gathered_bytes + last.reduced_bytes == (4 if fits else 6) * count * (size - 1) // size
    assert len(prefetches) == engine.layout.chunk_count * (1 if fits else 2)
    assert sum(prefetches) >= engine.layout.chunk_count - 2, "the trace says which chunks to gather early"
    if not fits:
        assert peak_bytes <= 14 * count // size + 2 * group, (peak_bytes, 14 * count // size, group)
    engine.close()


@pytest.mark.parametrize("size, fits", [(2, False), (2, True), (4, False), (4, True)])
def test_a_step_sends_the_bytes_of_the_formula(size, fits):
    ranks.run(size, counters, fits=fits)


@ranks.joined
def one_owner(seeds: list[int], replicas: int = 1) -> None:
    """Train with chunk groups larger than the device budget; runs in each process."""
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


@pytest.mark.parametrize("size", [2, 4])
def test_chunks_are_gathered_one_by_one_if_a_group_does_not_fit(size):
    ranks.run(size, one_owner, seeds=ranks.seeds(3))
