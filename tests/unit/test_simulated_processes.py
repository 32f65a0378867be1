"""Clusters of dry runs, and the processes and collectives that are simulated."""

import pytest
import torch

from patrickstar._distributed.collectives import Levels
from patrickstar._dry_run.cluster import Cluster
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulated_processes import SimulatedCollectives, SimulatedWorld
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine, Network
from patrickstar._schedule.coordination import Request
from patrickstar.errors import ConfigError

CPU = Machine(name="cpu", source="a test", host=Host(memory=1 << 30, memory_bandwidth=800, cores=4, matmul_tflops=1))
NODE = Machine(
    name="node",
    source="a test",
    gpu=Gpu(count=4, memory=1 << 30, matmul_tflops=1, memory_bandwidth=1000),
    host=Host(memory=1 << 30, memory_bandwidth=800, cores=4),
    links=Links(h2d=50, d2h=40, gpu_gpu=100),
    network=Network(bandwidth=20, latency_s=0.5),
)


def test_processes_are_placed_on_machines():
    assert [Cluster(CPU, count).per_machine for count in (1, 2, 16)] == [1, 2, 16]
    assert [Cluster(NODE, count).per_machine for count in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [Cluster(CPU, count).threads for count in (1, 2, 3, 8)] == [4, 2, 1, 1]
    assert [Cluster(CPU, count).slowdown for count in (1, 2, 3, 8)] == [1, 1, 1, 2]
    mesh = Cluster(NODE, 8, 2).mesh
    assert (mesh.size, mesh.replicas, mesh.shard_size) == (8, 2, 4)


def test_collectives_take_the_time_of_their_slowest_link():
    assert Cluster(CPU, 4).seconds(range(4), 100) == 100 / (800 / 4 / 4), "four accesses per byte of four processes"
    cluster = Cluster(NODE, 8)
    assert cluster.seconds(range(4), 100) == 100 / 100
    # One link leaves each machine: the ring's rate is the network's; two messages are under way one after the other.
    assert cluster.seconds(range(8), 100) == 100 / 20 + 0.5
    # Four rings of two processes share the network.
    assert cluster.seconds((0, 4), 100) == 100 / 5 + 0.5
    assert cluster.coordination_s == 7 * 0.5
    assert Cluster(NODE, 4).coordination_s == 0


@pytest.mark.parametrize(
    ("machine", "count", "replicas", "message"),
    [
        (CPU, 4, 3, "4 processes can't be divided into 3 replicas"),
        (NODE, 6, 1, "6 processes do not fill machines of 4 GPUs"),
        (NODE.model_copy(update={"network": None}), 8, 1, "GPUs for 4 of 8 processes"),
        (NODE.model_copy(update={"links": Links(h2d=1, d2h=1)}), 2, 1, r"no links\.gpu_gpu"),
    ],
)
def test_impossible_clusters_are_refused(machine, count, replicas, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(machine, count, replicas)


def test_a_process_has_a_part_of_a_machine():
    assert CPU.share(1) is CPU
    part = CPU.model_copy(update={"links": Links(h2d=60, d2h=40)}).share(2)
    assert (part.host.memory, part.host.memory_bandwidth, part.host.matmul_tflops) == (1 << 30, 400, 0.5)
    assert part.host.update_bandwidth(1, 2) == CPU.host.update_bandwidth(2, 2) / 2
    assert part.transfer_rates(1) == (30, 20), "its cores copy"
    sockets = Host(memory=1, memory_bandwidth=800, cores=4, sockets=2, core_bandwidth=150)
    node = NODE.model_copy(
        update={
            "host": sockets,
            "links": Links(h2d=50, d2h=40, gpu_gpu=100, shared_by=2),
            "disk": DiskDrive(capacity=100, read=8, write=4),
        }
    )
    part = node.share(2)
    assert part.transfer_rates(1) == node.transfer_rates(2) == (25, 25)
    assert part.host.update_bandwidth(1, 9) == node.host.update_bandwidth(2, 2) / 2 == 300
    assert (part.disk.capacity, part.disk.read, part.disk.write) == (100, 4, 2)
    assert part.gpu == node.gpu and part.links.gpu_gpu == 100


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
