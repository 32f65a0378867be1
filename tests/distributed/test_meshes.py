"""Law 1 on meshes: results are bit-identical to those of the same DTensor model in plain PyTorch.

Boxes of DTensors are the local tensors that PyTorch cuts.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from laws.models import Waves
from probes import equal_device_bytes
from sampling import nightly
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import patrickstar as ps
from patrickstar._distributed.param_sharding import mesh_shards
from patrickstar._distributed.process_group import World
from patrickstar._layout.local_boxes import local_boxes
from patrickstar._layout.shard_geometry import Box
from patrickstar.errors import ModelError
from patrickstar.integrations._meshes import Meshes

from . import ranks
from .mesh_models import CHECKPOINTING, MODELS, batch
from .reference import MeshTrainer

CPU = torch.device("cpu")


def train(trainer: Any, name: str, data_rank: int, max_norm: float | None, accumulates: bool) -> list[torch.Tensor]:
    """Train and evaluate in turn, twice; return losses and norms."""
    seen = []
    for step in range(2):
        for number in (2 * step, 2 * step + 1) if accumulates else (step,):
            with MODELS[name].context():
                loss = trainer(*batch(number, data_rank))
                trainer.backward(loss, accumulate=accumulates and number % 2 == 0)
            seen.append(loss.detach().clone())
        if max_norm is not None:
            seen.append(trainer.clip_grad_norm_(max_norm))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.eval()
        with torch.no_grad(), MODELS[name].context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            seen.append(trainer(*batch(100 + step, data_rank)))
        trainer.train()
    return seen


def local(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return this process's parts of parameters."""
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }


def compare(name: str, way: str, built: Meshes, seed: int, world: World, **options: Any) -> None:
    """Assert that an engine has the bits of the reference: losses, norms, gradients, parameters."""
    draw, model = random.Random(seed), MODELS[name]
    config = ps.Config(
        device="cpu",
        # A router of Switch Transformers casts itself to fp32.
        precision=draw.choice(["bf16", "bf16", "fp32"]) if name != "switch" else "fp32",
        chunk_size=draw.choice([2048, 8192, "auto"]),
        optimizer=ps.AdamW(lr=1e-2, weight_decay=0.1),
        reduce_dtype=draw.choice(["16-bit", "fp32"]),
    )
    steps = {"max_norm": draw.choice([None, 0.1]), "accumulates": draw.random() < 0.4}
    print(f"{name}, {way}, seed {seed}: {config!r}, {steps}, {list(options)}", flush=True)
    reference = MeshTrainer(model.parallel(built, way), config, built.data)
    expected = train(reference, name, reference.data_rank, **steps)
    if budget := options.pop("device_memory", None):
        config = config.model_copy(update={"device_memory": budget, "chunk_size": 4096})
    engine = ps.Engine(lambda: model.parallel(built, way), config, poison=True, world=world, mesh=built.data, **options)
    assert (engine.data_rank, engine.data_size) == (reference.data_rank, reference.batches)
    found = train(engine, name, engine.data_rank, **steps)
    engine.average(0.0)  # serves the other processes, which may still gather, until all are here
    ps.testing.assert_same_bits(expected, found, f"{name}: losses and norms")
    names = [key for key, _ in engine.module.named_parameters()]
    with model.context():
        reference.backward(reference(*batch(77, engine.data_rank)))
        reference.unscale()
        engine.backward(engine(*batch(77, engine.data_rank)))
    for key in names[:: max(1, len(names) // 4)]:
        whole, own = engine.gradient(key), reference.gradient(key)
        managed = dict(reference.module.named_parameters())[key]
        assert (whole is None) == (own is None), key
        if whole is not None and not isinstance(managed, DTensor):
            ps.testing.assert_same_bits([own], [whole], f"{name}: gradient of {key}")
    engine.optimizer.zero_grad()
    reference.optimizer.zero_grad()
    engine.close()
    state = reference.state_dict()
    ps.testing.assert_same_bits(
        {key: state[key] for key in names}, local(dict(engine.module.named_parameters())), f"{name}: parameters"
    )


@ranks.joined
def cases(chosen: list[tuple[str, str, str, int]], compared: Sequence[str] = ("evicted", "tight", "measured")) -> None:
    """Compare models with ways of checkpointing, kinds of budgets and seeds; runs in each of four processes.

    `compared`: kinds in which each measurement is compared with what the processes decide by; takes several times as
    long.
    """
    world = World(CPU)
    world.users += 1  # keeps the process groups for the next engine
    for name, way, kind, seed in chosen:
        with equal_device_bytes() if kind in compared else nullcontext():
            compare(name, way, MODELS[name].meshes(), seed, world, **KINDS[kind](100 * seed + world.rank))
    world.users -= 1
    world.close()


def tight(seed: int) -> dict[str, Any]:
    """Draw a budget and varying non-model data for one process."""
    own = random.Random(seed)
    wave_bytes = own.randint(0, 20_000)
    return {"meter": Waves(wave_bytes), "device_memory": 120_000 + own.randint(0, 60_000) + wave_bytes}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "evicted": lambda seed: {"meter": ps.testing.NoMeter(), "evict_everything": True},
    "tight": tight,
    "measured": lambda seed: {},
}
FAST = [
    ("decoder, both", "none", "evicted", 0),
    # Accumulates, and only one process owns elements of the last chunk.
    ("mixtral", "non-reentrant", "tight", 1208),
    ("switch", "reentrant", "measured", 1100),  # accumulates
]


@pytest.mark.long("a model of transformers with experts and DTensors in four processes, with its reference")
def test_bits_of_the_unmanaged_model():
    ranks.run(4, cases, chosen=FAST if nightly() else FAST[1:2], compared=list(KINDS) if nightly() else ["tight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", CHECKPOINTING)
def test_all_models_with_each_way_of_checkpointing(kind, way):
    first = 1000 + 100 * CHECKPOINTING.index(way)
    ranks.run(4, cases, chosen=[(name, way, kind, first + number) for number, name in enumerate(MODELS)])


# Boxes


def random_placement(draw: random.Random, dims: int) -> Placement:
    dim = draw.randrange(-dims, dims)
    strided = _StridedShard(dim % dims, split_factor=draw.choice([2, 3]))
    return draw.choice([Replicate(), Shard(dim), Shard(dim), strided])


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(map(slice, box.offsets, box.ends))]


@ranks.joined
def compare_boxes(seed: int, count: int) -> None:
    """Distribute random tensors over random meshes; runs in each process."""
    draw = random.Random(seed)
    meshes = [ranks.mesh(a=4), ranks.mesh(a=2, b=2), ranks.mesh(a=1, b=4), ranks.mesh(a=2, b=1, c=2)]
    for _ in range(count):
        mesh = draw.choice(meshes)
        shape = [draw.randint(0, 9) for _ in range(draw.randint(1, 3))]
        placements = [random_placement(draw, len(shape)) for _ in range(mesh.ndim)]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        param = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local, pairs = param.to_local(), local_boxes(param.shape, mesh_shards(param))
        case = f"seed {seed}: {shape}, {placements} on {mesh}"
        assert [max(box.ends[dim] for box, _ in pairs) for dim in range(len(shape))] == list(local.shape), case
        found = torch.full_like(local, -1)
        for box, held in pairs:
            inside(found, box).copy_(inside(whole, held))
        assert torch.equal(found, local), case


@ranks.in_processes(2)
def test_dtensors_that_chunks_cannot_hold_are_refused():
    mesh = ranks.mesh(a=2)
    layer = nn.Linear(4, 4)
    part = torch.zeros(3, 4)
    whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=layer.weight.shape, stride=(4, 1))
    layer.weight = nn.Parameter(whole)
    with pytest.raises(ModelError, match=r"'weight' of shape \(4, 4\) has a local tensor of shape \(3, 4\).*\(2, 4\)"):
        ps.Engine(layer, ps.Config(device="cpu"), world=World(CPU))
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    with pytest.raises(ModelError, match="buffer 'mask' is a DTensor"):
        ps.Engine(layer, ps.Config(device="cpu"), world=World(CPU))


def test_boxes_of_random_dtensors():
    ranks.run(4, compare_boxes, seed=random.randrange(1 << 30), count=200)
