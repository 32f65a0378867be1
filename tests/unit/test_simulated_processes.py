"""Simulated processes and their collectives."""

import pytest
import torch
from simulated_machines import NODE

from patrickstar._distributed.collectives import Levels
from patrickstar._dry_run.cluster import Cluster
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulated_processes import SimulatedCollectives, SimulatedWorld
from patrickstar._schedule.coordination import Request


def world_of(cluster):
    hardware = SimulatedHardware(cluster.machine.share(cluster.per_machine), TensorMeter())
    return hardware, SimulatedWorld(hardware, cluster)


def test_the_others_say_what_this_process_says():
    hardware, world = world_of(Cluster(NODE, 8))
    assert (world.rank, world.size, len(world.local_ranks)) == (0, 8, 4)
    assert world.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]] * 8
    assert world.all_gather_object({"a": (1,)}) == [{"a": [1]}] * 8
    world.check_agreement({"model": "same"})
    group = world.group(((1, 3), (0, 2), (4, 6), (5, 7)))
    assert (group.ranks, group.rank) == ((0, 2), 0)
    assert world.group(((1, 3), (0, 2), (4, 6), (5, 7))) is group
    coordinator = world.coordinators[world.everyone]
    assert coordinator.negotiate(Request.STEP, 0).synchronized
    assert hardware.clock.now == 3.5
    assert [(wait.channel, wait.seconds) for wait in hardware.clock.waits] == [("coordination", 3.5)]


def meta(numel):
    return torch.empty(numel, dtype=torch.float16, device="meta")


def test_collectives_occupy_their_channels():
    hardware, world = world_of(Cluster(NODE, 8, 2))
    mesh = Cluster(NODE, 8, 2).mesh
    levels = Levels(*mesh.levels(world))
    collectives = SimulatedCollectives(world, hardware, Cluster(NODE, 8, 2))
    arena = hardware.host_arena(64)
    on_host = arena.memory.view(torch.float16)
    bounds = tuple(range(0, 90, 10))
    gather = collectives.all_gather(levels.shard, on_host[:20], meta(80), levels.shard_bounds(bounds))
    gather.wait()
    # 40 bytes of the own shard go up at 50 bytes per second, then 3/4 of 160 bytes are sent at 100.
    assert hardware.up.nbytes == 40 and hardware.collectives.nbytes == 120
    assert hardware.collectives.busy_s == pytest.approx(1.2) and hardware.clock.now == pytest.approx(1.2)
    reduce = collectives.hierarchical_reduce_scatter(levels, meta(80), on_host[:10], bounds, range(4), range(2))
    assert not reduce.done
    reduce.cancel()  # the others have started it, too
    assert reduce.done
    # 120 bytes in the replica; half of 20 fp32 sums between replicas, whose network four processes share.
    assert hardware.collectives.nbytes == 120 + 120 + 40
    assert hardware.collectives.busy_s == pytest.approx(1.2 + 1.2 + 40 / 5 + 0.5)
    assert hardware.down.nbytes == 20
    alone = collectives.reduce_scatter(world.group(tuple((rank,) for rank in range(8))), meta(4), meta(4), (0, 4), (0,))
    assert alone.done
