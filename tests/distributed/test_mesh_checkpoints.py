"""Checkpoints cross meshes: any number of processes loads what any other saved, with or without DTensors."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from safetensors.torch import load_file
from sampling import nightly
from torch.distributed.tensor import DTensor

import patrickstar as ps
from patrickstar._checkpoint import load_planner
from patrickstar._checkpoint.storage_reader import CheckpointReader

from . import ranks
from .meshes import PLACES, TOKENS, Place

OPTIMIZERS: dict[str, Any] = {
    "bf16": ps.EMA(ps.AdamW(lr=1e-2, weight_decay=0.1)),
    "fp32": functools.partial(torch.optim.NAdam, lr=1e-2),
}
"""Optimizers by precision: a moving average, and one with a scalar per parameter."""


def engine_of(place: Place, precision: str, seed: int, disk: str | None = None, **options: Any) -> ps.Engine:
    """Create an engine whose weights, chunk size and generator depend on a seed. `options`: those of the model."""
    limits: dict[str, Any] = {}
    if disk is not None:
        limits = {"disk": disk, "device_memory": 60_000, "host_memory": 200_000 + 120_000 * place.size}
        options["width"] = 512
    world, mesh, build = place.open(**options)
    config = ps.Config(
        device="cpu",
        precision=precision,
        chunk_size=[256, 700, 2800][seed % 3],
        optimizer=OPTIMIZERS[precision],
        **limits,
    )
    torch.manual_seed(seed)
    hooks = {"poison": True, "meter": ps.testing.NoMeter(), "page_bytes": 4096}
    engine = ps.Engine(build, config, world=world, mesh=mesh, **hooks)
    tiers = [param.optimizer_tier for param in engine.inspect().parameters]
    assert disk is None or tiers.count("disk") > len(tiers) // 2
    torch.manual_seed(1000 * seed + engine.data_rank)
    return engine


def train(engine: ps.Engine, steps: range) -> list[torch.Tensor]:
    """Train some steps of the run, with the batches of this process."""
    generators = (torch.Generator().manual_seed(100 * step + engine.data_rank) for step in steps)
    return toys.train(engine, [(torch.randint(0, TOKENS, (2, 8), generator=each),) for each in generators])


def snapshot(engine: ps.Engine) -> dict[str, Any]:
    """Return parameters and states, which all processes share, and the buffers and generator of this process."""
    state, params = engine.state_dict(), {name for name, _ in engine.named_parameters()}
    states = engine.optimizer.state_dict()["state"]
    return {
        "shared": {name: state[name] for name in params}
        | {f"{key} of {name}": value for name, each in states.items() for key, value in each.items()},
        "buffers": {name: value for name, value in state.items() if name not in params},
        "random": torch.get_rng_state(),
    }


def write(engine: ps.Engine, path: str, steps: range) -> None:
    """Train, save in the background, and train on; write what a process that resumes must find to files."""
    rank, last = engine.world.rank, len(steps) // 2
    train(engine, steps[:last])
    expected = snapshot(engine)
    engine.save(path, {"rank": rank, "batch": engine.data_rank}, wait=False)
    losses = train(engine, steps[last:])
    expected |= {"losses": losses, "end": snapshot(engine), "steps": [steps[last], steps.stop]}
    torch.save(expected, f"{path}.rank-{rank}")
    engine.close()


def load(engine: ps.Engine, place: Place, path: str, saved: Place) -> dict[str, Any]:
    """Load a checkpoint, assert that this process finds what it must, and return what the saved run expects then."""
    rank, batch = engine.world.rank, engine.data_rank
    own_random = torch.get_rng_state()
    found = engine.load(path)
    same_mesh = [place.batch(each) for each in range(place.size)] == [saved.batch(each) for each in range(saved.size)]
    first = rank if same_mesh else batch * saved.size // saved.batches
    source = first if saved.batches == place.batches else 0
    assert found == {"rank": source, "batch": saved.batch(source)}
    expected, now = torch.load(f"{path}.rank-{source}"), snapshot(engine)
    ps.testing.assert_same_bits(expected["shared"], now["shared"], "parameters and states")
    ps.testing.assert_same_bits(expected["buffers"], now["buffers"], "buffers")
    known = batch < saved.batches
    random = torch.load(f"{path}.rank-{first}")["random"] if known else own_random
    assert torch.equal(random, now["random"])
    return expected


def resume(engine: ps.Engine, place: Place, path: str, saved: Place) -> None:
    """Load a checkpoint and train on as far as the saved run; with as many batches, compare the results."""
    expected = load(engine, place, path, saved)
    if saved.batches == place.batches:
        losses, end = train(engine, range(*expected["steps"])), snapshot(engine)
        if place == saved:
            ps.testing.assert_same_bits(expected["losses"], losses, "losses")
            for part in ("shared", "buffers"):
                ps.testing.assert_same_bits(expected["end"][part], end[part], f"{part} at the end")
        else:  # sums of partial products are added in another order
            exact = engine.config.precision == "fp32"
            torch.testing.assert_close(losses, expected["losses"], rtol=1e-4 if exact else 0.05, atol=1e-3)
    engine.close()


@ranks.joined
def go_on(folder: str, source: str, names: list[str], precisions: list[str]) -> None:
    """Load a checkpoint on some meshes, train and save there, and resume from that; runs in each process."""
    for name, precision in zip(names, precisions, strict=True):
        place, path = PLACES[name], f"{folder}/{name}-{precision}"
        engine = engine_of(place, precision, 1)
        load(engine, place, f"{folder}/{source}-{precision}", PLACES[source])
        write(engine, path, range(2, 4))
        resume(engine_of(place, precision, 2), place, path, place)


@ranks.joined
def write_all(folder: str, names: list[str], precisions: list[str]) -> None:
    """Save checkpoints on some meshes, from the beginning; runs in each process."""
    for name in names:
        for precision in precisions:
            write(engine_of(PLACES[name], precision, 0), f"{folder}/{name}-{precision}", range(4))


@ranks.joined
def resume_all(folder: str, names: list[str], pairs: list[list[str]]) -> None:
    """Load checkpoints of other meshes on some meshes; runs in each process."""
    for name in names:
        for saved, precision in pairs:
            engine = engine_of(PLACES[name], precision, 4)
            resume(engine, PLACES[name], f"{folder}/{saved}-{precision}", PLACES[saved])


def test_a_run_moves_between_meshes(tmp_path):
    """One process, then four with tensor parallelism, experts shared out or replicas, then one again."""
    folder, names, precisions = str(tmp_path), ["dp2-tp2-ep2", "ep4", "2x2"], ["bf16", "fp32", "bf16"]
    if not nightly():
        names, precisions = ["dp2-tp2-ep2"], ["fp32"]
    ranks.run(1, write_all, folder=folder, names=["1"], precisions=sorted(set(precisions)))
    ranks.run(4, go_on, folder=folder, source="1", names=names, precisions=precisions)
    pairs = [list(pair) for pair in zip(names, precisions, strict=True)]
    ranks.run(1, resume_all, folder=folder, names=["1"], pairs=pairs)


@pytest.mark.slow
def test_any_mesh_loads_any_other(tmp_path):
    by_size = {size: [name for name, place in PLACES.items() if place.size == size] for size in (1, 2, 4)}
    pairs = [[name, precision] for name in PLACES for precision in OPTIMIZERS]
    for function, options in ((write_all, {"precisions": list(OPTIMIZERS)}), (resume_all, {"pairs": pairs})):
        for size, names in by_size.items():
            ranks.run(size, function, folder=str(tmp_path), names=names, **options)


@ranks.joined
def carry(folder: str, names: list[str], first: int) -> None:
    """Save numbered checkpoints on meshes whose states are on disk, each after loading the one before it."""
    load_planner.PAGE_BYTES = 8192  # what is on disk is read in several parts
    for number, name in enumerate(names, start=first):
        engine = engine_of(PLACES[name], "bf16", 1 + number, folder)
        if number:
            engine.load(f"{folder}/{number - 1}")
        else:
            train(engine, range(1))
            torch.save(snapshot(engine)["shared"], f"{folder}/expected")
        expected = torch.load(f"{folder}/expected")
        ps.testing.assert_same_bits(expected, snapshot(engine)["shared"], "parameters and states")
        engine.save(f"{folder}/{number}")
        engine.close()


@pytest.mark.slow
def test_states_on_disk_move_between_meshes(tmp_path):
    first = 0
    for names in (["1"], ["dp2-tp2-ep2", "ep4"], ["1"]):
        ranks.run(PLACES[names[0]].size, carry, folder=str(tmp_path), names=names, first=first)
        first += len(names)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@ranks.in_processes(2)
def test_states_and_exports_of_dtensor_models(tmp_path):
    """Exchange states of DTensor models as whole tensors, as DTensors, and by other programs."""
    place = PLACES["tp2"]
    engine = engine_of(place, "bf16", 1)
    train(engine, range(2))
    state, states = engine.state_dict(), engine.optimizer.state_dict()
    shapes = {name: param.shape for name, param in engine.named_parameters()}
    assert all(type(state[name]) is torch.Tensor and state[name].shape == shape for name, shape in shapes.items())
    checkpoints = ps.Checkpoints(f"{tmp_path}/run")
    assert checkpoints.save(engine, 2)
    engine.save_pretrained(f"{tmp_path}/model")
    stored = load_file(f"{tmp_path}/model/model.safetensors")
    ps.testing.assert_same_bits(state, {name: stored[name] for name in state}, "exported tensors")
    reader = CheckpointReader(f"{tmp_path}/run/step-2")
    ps.testing.assert_same_bits(state, {name: reader.tensor(f"model.{name}") for name in state}, "saved tensors")
    expected = snapshot(engine)["shared"]
    engine.close()

    # whole tensors
    engine = engine_of(place, "bf16", 2)
    engine.load_state_dict(state)
    engine.optimizer.load_state_dict(states)
    ps.testing.assert_same_bits(expected, snapshot(engine)["shared"], "states that were loaded as whole tensors")
    engine.close()

    # DTensors: the state dict of the same model, unmanaged
    world, _, build = place.open()
    torch.manual_seed(3)
    model = build()
    engine = engine_of(place, "bf16", 4)
    engine.load_state_dict(model.state_dict())
    found = engine.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], whole(value).to(found[name].dtype)), name
    engine.close()

    # PyTorch's own planners, which can't load `_StridedShard`
    values = {name: value for name, value in model.state_dict().items() if name != "gated.packed"}
    dcp.load({"model": values}, storage_reader=CheckpointReader(f"{tmp_path}/run/step-2"))
    for name, value in values.items():
        assert torch.equal(whole(value), state[name].to(value.dtype)), name

    # A parameter that was frozen when the checkpoint was saved begins with zero states.
    engine = engine_of(place, "bf16", 5, frozen=False)
    assert checkpoints.load(engine) == {}
    moments = engine.optimizer.state_dict()["state"]
    position = list(shapes).index("up.bias")
    assert position not in moments
    train(engine, range(1))
    assert engine.optimizer.state_dict()["state"][position]["step"] == 1
    engine.close()

    # Another shape is refused by name.
    engine = engine_of(place, "bf16", 5, tokens=TOKENS + 1)
    with pytest.raises(ps.errors.CheckpointError, match=r"of another shape are words\.weight"):
        checkpoints.load(engine)
    engine.close()
    world.close()
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["model", "run"]
