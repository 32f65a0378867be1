"""Law 1 for several processes: the bits are those of plain PyTorch in each, averaged in the stated order."""

import random

import pytest
import torch
import torch.distributed as dist
from laws.models import Shape

import patrickstar as ps
from patrickstar import testing
from patrickstar.engine.engine import Engine
from patrickstar.parallel.world import World

from . import ranks
from .reference import AveragingTrainer, Loop


def random_shape(draw: random.Random) -> Shape:
    blocks = tuple(draw.choice(["mlp", "attention", "plain"]) for _ in range(draw.randint(1, 4)))
    return Shape(blocks, draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.5)


def batches(count: int, rank: int, seed: int):
    """Token ids of one process; each has its own, and lengths differ."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [(torch.randint(0, 11, (2, 3 + (seed + rank + k) % 4), generator=generator),) for k in range(count)]


def compare(world: World, build, config: ps.Config, script, *, seed: int, **options) -> None:
    """Run `script` over the reference and over an engine; all bits have to agree."""
    torch.manual_seed(seed)
    reference = AveragingTrainer(build, config)
    torch.manual_seed(100 * seed + world.rank)
    expected = script(reference)
    torch.manual_seed(seed)
    engine = Engine(build, config, poison=True, world=world, **options)
    torch.manual_seed(100 * seed + world.rank)
    found = script(engine)
    testing.assert_same_bits(expected, found, "what the script returned")
    testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters and buffers")
    testing._assert_same_states(reference.optimizer.state_dict(), engine.optimizer.state_dict())
    engine.close()
    testing.assert_same_bits(
        {name: value for name, value in reference.state_dict().items()},
        {name: value.detach() for name, value in engine.module.state_dict().items()},
        "what is left after closing",
    )


def everything_evicted(seeds: list[int]) -> None:
    """In each process, for random models."""
    dist.init_process_group("gloo")
    for seed in seeds:
        draw = random.Random(seed)
        shape, chunk_size = random_shape(draw), draw.choice([64, 256, 700, 4096, "auto"])
        precision, accumulation = draw.choice(["bf16", "fp16", "fp32"]), 1
        max_norm = draw.choice([None, 0.1])
        print(f"seed {seed}: {shape}, {chunk_size}, {precision}, clip {max_norm}", flush=True)
        config = ps.Config(
            device="cpu", precision=precision, chunk_size=chunk_size, optimizer=ps.AdamW(lr=1e-2, weight_decay=0.1)
        )
        world = World(torch.device("cpu"))
        data = batches(4, world.rank, seed)

        def script(trainer):
            return Loop(trainer).run(data, accumulation=accumulation, max_norm=max_norm)

        compare(world, shape.build, config, script, seed=seed, meter=testing.NoMeter(), evict_everything=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_everything_evicted_at_every_access(size):
    ranks.run(size, everything_evicted, seeds=list(range(6)))
