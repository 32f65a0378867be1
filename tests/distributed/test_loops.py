"""Unusual loops of users with several processes: results are bit-identical to the reference."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import Shape, mean_square, train, update

import patrickstar as ps
from patrickstar._distributed.process_group import World

from . import ranks
from .reference import AveragingTrainer
from .test_exactness import CPU, compare


class Odd(nn.Module):
    """Tied weights, running statistics, dropout, unused, empty and wide parameters, reentrant checkpointing."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.words = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.dropout, self.wide = nn.Dropout(0.2), nn.Linear(8, 130)
        self.unused = nn.Parameter(torch.ones(7))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.words(ids).flatten(0, 1).float()).to(self.first.weight.dtype)
        body = lambda value: self.second(self.first(value).tanh()) + value  # noqa: E731
        hidden = checkpoint(body, hidden, use_reentrant=True) if self.reentrant else body(hidden)
        hidden = self.dropout(hidden)
        return mean_square(self.head(hidden)) + mean_square(self.wide(hidden))


def ids(trainer: Any, number: int = 0) -> torch.Tensor:
    rank = dist.get_rank()
    return torch.randint(0, 11, (2, 4 + rank), generator=torch.Generator().manual_seed(10 * number + rank))


def usual(trainer: Any) -> list[torch.Tensor]:
    return train(trainer, [(ids(trainer, number),) for number in range(3)])


def writes(trainer: Any) -> list[torch.Tensor]:
    """Write parameters in place between steps."""
    seen = []
    for number in range(3):
        with torch.no_grad():
            for param in trainer.module.parameters():
                param.mul_(0.5)
        seen += train(trainer, [(ids(trainer, number),)])
    return seen


def dropped(trainer: Any) -> list[torch.Tensor]:
    """Drop gradients in all processes; this changes nothing."""
    seen = usual(trainer)
    trainer.backward(trainer(ids(trainer, 7)), accumulate=True)
    trainer.optimizer.zero_grad()
    return seen + usual(trainer)


def twice(trainer: Any) -> list[torch.Tensor]:
    """Run two backwards through one graph."""
    loss = trainer(ids(trainer))
    trainer.backward(loss, retain_graph=True)
    update(trainer, loss)
    return usual(trainer)


def thaws(trainer: Any) -> list[torch.Tensor]:
    """Unfreeze parameters that were frozen from the start."""
    seen = usual(trainer)
    trainer.module.first.requires_grad_(True)
    return seen + usual(trainer)


def saves(trainer: Any) -> list[torch.Tensor]:
    """Copy the state, and load it later."""
    seen = usual(trainer)
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    seen += usual(trainer)
    trainer.load_state_dict(state)
    if isinstance(trainer, AveragingTrainer):
        trainer.follow_writes()
    return seen + usual(trainer)


def frozen_first() -> nn.Module:
    model = Odd()
    model.first.requires_grad_(False)
    return model


SCRIPTS = {
    "usual": (Odd, usual),
    "reentrant": (lambda: Odd(reentrant=True), usual),
    "writes": (Odd, writes),
    "dropped": (Odd, dropped),
    "twice": (Odd, twice),
    "thaws": (frozen_first, thaws),
    "saves": (Odd, saves),
}


@pytest.mark.parametrize(
    "size, replicas", [(2, 1), *(pytest.param(size, 2, marks=pytest.mark.slow) for size in (2, 4))]
)
@ranks.in_processes()
def test_unusual_loops(size, replicas):
    for seed, (name, (build, script)) in enumerate(SCRIPTS.items()):
        precision, evict = ("bf16", "fp32")[seed % 2], seed % 3 > 0
        print(name, precision, evict, flush=True)
        config = ps.Config(device="cpu", precision=precision, chunk_size=1200, optimizer=ps.AdamW(lr=1e-2))
        compare(build, config, script, seed, replicas, evict_everything=evict)


@ranks.in_processes(2)
def test_two_engines():
    """Train a student with a teacher whose chunks only one process evicts."""
    world = World(CPU)
    config = ps.Config(device="cpu", chunk_size=1200, optimizer=ps.AdamW(lr=1e-2))
    torch.manual_seed(1)
    plain_teacher = Odd().to(torch.bfloat16).eval()
    plain_teacher.norm.float()
    torch.manual_seed(1)
    teacher = ps.Engine(Odd, config, meter=ps.testing.NoMeter(), evict_everything=world.rank == 0, world=world).eval()

    def script(trainer: Any) -> list[torch.Tensor]:
        seen = []
        for number in range(3):
            tokens = ids(trainer, number)
            ours = isinstance(trainer, ps.Engine)
            with torch.no_grad():
                target = (teacher if ours else plain_teacher)(tokens)
            update(trainer, (trainer(tokens) - target).pow(2))
            seen.append(target)
        return seen

    compare(Odd, config, script, 0, world=world, evict_everything=world.rank == 1)
    assert not world.closed, "the teacher still uses the process group"
    if world.rank == 0:
        with torch.no_grad():
            teacher(ids(teacher))  # while the other process waits for it in `close`
    teacher.close()
    assert world.closed


@pytest.mark.parametrize("replicas, more_bytes", [(1, 0), pytest.param(2, 232_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [ranks.seeds(2)])
@ranks.in_processes(2)
def test_masters_and_states_on_disk(tmp_path, seeds, replicas, more_bytes):
    for seed in seeds:
        draw = random.Random(seed)
        shape = Shape(("mlp",) * 48, tied=draw.random() < 0.5, frozen_norms=False, checkpointing=draw.random() < 0.5)
        own = random.Random(10 * seed + dist.get_rank())
        config = ps.Config(
            device="cpu",
            precision="fp32",
            chunk_size=draw.choice([1000, 3000]),
            device_memory=own.randint(10_000, 20_000),
            host_memory=dist.get_world_size() * (own.randint(205_000, 225_000) + more_bytes),
            disk=ps.Disk(tmp_path),
        )
        print(f"seed {seed}: {shape}, {config!r}", flush=True)
        tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(own.randint(0, 99)))
        engines = []

        def script(trainer: Any, tokens: torch.Tensor = tokens, engines: list[Any] = engines) -> list[torch.Tensor]:
            seen = train(trainer, [(tokens,)] * 2, max_norm=0.1)
            if isinstance(trainer, ps.Engine):  # while updates are deferred
                assert all(trainer.gradient(name) is None for name, _ in trainer.module.named_parameters())
            seen += train(trainer, [(tokens,)], max_norm=0.1)
            if isinstance(trainer, ps.Engine):
                assert trainer.stats.total.disk_write_bytes > 0
                engines.append(trainer)
            return seen

        compare(shape.build, config, script, seed, replicas, page_bytes=4096)
        assert engines
