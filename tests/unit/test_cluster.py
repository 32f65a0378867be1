"""Clusters of dry runs: where processes are placed, and what their collectives take."""

import pytest
from simulated_machines import CPU, NODE

from patrickstar._dry_run.cluster import Cluster
from patrickstar._perf_model.machine_spec import Links
from patrickstar.errors import ConfigError


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
