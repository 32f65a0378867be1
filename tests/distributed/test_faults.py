"""A process that dies or deviates: the other processes end soon with an error that names it.

On one host, on two that are simulated by network namespaces with a link between them, and on meshes.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from probes import collectives_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import Shape, layers, train, update

import patrickstar as ps
from patrickstar._distributed import deadlock_watch, process_group
from patrickstar._distributed.process_group import World
from patrickstar.errors import ConfigError, ModelError, PatrickStarError, PeerError

from . import ranks
from .test_exactness import mesh_of

SHAPE = Shape(("mlp", "attention", "plain"))
LARGE = Shape(("mlp",) * 60 * 2)


def ids(rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(rank))


def build(**options):
    """Create an engine with small chunks."""
    return ps.initialize(SHAPE.build, ps.Config(**{"device": "cpu", "chunk_size": 512, "precision": "fp32"} | options))


def step(engine, optimizer) -> None:
    update(engine, engine(ids(engine.world.rank)))


def killed(where: str, rank: int, size: int, disk: str, replicas: int = 1) -> None:
    """Kill `rank` at some point of training; runs in each process."""
    is_victim = int(os.environ["RANK"]) == rank

    def dying_build():
        if is_victim and where == "start":
            ranks.die()
        return (LARGE if disk else SHAPE).build()

    options = {"device_memory": 20000, "host_memory": 760000, "disk": ps.Disk(disk)} if disk else {}
    config = ps.Config(device="cpu", chunk_size=512, precision="fp32", **options)
    world = World.find(torch.device("cpu"))
    mesh = mesh_of(replicas)
    engine = ps.Engine(dying_build, config, meter=ps.testing.NoMeter(), page_bytes=4096, world=world, mesh=mesh)
    assert (engine.inspect().disk is not None) == bool(disk)
    optimizer = engine.optimizer
    step(engine, optimizer)
    if is_victim and where in ("all_gather", "reduce_scatter", "hierarchical_reduce_scatter"):
        setattr(collectives_of(engine), where, lambda *args, **options: ranks.die())
    engine.backward(engine(ids(rank)))
    if is_victim and where == "step":
        ranks.die()
    optimizer.step()
    while True:
        step(engine, optimizer)


def ends_before_the_groups() -> None:
    """End rank 1 after it joined the default group, before the engine's own groups; runs in each process."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    if dist.get_rank() == 1:
        ranks.die()
    build()


def test_a_process_ends_before_the_groups_of_the_engine():
    ended = ranks.end(2, ends_before_the_groups, [1, -signal.SIGKILL])
    assert "PeerError: another process ended at the start" in ended[0].text


@pytest.mark.parametrize(
    "where, rank, size, disk, replicas",
    [
        ("start", 1, 2, False, 1),
        ("all_gather", 0, 2, False, 1),
        pytest.param("reduce_scatter", 2, 4, False, 1, marks=pytest.mark.slow),
        pytest.param("all_gather", 3, 4, False, 2, marks=pytest.mark.slow),
        ("hierarchical_reduce_scatter", 3, 4, False, 2),
        pytest.param("step", 1, 2, True, 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_is_killed(where, rank, size, disk, replicas, tmp_path):
    options = {"where": where, "rank": rank, "size": size, "disk": str(tmp_path) if disk else "", "replicas": replicas}
    codes = [-signal.SIGKILL if other == rank else 1 for other in range(size)]
    for result in ranks.end(size, killed, codes, options):
        # A process that has ended because of it may be named, too.
        named = re.search(rf"PeerError: .*\brank {rank} \(process", result.text)
        assert named or result.code == -signal.SIGKILL, result.text[-3000:]
    assert not list(tmp_path.iterdir()), "a file is left"


@ranks.in_processes(2)
def test_a_process_that_differs_is_refused():
    def refused(message, shape=SHAPE, chunk_size=512):
        with pytest.raises(ConfigError, match=message):
            ps.initialize(shape.build, ps.Config(device="cpu", chunk_size=chunk_size))

    other = int(os.environ["RANK"]) == 1
    different = r"processes differ in parameters: rank 0 has \['blocks.2.0.weight', \[8, 8\]"
    refused(different, Shape(("mlp", "attention", "mlp")) if other else SHAPE)
    different = "processes differ in chunk_size: rank 0 has 512, rank 1 has 1024"
    refused(different, chunk_size=1024 if other else 512)
    version = torch.__version__
    torch.__version__ = "1.0" if other else version
    refused("processes differ in the version of PyTorch")
    torch.__version__, os.environ["WORLD_SIZE"] = version, "3"
    refused("initialised with 2 processes, and WORLD_SIZE says 3")


@pytest.mark.parametrize(
    "call, message",
    [("close", "rank 0: a step; rank 1: closing the engine"), ("clip", "rank 0: a step; rank 1: clipping")],
)
@ranks.in_processes(2)
def test_processes_that_deviate_end_with_an_error(call, message):
    engine, optimizer = build()
    step(engine, optimizer)
    other = engine.world.rank == 1
    with pytest.raises(PeerError, match=message):
        if call == "close" and other:
            engine.close()
        elif call == "clip" and other:
            engine.clip_grad_norm_(1.0)
        step(engine, optimizer)


@ranks.in_processes(2)
def test_an_exception_in_one_process_leaves_all_usable():
    engine, optimizer = build()
    if engine.world.rank == 1:
        handle = engine.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        try:
            engine(ids(1))
        except ZeroDivisionError:
            handle.remove()
    for _ in range(2):
        step(engine, optimizer)
    first, second = engine.world.all_gather_object({name: each.tolist() for name, each in engine.state_dict().items()})
    assert first and first == second
    engine.close()


def short_of_memory() -> None:
    """Train with too little memory for accumulated gradients in rank 1; runs in each process."""
    world = World.find(torch.device("cpu"))
    # Its shard of parameters, masters and momentum takes 96 KiB.
    memory = {} if world.rank == 0 else {"host_memory": 2 * 100 * 1024}
    config = ps.Config(device="cpu", precision="fp32", chunk_size="16KiB", optimizer=ps.SGD(momentum=0.9), **memory)
    build = partial(layers, 64, 4, bias=False)
    engine = ps.Engine(build, config, meter=ps.testing.NoMeter(), evict_everything=True, world=world)
    with pytest.raises(PeerError) as caught:
        train(engine, [(torch.ones(2, 64),)] * 4, accumulation=2)
    print(f"{caught.typename}: {caught.value}")


def test_a_process_without_memory_ends_all_processes():
    first, second = ranks.run(2, short_of_memory)
    assert "PeerError: rank 1 can't do its part of a collective: grad32[" in second.text, second.text
    assert "PeerError: rank 1 (process" in first.text, first.text
    assert "stopped in the middle of a collective: BudgetError: grad32[" in first.text, first.text


@ranks.joined
def meets_alone(call: str) -> None:
    """Call the engine in rank 0 only, while rank 1 waits in a barrier; runs in each process."""
    deadlock_watch.WAIT_S, deadlock_watch.ANSWER_S = 0.5, 0.1
    engine, optimizer = build()
    step(engine, optimizer)
    if dist.get_rank() == 0 and call == "state_dict":
        engine.state_dict()
    elif dist.get_rank() == 0:
        next(engine.parameters()).norm()
    dist.barrier()


@pytest.mark.parametrize("call", ["state_dict", "norm"])
def test_a_call_of_one_process_ends_with_an_error_that_names_it(call):
    ended = ranks.wait(ranks.start(2, meets_alone, {"call": call}))
    assert ended[0].code == 1
    assert re.search(
        rf"PeerError: rank 0 waits for other processes in [\w. ]+ at \S+test_faults.py:\d+ \(.*{call}.*\), but "
        rf"rank 1 waits in \S+test_faults.py:\d+ \(dist.barrier\(\)\)",
        ended[0].text,
    ), ended[0].text


@ranks.in_processes(2)
def test_a_slow_process_is_waited_for():
    deadlock_watch.WAIT_S, deadlock_watch.ANSWER_S = 0.2, 0.05
    engine, optimizer = build()
    step(engine, optimizer)
    if engine.world.rank == 1:
        time.sleep(2)
    step(engine, optimizer)


# Two hosts

PORT = 29400
NEW_HOST_NAME = 0x04000000
"""CLONE_NEWUTS of `unshare`: what the process calls itself is its own."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[dict[str, str]]]:
    """Make two simulated hosts; provide the environment of a process of each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command ip")
    names = [f"ps{os.getpid()}a", f"ps{os.getpid()}b"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "psa", "netns", names[0], "type", "veth", "peer", "name", "psb", "netns", names[1])
            for name, wire, address in zip(names, ("psa", "psb"), ("10.213.0.1/24", "10.213.0.2/24"), strict=True):
                _ip("-n", name, "address", "add", address, "dev", wire)
                _ip("-n", name, "link", "set", wire, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        address = {"MASTER_ADDR": "10.213.0.1"}
        yield [address | {"HOST": name, "GLOO_SOCKET_IFNAME": f"ps{name[-1]}"} for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def move_to_host(name: str) -> None:
    """Move this process to a simulated host, with its name and its network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as network:
        failed = libc.setns(network.fileno(), 0) or libc.unshare(NEW_HOST_NAME)
    assert not failed, os.strerror(ctypes.get_errno())
    socket.sethostname(name)


def two_hosts(die: bool) -> None:
    """Train for some steps, then kill the second process if `die`; runs in each process."""
    move_to_host(os.environ["HOST"])
    process_group.ALIVE_TIMEOUT_S = 2.0  # rank 0 waits as long for a rank on another host to report
    engine, optimizer = ps.initialize(SHAPE.build, ps.Config(device="cpu", chunk_size=512, host_memory="1MiB"))
    assert engine.world.local_ranks == [engine.world.rank]
    assert engine.host_budget_bytes == 1 << 20, "the other process is on another host"
    for _ in range(2):
        step(engine, optimizer)
    loss = engine.average(engine(ids(engine.world.rank)).item())
    print(f"on {socket.gethostname()}: {loss:.9g}")
    if die and engine.world.rank == 1:
        ranks.die()
    if die:
        step(engine, optimizer)
    engine.close()
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())


@pytest.mark.slow
def test_training_over_two_hosts(hosts):
    ended = ranks.end(2, two_hosts, [0, 0], {"die": False}, env=hosts, port=PORT)
    words = [result.text.splitlines()[-1].split() for result in ended]
    assert words[0][1] != words[1][1] and words[0][2] == words[1][2]


def test_a_process_on_another_host_is_killed(hosts):
    ended = ranks.end(2, two_hosts, [1, -signal.SIGKILL], {"die": True}, env=hosts, port=PORT)
    assert "PeerError: rank 1 (process" in ended[0].text


# Meshes

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
    ended = ranks.end(4, ends_inside_a_collective, [1, -signal.SIGKILL, 1, 1], {"where": where})
    for rank in (0, 2, 3):
        # Rank 0 hosts the store, so that the others may find it ended, too.
        named = re.search(r"PeerError: .*rank 1 \(process \d+ on [^)]*\).* ended", ended[rank].text)
        assert named is not None, ended[rank].text[-3000:]
