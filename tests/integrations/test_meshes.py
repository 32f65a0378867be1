"""Meshes from sizes: every layout of up to 12 processes, in one process with PyTorch's fake process group."""

import itertools
from contextlib import suppress

import pytest
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig

from patrickstar.errors import ConfigError
from patrickstar.integrations._meshes import MeshSizes, meshes
from patrickstar.integrations.transformers._distributed_config import mesh_sizes

from .fake_processes import fake_processes


def layouts(world: int) -> list[MeshSizes]:
    """Return all sizes that are possible with `world` processes."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    found = []
    for sizes in itertools.product(divisors, repeat=3):
        with suppress(ConfigError):
            found.append(MeshSizes(world, *sizes))
    return found


def ranks(mesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


@pytest.mark.parametrize("world", [1, 2, 4, 8, 12])
def test_groups_are_whole_and_have_each_batch_once(world):
    found = layouts(world)
    assert MeshSizes(world, ep=world) in found and MeshSizes(world, tp=world) in found
    for sizes in found:
        built = {}
        for rank in range(world):
            with fake_processes(world, rank):
                data, tp, ep, dense = meshes(sizes, "cpu")
                own = (rank,)
                built[rank] = ranks(data), own if tp is None else ranks(tp), own if ep is None else ranks(ep)
                assert data.ndim == (2 if sizes.replicas > 1 else 1)
                assert data.mesh_dim_names[-1] == "dp_shard"
                assert data.size() == sizes.data == sizes.replicas * sizes.shards
                assert (tp is None, ep is None) == (sizes.tp == 1, sizes.ep == 1)
                assert dense.mesh_dim_names == data.mesh_dim_names + (() if tp is None else ("tp",))
        batch = {rank: data.index(rank) for rank, (data, _, _) in built.items()}
        assert batch == {rank: sizes.data_rank(rank) for rank in range(world)}
        for rank, (data, tp, ep) in built.items():
            assert (len(tp), len(ep)) == (sizes.tp, sizes.ep)
            assert rank in data and rank in tp and rank in ep
            assert {batch[other] for other in tp} == {batch[rank]}
            if sizes.ep > 1:
                assert set(tp) <= set(ep)
                # The processes with the same experts, each for the batches of its expert group.
                copies = [built[other][2] for other in range(world) if built[other][2].index(other) == ep.index(rank)]
                covered = sorted(batch[other] for group in copies for other in group)
                assert covered == sorted(list(range(sizes.data)) * sizes.tp)
                replica = world // sizes.replicas
                assert {other // replica for other in ep} == {rank // replica}


def test_description():
    assert str(MeshSizes(1)) == "1 process: 1 batch"
    assert str(MeshSizes(16, 2, 4, 2)) == "16 processes: 8 batches, tp 2, ep 4, 2 replicas"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 4, "tp": 0}, "tp=0; a size is a positive integer"),
        ({"world": 4, "ep": 2.0}, r"ep=2\.0; a size is a positive integer"),
        ({"world": 4, "replicas": True}, "replicas=True; a size is a positive integer"),
        ({"world": 6, "tp": 4}, "6 processes can't be divided .* start a multiple of 4 processes"),
        ({"world": 8, "tp": 2, "replicas": 3}, "start a multiple of 6 processes"),
        ({"world": 8, "tp": 4, "ep": 2}, "ep=2 is not a multiple of tp=4"),
        ({"world": 8, "ep": 8, "replicas": 2}, "the 4 processes of a replica can't be divided into groups of ep=8"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MeshSizes(**options)


def test_processes_must_have_joined():
    with pytest.raises(ConfigError, match=r"have not joined: call patrickstar\.join\(\) before"):
        meshes(MeshSizes(4), "cpu")
    with fake_processes(4), pytest.raises(ConfigError, match="the mesh is for 8 processes, and 4 have joined"):
        meshes(MeshSizes(8), "cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "world", "sizes"),
    [
        ({"tp_size": 2, "fsdp_size": 4, "ep_size": 4}, 8, MeshSizes(8, 2, 4, 1)),
        ({"fsdp_size": 2, "dp_replicate_size": 3, "ep_size": 2}, 6, MeshSizes(6, 1, 2, 3)),
        ({"tp_size": 4, "tp_plan": "auto"}, 4, MeshSizes(4, 4)),
        ({}, 1, MeshSizes(1)),
    ],
)
def test_the_configuration_of_transformers_is_read(options, world, sizes):
    assert mesh_sizes(DistributedConfig(**options), world) == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 2}, r"is for 2 processes .* and there are 4: set fsdp_size=2"),
        ({"tp_size": 3}, r"is for 3 processes .* and there are 4$"),
        ({"pp_size": 4}, r"pp_size=4\) can't be used: pipeline parallelism"),
        ({"fsdp_size": 4, "fsdp_plan": {"layers.*": "free_full_weight"}}, "chunks replace FSDP2"),
        ({"fsdp_size": 4, "fsdp_cpu_offload": True}, r"set device_memory in ps\.Config"),
        ({"fsdp_size": 4, "fsdp_mixed_precision": True}, r"set precision in ps\.Config"),
        ({"fsdp_size": 4, "enable_sequence_parallel": True}, "transformers does not implement it"),
        ({"fsdp_size": 4, "ep_size": 4, "ep_implementation": "all_reduce"}, "tokens reach their experts by"),
    ],
)
def test_what_the_engine_does_otherwise_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        mesh_sizes(DistributedConfig(**options), 4)
