"""Meshes and models that are refused in all processes, and processes that end inside an operator's collective."""

import re
import signal
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import train

import patrickstar as ps
from patrickstar.errors import ConfigError, ModelError, PatrickStarError

from . import ranks

CONFIG = ps.Config(device="cpu", precision="fp32", chunk_size=512)


def pair(mesh=None) -> nn.Module:
    """Return two layers, which tensor parallelism cuts over the mesh, if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), relu=nn.ReLU(), down=nn.Linear(16, 8)))
    if mesh is not None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def refused(error: type[PatrickStarError], text: str, model: nn.Module, mesh=None) -> None:
    """Assert that this process gets an error, and that the model is as it was."""
    before = {name: param for name, param in model.named_parameters()}
    with pytest.raises(error, match=text):
        ps.initialize(model, CONFIG, mesh=mesh)
    assert all(type(param) in (nn.Parameter, DTensor) for param in model.parameters())
    assert dict(model.named_parameters()) == before


@ranks.in_processes(4)
def test_refusals_name_what_is_wrong_in_every_process():
    rank = dist.get_rank()
    whole, grid = ranks.mesh(dp=4), ranks.mesh(dp=2, tp=2)
    wrapped = pair()
    fully_shard(wrapped, mesh=whole)
    with pytest.raises(ModelError, match="the model is under FSDP, and the engine itself shards"):
        ps.initialize(wrapped, CONFIG)
    averaged = nn.parallel.DistributedDataParallel(pair())
    refused(ModelError, "the model is under DistributedDataParallel", averaged)
    refused(ModelError, r"module 'inner' is under DistributedDataParallel", nn.ModuleDict({"inner": averaged}))

    partial = pair()
    sums = DTensor.from_local(torch.zeros(8), whole, [Partial()])
    partial.down.bias = nn.Parameter(sums)
    refused(ModelError, r"parameter 'down\.bias' has placement P.* its elements are sums over processes", partial)

    refused(ConfigError, "the mesh has the pipeline dimension 'pp' of size 2", pair(), ranks.mesh(pp=2, dp=2)["dp"])
    refused(ConfigError, "mesh has 3 dimensions; pass its data-parallel ones", pair(), ranks.mesh(a=2, b=2, c=1))
    refused(ConfigError, r"rank \d passed (no mesh|one of processes)", pair(), None if rank == 3 else grid["dp"])

    # The parts in two processes with one batch differ from those in the others.
    unlike, shard = pair(), Shard(1 if rank < 2 else 0)
    unlike.up.weight = nn.Parameter(distribute_tensor(unlike.up.weight.detach(), grid["tp"], [shard]))
    refused(ModelError, r"parameter 'up\.weight': the processes that hold one part .* 2 batches", unlike, grid["dp"])
    other = pair()
    if rank == 2:
        other.up = nn.Linear(8, 24)
    refused(ConfigError, r"processes differ in parameters.*up\.weight", other, whole)
    mixed = pair(grid["tp"]) if rank < 2 else pair()
    refused(ModelError, r"parameter 'up\.weight' is a DTensor in some processes, but not in rank 2", mixed, grid["dp"])
    dist.barrier()


def ends_inside_a_collective(where: str) -> None:
    """Kill one process in the forward or backward of a tensor-parallel layer; runs in each process."""
    ps.join()
    grid = ranks.mesh(dp=2, tp=2)
    engine, _ = ps.initialize(pair(grid["tp"]), CONFIG, mesh=grid["dp"])
    inputs = torch.ones(2, 8)
    train(engine, [(inputs,)])
    if dist.get_rank() == 1:
        if where == "forward":
            engine.module.down.register_forward_pre_hook(lambda *_: ranks.die())
        else:
            inputs.requires_grad_()
            engine.module.down.register_full_backward_pre_hook(lambda *_: ranks.die())
    while True:
        train(engine, [(inputs,)])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_that_dies_inside_an_operators_collective_is_named(where):
    ended = ranks.wait(ranks.start(4, ends_inside_a_collective, {"where": where}))
    ranks.check_ended(ended, [1, -signal.SIGKILL, 1, 1])
    for rank in (0, 2, 3):
        # Rank 0 hosts the store, so that the others may find it ended, too.
        named = re.search(r"PeerError: .*rank 1 \(process \d+ on [^)]*\).* ended", ended[rank].text)
        assert named is not None, ended[rank].text[-3000:]
