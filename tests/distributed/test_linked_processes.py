"""Processes that operators link: no wait for each other, whatever budgets, branches, experts and delays they have."""

import random
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from laws.models import Waves
from probes import equal_device_bytes
from sampling import nightly
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import patrickstar as ps
from patrickstar._distributed.process_group import World

from . import ranks

CPU = torch.device("cpu")
WIDTH, WORDS, EXPERTS = 16, 11, 4


class Experts(nn.Module):
    """One matrix per expert, shared out over a mesh; a token goes to the expert that its index names.

    Experts without a token run no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.mesh: DeviceMesh | None = None

    def share_out(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        assert self.mesh is not None
        order = chosen.argsort(stable=True)
        per_process = EXPERTS // self.mesh.size()
        sent = torch.bincount(chosen // per_process, minlength=self.mesh.size())
        group = self.mesh.get_group()
        counts = [torch.empty_like(sent) for _ in range(self.mesh.size())]
        dist.all_gather(counts, sent, group=group)
        received = [int(row[self.mesh.get_local_rank()]) for row in counts]
        there = all_to_all_single_autograd(tokens[order], received, sent.tolist(), group)
        names = torch.empty(sum(received), dtype=chosen.dtype)
        dist.all_to_all_single(names, chosen[order], received, sent.tolist(), group=group)
        weight, outputs = self.weight.to_local(), there * 0  # all processes take part in the exchanges of backward
        for number in range(per_process):
            mine = (names % per_process == number).nonzero()[:, 0]
            if len(mine):
                outputs = outputs.index_add(0, mine, there[mine] @ weight[number])
        back = all_to_all_single_autograd(outputs, sent.tolist(), received, group)
        return torch.zeros_like(tokens).index_add(0, order, back)


class Block(nn.Module):
    """Feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Branching(nn.Module):
    """Blocks, some of which a batch skips, and experts if there is a mesh for them."""

    def __init__(self, blocks: int, with_experts: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.experts = Experts() if with_experts else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, skipped: set[int], chosen: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for number, block in enumerate(self.blocks):
            if number not in skipped:
                hidden = block(hidden)
        if self.experts is not None:
            hidden = hidden + self.experts(hidden.flatten(0, 1), chosen).view_as(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def model(blocks: int, tp: DeviceMesh, experts: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(0)
    module = Branching(blocks, experts is not None)
    if module.experts is not None and experts is not None:
        module.experts.share_out(experts)
    if tp.size() > 1:
        for block in module.blocks:
            parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


Batch = tuple[torch.Tensor, set[int], torch.Tensor]


def data(draw: random.Random, shared: random.Random, blocks: int, branches: bool) -> Batch:
    """Draw a batch. `shared`: of all processes, for what has to be the same in them."""
    length = draw.randint(1, 4)
    ids = torch.tensor([[draw.randrange(WORDS) for _ in range(length)]])
    skipped = {number for number in range(blocks) if (draw if branches else shared).random() < 0.3}
    favourites = draw.sample(range(EXPERTS), draw.randint(1, EXPERTS))
    return ids, skipped, torch.tensor([draw.choice(favourites) for _ in range(length)])


def one_run(seed: int, sizes: list[tuple[int, int]], world: World) -> None:
    """Train two to four steps with random budgets, branches, experts and pauses."""
    draw = random.Random(seed)
    tp_size, ep_size = draw.choice(sizes)
    size = world.size
    mesh = ranks.mesh(dp=size // tp_size, tp=tp_size)
    experts = ranks.mesh(rest=size // ep_size, ep=ep_size)["ep"]
    blocks = draw.randint(2, 5)
    own = random.Random(1000 * seed + world.rank)
    wave_bytes = own.randint(0, 6000)
    config = ps.Config(
        device="cpu",
        precision="bf16",
        chunk_size=draw.choice([512, 1024, 2048]),
        device_memory=own.randint(40_000, 80_000) + wave_bytes,
        optimizer=ps.AdamW(lr=1e-2),
    )
    branches, accumulates = ep_size == 1, draw.random() < 0.3
    print(f"seed {seed}: tp {tp_size}, ep {ep_size}, {blocks} blocks, {config!r}, wave {wave_bytes}", flush=True)
    evicts = draw.random() < 0.3
    engine = ps.Engine(
        lambda: model(blocks, mesh["tp"], experts if ep_size > 1 else None),
        config,
        meter=Waves(wave_bytes),
        world=world,
        mesh=mesh["dp"],
        evict_everything=evicts,
        poison=True,
    )
    batches = random.Random(77 * seed + engine.data_rank)  # processes that share a batch draw the same
    for _ in range(draw.randint(2, 4)):
        for more in (True, False) if accumulates else (False,):
            if own.random() < 0.1:
                time.sleep(0.05)
            loss = engine(*data(batches, draw, blocks, branches))
            assert torch.isfinite(loss)
            engine.backward(loss, accumulate=more)
        if draw.random() < 0.5:
            engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if draw.random() < 0.3:
            with torch.no_grad():
                engine(*data(batches, draw, blocks, branches))
    engine.close()


@ranks.joined
def many_runs(seeds: list[int], sizes: list[tuple[int, int]], compared: bool) -> None:
    """Run all seeds; runs in each process.

    Args:
        compared: Compare with each measurement what the processes decide by; takes several times the time.
    """
    world = World(CPU)
    world.users += 1  # keeps the groups for the next engine
    with equal_device_bytes() if compared else nullcontext():
        for seed in seeds:
            one_run(seed, sizes, world)
    world.users -= 1
    world.close()


SIZES = [(2, 1), (1, 4), (1, 2), (2, 4), (2, 2)]


def test_no_process_waits_for_ever():
    ranks.run(4, many_runs, seeds=ranks.seeds(8), sizes=SIZES, compared=nightly())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 100))
def test_five_hundred_runs_without_a_deadlock(first):
    ranks.run(4, many_runs, 3600, seeds=list(range(first, first + 100)), sizes=SIZES, compared=first == 1000)


@ranks.in_processes(2)
def test_a_branch_in_one_of_two_linked_processes_is_an_error():
    mesh = ranks.mesh(dp=1, tp=2)
    config = ps.Config(device="cpu", precision="bf16", chunk_size=1024, device_memory=60_000)
    engine = ps.Engine(lambda: model(3, mesh["tp"], None), config, world=World(CPU), mesh=mesh["dp"])
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ps.errors.PeerError, match=r"are linked by operators|none can go on|closed its engine"):
        engine(ids, {0} if dist.get_rank() else set(), ids[0])
