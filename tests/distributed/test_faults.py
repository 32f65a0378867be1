"""A process that dies or deviates: the other processes end soon with an error that names it."""

import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from probes import collectives_of
from toys import Shape, layers, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed import deadlock_watch
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError, PeerError

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
    engine.backward(engine(ids(engine.world.rank)))
    optimizer.step()
    optimizer.zero_grad()


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
    engine = Engine(dying_build, config, meter=testing.NoMeter(), page_bytes=4096, world=world, mesh=mesh)
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
    ended = ranks.wait(ranks.start(2, ends_before_the_groups))
    ranks.check_ended(ended, [1, -signal.SIGKILL])
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
    ended = ranks.wait(ranks.start(size, killed, options))
    ranks.check_ended(ended, [-signal.SIGKILL if other == rank else 1 for other in range(size)])
    for other, result in enumerate(ended):
        if other != rank:
            # A process that has ended because of it may be named, too.
            assert re.search(rf"PeerError: .*\brank {rank} \(process", result.text), result.text[-3000:]
    assert not list(tmp_path.iterdir()), "a file is left"


@pytest.mark.parametrize(
    "difference, message",
    [
        ("model", r"processes differ in parameters: rank 0 has \['blocks.2.0.weight', \[8, 8\]"),
        ("chunk_size", "processes differ in chunk_size: rank 0 has 512, rank 1 has 1024"),
        ("version", "processes differ in the version of PyTorch"),
        ("world", "initialised with 2 processes, and WORLD_SIZE says 3"),
    ],
)
@ranks.in_processes(2)
def test_a_process_that_differs_is_refused(difference, message):
    other = int(os.environ["RANK"]) == 1
    shape, options = SHAPE, {}
    if difference == "model" and other:
        shape = Shape(("mlp", "attention", "mlp"))
    if difference == "chunk_size" and other:
        options["chunk_size"] = 1024
    if difference == "version" and other:
        torch.__version__ = "1.0"
    if difference == "world":
        os.environ["WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError, match=message):
        ps.initialize(shape.build, ps.Config(**{"device": "cpu", "chunk_size": 512} | options))


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
    engine = Engine(build, config, meter=testing.NoMeter(), evict_everything=True, world=world)
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
