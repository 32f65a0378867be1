"""Law 1 for several processes: results are bit-identical to plain PyTorch with gradients averaged in rank order."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws import test_frozen_modules as frozen_modules
from laws.models import Waves, check_alignment, smallest_device_bytes
from probes import reduce_early
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from toys import Shape, train

import patrickstar as ps
from patrickstar._distributed import gloo_collectives
from patrickstar._distributed.process_group import World
from patrickstar._hardware.job_queue import Job
from patrickstar._hardware.worker_pool import WorkerPool

from . import ranks
from .reference import AveragingTrainer

CPU = torch.device("cpu")


def random_shape(draw: random.Random) -> Shape:
    blocks = tuple(draw.choice(["mlp", "attention", "plain"]) for _ in range(draw.randint(1, 4)))
    options = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.5
    return Shape(blocks, *options, tiled=draw.random() < 0.3)


def random_config(draw: random.Random, **options: Any) -> ps.Config:
    return ps.Config(
        device="cpu",
        precision=draw.choice(["bf16", "bf16", "fp16", "fp32"]),
        chunk_size=draw.choice([256, 1024, 2800, 16384, "auto"]),
        optimizer=ps.AdamW(lr=1e-2, weight_decay=0.1),
        reduce_dtype=draw.choice(["16-bit", "fp32"]),
        **options,
    )


def random_script(draw: random.Random, seed: int) -> Callable[[Any], list[torch.Tensor]]:
    """Draw a loop. The tokens and their number differ between processes."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    data = [(torch.randint(0, 11, (2, 3 + (seed + rank + k) % 4), generator=generator),) for k in range(4)]
    options = {"accumulation": draw.choice([1, 1, 2, 4]), "reduce_once": draw.random() < 0.5}
    max_norm = draw.choice([None, 0.1])
    return lambda trainer: train(trainer, data, max_norm=max_norm, **options)


def mesh_of(replicas: int) -> DeviceMesh | None:
    """Return a mesh of all processes with this many replicas, None for one."""
    if replicas == 1:
        return None
    shards = dist.get_world_size() // replicas
    return ranks.mesh(dp_replicate=replicas, dp_shard=shards)


def compare(
    build: Callable[[], nn.Module],
    config: ps.Config,
    script: Callable[[Any], Any],
    seed: int,
    replicas: int = 1,
    **more: Any,
) -> None:
    """Assert that a script has bit-identical results with the reference and with an engine; `more`: hooks."""
    hooks = {"poison": True, "meter": ps.testing.NoMeter(), "mesh": mesh_of(replicas)} | more
    world = hooks.pop("world", None) or World(CPU)
    torch.manual_seed(seed)
    reference = AveragingTrainer(build, config, replicas=replicas)
    torch.manual_seed(100 * seed + world.rank)
    expected = script(reference)
    torch.manual_seed(seed)
    engine = ps.Engine(build, config, world=world, **hooks)
    torch.manual_seed(100 * seed + world.rank)
    found = script(engine)
    check_alignment(engine)
    ps.testing.assert_same_bits(expected, found, "results of the script")
    ps.testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters and buffers")
    ps.testing._assert_same_states(reference.optimizer.state_dict(), engine.optimizer.state_dict())
    engine.close()
    state = {name: value.detach() for name, value in engine.module.state_dict().items()}
    ps.testing.assert_same_bits(reference.state_dict(), state, "parameters and buffers after closing")


@ranks.joined
def everything_evicted(seeds: list[int], replicas: int = 1) -> None:
    """Train random models; runs in each process."""
    for seed in seeds:
        draw = random.Random(seed)
        shape, config = random_shape(draw), random_config(draw)
        print(f"seed {seed}: {shape}, {config!r}", flush=True)
        compare(shape.build, config, random_script(draw, seed), seed, replicas, evict_everything=True)


def in_small_pieces(**options: Any) -> None:
    """Train with reductions of many pieces; runs in each process."""
    gloo_collectives.PAGE_BYTES = 2048
    everything_evicted(**options)


def with_late_collectives(**options: Any) -> None:
    """Train while each collective begins and ends late, when others may use its memory; runs in each process."""
    submit = WorkerPool.submit

    def submit_late(pool: WorkerPool, jobs: list[Job], label: str, **more: Any) -> Any:
        def late(job: Job, stage: torch.Tensor) -> None:
            time.sleep(0.002)
            job(stage)
            time.sleep(0.002)

        return submit(pool, [partial(late, job) for job in jobs] if len(jobs) == 1 else jobs, label, **more)

    WorkerPool.submit = submit_late  # type: ignore[method-assign]
    everything_evicted(**options)


@ranks.joined
def any_budget(seeds: list[int], replicas: int = 1) -> None:
    """Train under budgets that differ between processes, with varying non-model data; runs in each process."""
    size = dist.get_world_size()
    for seed in seeds:
        draw = random.Random(seed)
        shape, config = random_shape(draw), random_config(draw)
        script = random_script(draw, seed)
        own = random.Random(100 * seed + dist.get_rank())
        wave_bytes, spare_bytes = own.randint(0, 12000), own.randint(0, 16000)
        # A chunk group has as many chunks as there are processes.
        group = config.chunk_size if config.chunk_size == "auto" else config.chunk_size * size
        # An update with an accumulated gradient list needs one shard more than the check before training counts.
        least = smallest_device_bytes(shape, group, config.precision) + 2048 * size
        config = config.model_copy(update={"device_memory": 2 * least + spare_bytes + wave_bytes})
        print(f"seed {seed}: {shape}, {config!r}, waves of {wave_bytes}", flush=True)
        compare(shape.build, config, script, seed, replicas, meter=Waves(wave_bytes))


def train_short(data: list[Any], short: bool, accumulation: int, trainer: Any) -> list[torch.Tensor]:
    if isinstance(trainer, ps.Engine) and short:
        reduce_early(trainer)
    return train(trainer, data, accumulation=accumulation, reduce_once=True)


@pytest.mark.parametrize("seeds", [ranks.seeds(9)])
@ranks.in_processes(3)
def test_chunks_that_are_reduced_before_they_are_complete(seeds):
    """Train while incomplete chunks must leave the devices of some ranks."""
    for seed in seeds:
        draw = random.Random(seed)
        shape, config, rank = random_shape(draw), random_config(draw), dist.get_rank()
        print(f"seed {seed}: {shape}, {config!r}", flush=True)
        data = [(torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(rank)),)] * 6
        script = partial(train_short, data, (rank + seed) % 2 == 0, draw.choice([1, 3]))
        compare(shape.build, config, script, seed)


class Branches(nn.Module):
    """Model that uses the blocks in `path`, which differs between processes and may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, path: list[int]) -> torch.Tensor:
        hidden = self.words(ids)
        for number in path:
            hidden = hidden + self.blocks[number](hidden).tanh()
        return self.head(hidden).float().pow(2).mean()


@ranks.joined
def branches(seeds: list[int], replicas: int = 1) -> None:
    """Train with a different order of parameters, number of batches and forwards without gradients in each process.

    All processes drop gradients, write to parameters and step, but at different points of their loops.
    """
    for seed in seeds:
        draw, number = random.Random(seed), 100 * seed + dist.get_rank()
        config = random_config(draw)
        own = random.Random(number)
        evict = own.random() < 0.5
        once = draw.random() < 0.5  # all processes have as many backwards, and reduce in the last one
        print(f"seed {seed}: {config!r}, evict {evict}, once {once}", flush=True)

        def script(trainer: Any, own_seed: int = number, once: bool = once) -> list[torch.Tensor]:
            own, seen = random.Random(own_seed), []
            together = random.Random(own_seed // 100)
            for _ in range(5):
                for _ in range(own.choice([0, 0, 1])):
                    with torch.no_grad():
                        path = [own.randrange(5) for _ in range(own.randint(0, 3))]
                        seen.append(trainer(torch.arange(6).view(2, 3), path))
                backwards = together.choice([1, 2, 3]) if once else own.choice([0, 1, 1, 2])
                for number in range(backwards):
                    path = [own.randrange(5) for _ in range(own.randint(0, 6))]
                    loss = trainer(torch.tensor([[own.randrange(11) for _ in range(3)]]), path)
                    trainer.backward(loss, accumulate=not once or number < backwards - 1)
                    seen.append(loss.detach().clone())
                # All processes do this, at different points of their loops.
                if together.random() < 0.3:
                    trainer.optimizer.zero_grad()
                if together.random() < 0.3:
                    with torch.no_grad():
                        for param in trainer.module.parameters():
                            param.mul_(0.5)
                if together.random() < 0.8 or once:
                    trainer.optimizer.step()
                    trainer.optimizer.zero_grad()
            return seen

        compare(Branches, config, script, seed, replicas, evict_everything=evict)


def test_processes_that_all_wait_for_memory():
    """Each waits for the reduction of a chunk of which another has not all gradients yet."""
    ranks.run(3, branches, seeds=[30_024])


@ranks.in_processes(4)
def test_gradients_that_the_last_step_does_not_lead_to_expect():
    """Use a parameter on one rank that it did not use in the last step, after others in its chunk; on all ranks."""
    rank = dist.get_rank()
    paths = [[2, 3], [4, 3, 2]] if rank == 0 else [[2, 3, 4], [2, 3, 4]]
    data = [(torch.tensor([[rank, 4, step]]), path) for step, path in enumerate(paths * 3)]
    config = ps.Config(device="cpu", precision="fp32", chunk_size=1024, optimizer=ps.AdamW(lr=1e-2))
    compare(Branches, config, lambda trainer: train(trainer, data), 0)


SLOW = pytest.mark.slow
FUNCTIONS = [everything_evicted, in_small_pieces, with_late_collectives, any_budget, branches]


@pytest.mark.parametrize(
    "function, size, replicas",
    [
        (everything_evicted, 2, 1),
        (everything_evicted, 4, 2),
        (any_budget, 4, 1),
        (any_budget, 4, 4),
        (in_small_pieces, 2, 2),
        (with_late_collectives, 2, 1),
        (with_late_collectives, 4, 2),
        (branches, 4, 1),
        (branches, 2, 2),
        *(pytest.param(*case, 1, marks=SLOW) for case in [(everything_evicted, 4), (any_budget, 2), (branches, 2)]),
    ],
)
def test_bits_of_the_reference(function, size, replicas):
    ranks.run(size, function, seeds=ranks.seeds(24 // size, 100 * FUNCTIONS.index(function)), replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize("size, replicas", [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_more_cases(function, size, replicas):
    ranks.run(size, function, seeds=list(range(10_000 * size, 10_000 * size + 30)), replicas=replicas)


@pytest.mark.parametrize("seeds", [ranks.seeds(6)])
@ranks.in_processes(2)
def test_a_frozen_module(seeds):
    """Train towards a teacher's outputs: its shards are gathered for each forward, and change no bit."""
    for seed in seeds:
        draw = random.Random(seed)
        order, precision = draw.choice(["before", "between", "mixed"]), draw.choice(["bf16", "fp32"])
        config = ps.Config(device="cpu", precision=precision, chunk_size=draw.choice([1100, 4096, "auto"]))
        print(f"seed {seed}: {config!r}, {order}", flush=True)
        reference = AveragingTrainer(frozen_modules.build(3, seed), config)
        plain = ps.testing.ReferenceTrainer(frozen_modules.build(4, seed + 100).requires_grad_(False), config)
        expected = frozen_modules.distill(reference, torch.no_grad()(plain.__call__), order)
        options = {"meter": ps.testing.NoMeter(), "poison": True, "evict_everything": draw.random() < 0.5}
        frozen = {"teacher": frozen_modules.build(4, seed + 100)}
        engine = ps.Engine(frozen_modules.build(3, seed), config, world=World(CPU), frozen=frozen, **options)
        found = frozen_modules.distill(engine, partial(engine.call_frozen, "teacher"), order)
        ps.testing.assert_same_bits(expected, found, "losses, norms and outputs")
        ps.testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
        numel = sum(each.numel for each in engine.inspect().parameters if each.name.startswith("teacher."))
        assert numel < 0.8 * sum(param.numel() for param in frozen["teacher"].parameters()), "this rank's shards only"
        engine.close()
