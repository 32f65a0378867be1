"""Checkpoints of several processes: a resume on any number of processes restores the same bits."""

import random
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from laws.tiers import files_no_larger_than
from sampling import draws
from toys import outcome, train

import patrickstar as ps
from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._distributed.process_group import World
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar.errors import CheckpointError, TrainingError

from . import ranks
from .test_exactness import CPU, mesh_of, random_config, random_shape
from .test_loops import Odd

DELAYED = [12, 14, 17, 18]
"""Seeds of runs whose updates are delayed."""


def batches_of(rank, seed):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [(torch.randint(0, 11, (2, 5), generator=generator),) for _ in range(4)]


def build_of(seed):
    draw = random.Random(seed)
    shape, config = random_shape(draw), random_config(draw)
    if seed in DELAYED:
        config = config.model_copy(update={"update": ps.Delayed(after=draw.choice([0, 2, 3]))})
    print(f"seed {seed}: {shape}, {config!r}", flush=True)
    return (Odd, config) if seed % 2 else (shape.build, config)


def make(build, config, world, seed, **hooks):
    torch.manual_seed(seed)
    engine = ps.Engine(build, config, poison=True, world=world, meter=ps.testing.NoMeter(), **hooks)
    torch.manual_seed(100 * seed + world.rank)
    return engine


@ranks.joined
def save_and_go_on(folder: str, seeds: list[int], replicas: int = 1) -> None:
    """Save checkpoints, train on, and write the expected results to files; runs in each process."""
    mesh = mesh_of(replicas)
    for seed in seeds:
        world = World(CPU)
        build, config = build_of(seed)
        engine = make(build, config, world, seed, mesh=mesh, evict_everything=seed % 3 == 0)
        data = batches_of(world.rank, seed)
        train(engine, data[:2])
        with pytest.MonkeyPatch.context() as patch:
            if seed % 4 == 1:
                patch.setattr(DirectWriter, "has_room", property(lambda file: False))
            engine.save(f"{folder}/{seed}", {"drawn": 2, "rank": world.rank}, wait=seed % 2 == 0)
            saved = outcome(engine)
            seen = train(engine, data[2:])
        seen += outcome(engine)
        engine.close()
        torch.save((saved, seen), f"{folder}/expected-{seed}-{world.rank}")


@ranks.joined
def resume(folder: str, seeds: list[int], same: bool, replicas: int = 1, crossed: bool = False) -> None:
    """Load checkpoints; runs in each process.

    With the same mesh, train on and compare. With another one, only compare and save again. `crossed`: another one has
    saved them again, with the user's state of rank 0.
    """
    mesh = mesh_of(replicas)
    for seed in seeds:
        world = World(CPU) if dist.is_initialized() else SINGLE_PROCESS
        rank = world.rank
        build, config = build_of(seed)
        # Chunk size and state of the random number generator differ from those of the saved run.
        config = config.model_copy(update={"chunk_size": random.Random(seed + 7).choice([64, 256, 700, "auto"])})
        engine = make(build, config, world, seed + 1, mesh=mesh)
        found = engine.load(f"{folder}/{seed}")
        assert found["drawn"] == 2
        assert found["rank"] in (0, rank)
        source = rank if crossed else found["rank"]
        saved, expected = torch.load(f"{folder}/expected-{seed}-{source}")
        ps.testing.assert_same_bits(saved, outcome(engine), "saved state")
        if not same:
            engine.save(f"{folder}/again-{seed}", {"drawn": 2, "rank": found["rank"]})
        else:
            assert source == rank
            found = train(engine, batches_of(rank, seed)[2:]) + outcome(engine)
            ps.testing.assert_same_bits(expected, found, "results after the resume")
        engine.close()


SEEDS = [1, 2, 3, 4, 6][: draws(5)] + DELAYED[: draws(16)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    ranks.run(2, save_and_go_on, folder=str(folder), seeds=SEEDS)
    return folder


def test_as_many_processes_resume_with_the_same_bits(checkpoints):
    ranks.run(2, resume, folder=str(checkpoints), seeds=SEEDS, same=True)


def keep_saved_again(folder: Path, seeds: list[int]) -> None:
    """Let checkpoints that were saved after loading take the place of those that were loaded."""
    for seed in seeds:
        shutil.rmtree(folder / str(seed))
        (folder / f"again-{seed}").rename(folder / str(seed))


@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_processes_load_the_whole_state(checkpoints, size, tmp_path):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    ranks.run(size, resume, folder=str(tmp_path), seeds=SEEDS, same=False)
    # The checkpoints that these processes saved are complete as well.
    keep_saved_again(tmp_path, SEEDS)
    ranks.run(1, resume, folder=str(tmp_path), seeds=[seed for seed in SEEDS if seed % 2 == 0], same=False)


def test_what_operators_read_while_updates_are_delayed_crosses_numbers_of_processes(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    seeds = [seed for seed in DELAYED if seed in SEEDS and seed % 2 == 0]  # the others draw random numbers
    ranks.run(3, resume, folder=str(tmp_path), seeds=seeds, same=False)
    keep_saved_again(tmp_path, seeds)
    ranks.run(2, resume, folder=str(tmp_path), seeds=seeds, same=True, crossed=True)


@pytest.mark.slow
def test_checkpoints_cross_meshes(tmp_path):
    seeds = ranks.seeds(3, 1)
    ranks.run(4, save_and_go_on, folder=str(tmp_path), seeds=seeds, replicas=2)
    ranks.run(4, resume, folder=str(tmp_path), seeds=seeds, same=True, replicas=2)
    for size, replicas in [(4, 1), (1, 1), (4, 4), (2, 2)]:  # each loads what the one before has saved
        ranks.run(size, resume, folder=str(tmp_path), seeds=seeds, same=False, replicas=replicas)
        keep_saved_again(tmp_path, seeds)


class Broken:
    """State that cannot be saved."""


@ranks.in_processes(2)
def test_errors_are_raised_by_all_processes_and_all_can_continue(tmp_path):
    world = World(CPU)
    build, config = build_of(1)
    engine = make(build, config, world, 1)
    data = batches_of(world.rank, 1)
    train(engine, data[:1])
    before = outcome(engine)
    with pytest.raises(CheckpointError, match="no such folder"):
        engine.load(f"{tmp_path}/nothing")
    with pytest.raises(CheckpointError, match="Broken"):
        engine.save(f"{tmp_path}/broken", {"mine": Broken() if world.rank else 1})
    engine.save(f"{tmp_path}/good")
    with pytest.raises(CheckpointError, match="exists"):
        engine.save(f"{tmp_path}/good")
    if world.rank == 0:
        path = Path(tmp_path, "good", "rank-00001.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    engine.average(0.0)
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load(f"{tmp_path}/good")
    ps.testing.assert_same_bits(before, outcome(engine), "state before the load")
    engine.backward(engine(*data[1]))
    with pytest.raises((TrainingError, CheckpointError), match="gradient that no step has used"):
        engine.save(f"{tmp_path}/early")
    engine.optimizer.zero_grad()
    checkpoints = ps.Checkpoints(tmp_path)
    limit = files_no_larger_than(4096) if world.rank == 0 else nullcontext()
    with limit, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not checkpoints.save(engine, 1)
    assert any("rank 0: can't write" in str(warning.message) for warning in caught)
    train(engine, data[2:3])
    assert checkpoints.save(engine, 1, wait=False) and checkpoints.save(engine, 1, wait=False)
    engine.close()
    assert [path.name for path in checkpoints.all()] == ["step-1", "step-1-2"]
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["good", "step-1", "step-1-2"]
