"""A rank's shards of `param16` on disk: bits of the reference, within budgets that hold none of them."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.models import smallest_device_bytes
from laws.test_speculation import new_end_step, wait_for_reads
from probes import manager_of
from sampling import nightly
from toys import Shape, train

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar._layout.schema import SHARD16
from patrickstar._step.disk_speculation import DiskSpeculation
from patrickstar._step.staging_pool import PageSet
from patrickstar.errors import BudgetError

from . import ranks
from .test_exactness import CPU, compare, mesh_of, random_config

PAGE_BYTES = 4096
WIDTH = 32


def wide_shape(draw: random.Random) -> Shape:
    """Draw a model that exceeds the host's buffers."""
    blocks = tuple(draw.choice(["mlp", "attention", "plain"]) for _ in range(draw.randint(8, 14)))
    return Shape(blocks, draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.5, WIDTH)


def least_host_bytes(shape: Shape, config: ps.Config, replicas: int, world: World | None = None) -> int:
    """Return the smallest host budget of all processes of the machine, read from the error for one of a few bytes."""
    world, size = world or World(CPU), dist.get_world_size()
    small = config.model_copy(update={"host_memory": size})
    with pytest.raises(BudgetError) as error:
        ps.Engine(shape.build, small, world=world, mesh=mesh_of(replicas), page_bytes=PAGE_BYTES)
    assert error.value.short_bytes is not None
    return size * (1 + max(world.all_gather_object(error.value.short_bytes)))


@ranks.joined
def on_disk(seeds: list[int], folder: str, replicas: int = 1, speculates: bool = False) -> None:
    """Train random models with as little host memory as an engine accepts, and some more; runs in each process.

    Args:
        speculates: Update what is on disk before the step has decided, as often as possible.
    """
    found: list[int] = []
    if speculates:
        PageSet.ready, DiskSpeculation.end_step = property(wait_for_reads), new_end_step
    for seed in seeds:
        draw, own = random.Random(seed), random.Random(100 * seed + dist.get_rank())
        shape, config = wide_shape(draw), random_config(draw)
        size = dist.get_world_size()
        group = config.chunk_size if config.chunk_size == "auto" else config.chunk_size * size
        device = 2 * smallest_device_bytes(shape, group, config.precision) + 4096 * size + own.randint(0, 16000)
        config = config.model_copy(update={"device_memory": device, "disk": ps.Disk(folder)})
        least = least_host_bytes(shape, config, replicas)
        more = size * draw.choice([20_000, 50_000] if speculates else [0, 0, 3000, 20_000])
        config = config.model_copy(update={"host_memory": least + more})
        evict = draw.random() < 0.5
        print(f"seed {seed}: {shape}, {config!r}, evict {evict}", flush=True)
        data = [(torch.randint(0, 11, (2, 3 + own.randrange(4))),) for _ in range(6)]
        loop: dict[str, Any] = {
            # Memory may hold all but sums of gradients, which no check counts, so that there is no disk tier.
            "accumulation": min(draw.choice([1, 1, 2]), 1 if speculates and size > 2 else 2),
            "max_norm": draw.choice([None, 1e9 if speculates else 0.1]),
        }
        loop["update"] = speculates and config.precision != "fp16" and loop["max_norm"] is None

        def checked(trainer: Any, data: Any = data, loop: Any = loop) -> Any:
            seen = train(trainer, data, **loop)
            if isinstance(trainer, ps.Engine):
                manager = manager_of(trainer)
                shards = [chunk for (kind, _), chunk in manager.chunks.items() if kind == SHARD16 and chunk.numel]
                on_disk = sum(chunk.nbytes for chunk in shards if not chunk.in_memory)
                found.append(trainer.stats.total.speculation_hits if speculates else on_disk)
                host = manager.host_tier
                assert host.used + host.other_bytes <= host.budget_bytes
                assert host.arena_bytes <= host.budget_bytes
            return seen

        compare(shape.build, config, checked, seed, replicas, evict_everything=evict, page_bytes=PAGE_BYTES)
    assert any(found) if speculates else 2 * sum(map(bool, found)) >= len(found), (
        f"bytes of shards on disk, or confirmed early updates: {found}"
    )


@pytest.mark.parametrize(
    "size, replicas", [(2, 1), *(pytest.param(4, replicas, marks=pytest.mark.slow) for replicas in (1, 2))]
)
def test_bits_of_the_reference(size, replicas, tmp_path):
    ranks.run(size, on_disk, seeds=ranks.seeds(32 // size, size), folder=str(tmp_path), replicas=replicas)


@pytest.mark.parametrize("size, replicas", [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_early_updates_change_no_bit(size, replicas, tmp_path):
    seeds = ranks.seeds(32 // size, 301)[: None if nightly() else 1]
    ranks.run(size, on_disk, seeds=seeds, folder=str(tmp_path), replicas=replicas, speculates=True)
