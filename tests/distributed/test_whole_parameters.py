"""Several processes and optimizers that need whole parameters, have states of one byte, or count in param groups."""

import random
from functools import partial

import pytest
import torch.distributed as dist
from laws.test_optimizer_classes import CountsInGroup
from laws.test_whole_parameters import OPTIMIZERS, Model
from laws.tiers import inputs
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from toys import train

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.errors import ConfigError

from . import ranks
from .test_exactness import CPU, compare

CASES = OPTIMIZERS | {
    "AdamW, 8-bit": ps.AdamW8bit(lr=1e-2, weight_decay=0.1),
    "counts": ps.TorchOptimizer(kind=CountsInGroup, options={"lr": 0.1}),
}


@pytest.mark.parametrize("size, seeds", [(2, ranks.seeds(12)), (4, ranks.seeds(6))])
@ranks.in_processes()
def test_bits_of_plain_pytorch(size, seeds):
    """Train with matrices that are larger than a chunk, and that are not."""
    for seed in seeds:
        draw = random.Random(seed)
        name = sorted(CASES)[seed % len(CASES)]
        config = ps.Config(
            device="cpu",
            precision=draw.choice(["bf16", "fp32"]),
            chunk_size=draw.choice([1000, 9000, 40_000, "auto"]),
            optimizer=CASES[name],
        )
        loop = draw.choice([{}, {"max_norm": 0.1}, {"accumulation": 2}])
        print(f"seed {seed}: {name}, {config!r}, {loop}", flush=True)
        batches = [tuple(tensor * (1 + dist.get_rank()) for tensor in batch) for batch in inputs(4)]
        compare(Model, config, partial(train, data=batches, **loop), seed, evict_everything=draw.random() < 0.5)


@ranks.in_processes(2)
def test_matrices_have_one_owner_each_and_are_shared_out_evenly():
    world = World(CPU)
    config = ps.Config(device="cpu", chunk_size=1000, optimizer=ps.Muon())
    engine = ps.Engine(Model, config, world=world, meter=ps.testing.NoMeter())
    own = {param.name: param.numel for param in engine.inspect().parameters}
    matrices = {name: param.numel() for name, param in engine.module.named_parameters() if name != "head.weight"}
    matrices = {name: numel for name, numel in matrices.items() if numel > 1000}
    assert all(own[name] in (0, numel) for name, numel in matrices.items()), own
    share = sum(own[name] for name in matrices) / sum(matrices.values())
    assert 0.4 < share < 0.6, f"rank {world.rank} owns {share} of the matrices"
    engine.close()


@ranks.in_processes(2)
def test_matrices_that_a_mesh_shards_are_refused_by_name():
    mesh = ranks.mesh(dp=1, tp=2)
    model = nn.ModuleDict({"layer": parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())})
    muon = ps.Muon(param_groups=lambda model: [{"params": list(model.parameters())[:1], "use_muon": True}])
    with pytest.raises(ConfigError, match=r"Muon updates whole parameters, and processes hold parts of 'layer.weight'"):
        ps.initialize(model, ps.Config(device="cpu", optimizer=muon), mesh=mesh["dp"])
