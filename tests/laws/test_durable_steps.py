"""Checkpoints that refer to pages of the swap file: bits, bytes written, places, power cuts and full disks."""

import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st
from probes import manager_of
from sampling import drawn, draws
from seeded import assert_same_model, reference_of
from torch import nn
from toys import batches, train

import patrickstar as ps
from patrickstar._checkpoint.atomic_dir import list_checkpoints
from patrickstar._checkpoint.manifest import Manifest, ManifestFile, ManifestPages, read_manifest, write_manifest
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar._tiers import page_codec
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import CheckpointError, ConfigError, DiskError

from . import tiers
from .models import precisions
from .tiers import LINKED, durable, loaded, on_disk, options, rooms, small_engine, step_of, wide_shapes, with_budgets

STEPS = 4


@drawn(
    200,
    wide_shapes,
    tiers.chunk_sizes,
    precisions,
    rooms,
    st.sampled_from([1, 1, 2, None]),
    st.booleans(),
    st.booleans(),
    fast=6,
)
def test_each_step_is_restored_exactly(tmp_path_factory, shape, chunk_size, precision, room, keep, packed, waits):
    directory, data = tmp_path_factory.mktemp("disk"), batches(STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_codec, "BLOCK_BYTES", 64)
        config = on_disk(shape.build, options(precision, chunk_size), directory, data[0], room)
        plain = with_budgets(config, None, None)
        config = durable(config, packed=packed)
        checkpoints = ps.Checkpoints(directory / "steps", keep=keep)
        reference = reference_of(shape.build, plain)
        with small_engine(shape.build, config, evict_everything=room.evict_everything) as engine:
            if engine.inspect().disk is None:
                reject()
            for step, batch in enumerate(data, start=1):
                expected, found = (step_of(trainer, batch, step) for trainer in (reference, engine))
                ps.testing.assert_same_bits(expected, found, f"step {step}")
                assert checkpoints.save(engine, step, {"step": step}, wait=waits)
                if waits:
                    assert (directory / "steps" / f"step-{step}" / LINKED).exists()
                    with loaded(shape.build, plain, checkpoints.newest()) as other:
                        assert_same_model(reference, other, f"step {step}, ")
            engine.finish_saving()
            tiers.assert_at_rest(engine)
        folders = checkpoints.all()
        assert len(folders) == (min(keep, STEPS) if keep else STEPS)
        # The pages of the older ones have not been written over, and outlive the engine.
        reference = reference_of(shape.build, plain)
        for step, batch in enumerate(data, start=1):
            step_of(reference, batch, step)
            if (folder := directory / "steps" / f"step-{step}") in folders:
                with loaded(shape.build, plain if step % 2 else config, folder) as other:
                    assert_same_model(reference, other, f"step {step}, ")


class Counting(nn.Module):
    """Layers, and a buffer that counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiers.blocks()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layers(x)


def write_params(engine: ps.Engine) -> None:
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(2)


def change_options(engine: ps.Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 1.0


def evaluate(engine: ps.Engine) -> None:
    with torch.no_grad():
        engine(*tiers.inputs(1)[0])


AFTER = {
    "a step": lambda engine: train(engine, tiers.inputs(1)),
    "an update in backward": lambda engine: train(engine, tiers.inputs(1), update=True),
    "accumulation": lambda engine: train(engine, tiers.inputs(3), accumulation=3),
    "in-place writes": write_params,
    "other options": change_options,
    "an evaluation": evaluate,
    "reading all states": lambda engine: engine.optimizer.state_dict(),
    "another save": lambda engine: engine.save(engine.folder / "next"),
    "loading": lambda engine: engine.load(engine.folder / "first"),
    "closing": lambda engine: engine.close(),
}


@pytest.mark.parametrize("after", list(AFTER))
def test_a_save_in_the_background_has_what_it_was_called_for(tmp_path, after):
    """It starts once updates have ended by themselves, and before anything of it changes."""
    config = on_disk(Counting, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    engine = small_engine(Counting, durable(config))
    engine.folder = tmp_path
    train(engine, tiers.inputs(1))
    engine.save(tmp_path / "first", {"step": 1})
    train(engine, tiers.inputs(2))
    engine.save(tmp_path / "later", {"step": 2}, wait=False)
    AFTER[after](engine)
    if after != "closing":
        assert engine.finish_saving()
        engine.close()
    reference = reference_of(Counting, with_budgets(config, None, None))
    train(reference, tiers.inputs(1))
    train(reference, tiers.inputs(2))
    with loaded(Counting, with_budgets(config, None, None), tmp_path / "later") as other:
        assert_same_model(reference, other)
        assert other.load(tmp_path / "later")["step"] == 2
        assert other.optimizer.param_groups[0]["lr"] == tiers.ADAMW.lr


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    reader = CheckpointReader(folder)
    return {name: reader.tensor(name) for name, tensor in reader.manifest.tensors.items() if not tensor.plain}


class Drive:
    """Drive with a cache: of the writes since the last flush, a power cut leaves any, in whole or in part.

    The power goes off at random writes of the swap file; what is then on the drive stays.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, steps: Path, images_in: Path, draw: random.Random, share: float
    ) -> None:
        self.steps, self.images_in, self.draw, self.share = steps, images_in, draw, share
        self.lock = threading.Lock()
        self.unflushed: list[tuple[int, bytes, bytes]] = []
        """Offset, old and new bytes of each write."""
        self.images: list[Path] = []
        move, sync = SwapFile._move, SwapFile._sync

        def cached_move(file, operation, offset, buffer, nbytes, label):
            if operation == "read":
                move(file, operation, offset, buffer, nbytes, label)
                return
            with self.lock:
                length = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
                with file.path.open("rb") as stream:
                    old = os.pread(stream.fileno(), length, offset)
                move(file, operation, offset, buffer, nbytes, label)
                self.unflushed.append((offset, old.ljust(length, b"\0"), bytes(buffer[:length])))
                if self.draw.random() < self.share:
                    self.cut(file)

        def flush(file):
            with self.lock:
                sync(file)
                self.unflushed.clear()

        patch.setattr(SwapFile, "_move", cached_move)
        patch.setattr(SwapFile, "_sync", flush)

    def cut(self, file: SwapFile) -> None:
        """Keep the newest checkpoint with what a power cut leaves of the swap file."""
        complete = list_checkpoints(self.steps)
        if not complete:
            return
        content = bytearray(file.path.read_bytes())
        for offset, old, new in self.draw.sample(self.unflushed, len(self.unflushed)):
            for block in range(0, len(old), BLOCK_BYTES):
                left = self.draw.choice([old, new])[block : block + BLOCK_BYTES]
                content[offset + block : offset + block + BLOCK_BYTES] = left
        image = self.images_in / str(len(self.images)) / complete[-1][1].name
        image.mkdir(parents=True)
        for each in complete[-1][1].iterdir():
            if each.name == LINKED:
                (image / LINKED).write_bytes(content)
            else:
                shutil.copy(each, image)
        self.images.append(image)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(draws(40)))
def test_a_power_cut_at_any_write_loses_no_step(tmp_path, monkeypatch, seed, packed):
    """The power goes off some 25 times in each case."""
    draw = random.Random(seed)
    monkeypatch.setattr(page_codec, "BLOCK_BYTES", 64)
    steps = tmp_path / "steps"
    drive = Drive(monkeypatch, steps, tmp_path / "images", draw, share=0.05)
    config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    checkpoints = ps.Checkpoints(steps, keep=draw.choice([1, 2]))
    expected = {}
    with small_engine(tiers.blocks, durable(config, packed=packed)) as engine:
        for step, batch in enumerate(tiers.inputs(6), start=1):
            train(engine, [batch])
            assert checkpoints.save(engine, step, wait=draw.random() < 0.5)
            engine.finish_saving()
            expected[f"step-{step}"] = contents(checkpoints.newest())
    assert len(drive.images) > 5, f"seed {seed}: the power was cut {len(drive.images)} times"
    for image in drive.images:
        found = contents(image)
        assert found.keys() == expected[image.name].keys()
        for name, value in found.items():
            assert value.equal(expected[image.name][name]), f"seed {seed}: {name} in {image}"


def test_a_step_writes_states_once_and_the_file_has_two_versions(tmp_path):
    written = {}
    for saves in (False, True):
        config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room(host_bytes=100_000))
        checkpoints = ps.Checkpoints(tmp_path / "steps", keep=1)
        with small_engine(tiers.blocks, durable(config) if saves else config, speculates=False) as engine:
            file = manager_of(engine).disk_tier.file
            first_bytes = file.nbytes
            for step, batch in enumerate(tiers.inputs(12), start=1):
                train(engine, [batch])
                if saves:
                    assert checkpoints.save(engine, step)
                    copied = (checkpoints.newest() / "rank-00000.safetensors").stat().st_size
                    assert copied < 0.35 * engine.layout.model_data_bytes, "states on disk were written again"
            assert file.nbytes == first_bytes
            written[saves] = file.written_bytes, first_bytes
    # The writer's nine pages take the memory of a chunk or two, which are evicted in each step.
    assert written[False][0] <= written[True][0] < written[False][0] + 12 * 2 * 9 * tiers.PAGE_BYTES
    assert written[True][1] == 2 * written[False][1]


def test_checkpoints_are_as_frequent_as_states_in_memory_allow(tmp_path):
    """Between two of them steps write so much that what these write again is a small share."""
    frequencies = []
    for share in (0.0, 0.95):
        room = tiers.Room(host_share=share)
        config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], room)
        with small_engine(tiers.blocks, durable(config)) as engine:
            found = engine.inspect()
            numels = {tier: 0 for tier in ("device", "host", "disk")}
            for param in found.parameters:
                numels[param.optimizer_tier] += param.numel
            expected = (numels["device"] + numels["host"]) / (0.03 * numels["disk"])
            frequencies.append(found.durable_every)
            assert found.durable_every == pytest.approx(max(1, expected), rel=0.3, abs=1)
    assert frequencies[0] == 1 < frequencies[1]
    with small_engine(tiers.blocks, with_budgets(config, None, None)) as engine:
        assert engine.inspect().durable_every == 34


def test_an_engine_that_closes_leaves_the_disk_space_of_its_checkpoints_alone(tmp_path):
    config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    engine = small_engine(tiers.blocks, durable(config))
    for step in range(1, 5):
        train(engine, tiers.inputs(1))
        engine.save(tmp_path / f"step-{step}")
    shutil.rmtree(tmp_path / "step-1")
    folders = [tmp_path / f"step-{step}" for step in (2, 3, 4)]
    expected = [contents(folder) for folder in folders]
    file = manager_of(engine).disk_tier.file
    used_bytes = 512 * os.fstat(file._fd).st_blocks
    engine.close()
    status = (folders[0] / LINKED).stat()
    states = 12 * sum(param.numel() for param in tiers.blocks().parameters())
    assert 3 * states <= 512 * status.st_blocks <= used_bytes - states < status.st_size
    for folder, tensors in zip(folders, expected, strict=True):
        assert all(contents(folder)[name].equal(value) for name, value in tensors.items())


def test_a_renamed_checkpoint_stays_valid_and_a_deleted_one_frees_its_pages(tmp_path):
    config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    with small_engine(tiers.blocks, durable(config), speculates=False) as engine:
        file, data = manager_of(engine).disk_tier.file, tiers.inputs(8)
        train(engine, data[:1])
        engine.save(tmp_path / "first")
        expected = contents(tmp_path / "first")
        (tmp_path / "first").rename(tmp_path / "renamed")
        for number, batch in enumerate(data[1:4]):
            train(engine, [batch])
            engine.save(tmp_path / f"more-{number}")
        grown = file.nbytes
        found = contents(tmp_path / "renamed")
        assert all(found[name].equal(value) for name, value in expected.items())
        for folder in ("renamed", "more-0", "more-1"):
            shutil.rmtree(tmp_path / folder)
        for number, batch in enumerate(data[4:]):
            train(engine, [batch])
            engine.save(tmp_path / f"last-{number}")
            shutil.rmtree(tmp_path / (f"last-{number - 1}" if number else "more-2"))
        assert file.nbytes == grown


def test_a_full_disk_names_the_checkpoints_that_hold_its_pages(tmp_path):
    config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    with small_engine(tiers.blocks, durable(config)) as engine:
        capacity = manager_of(engine).disk_tier.file.nbytes
    engine = small_engine(tiers.blocks, durable(config, capacity=capacity))
    train(engine, tiers.inputs(1))
    engine.save(tmp_path / "first")
    train(engine, tiers.inputs(1))
    engine.save(tmp_path / "second")
    with pytest.raises(DiskError, match=r"raise that .*delete one of the checkpoints .*first, .*second"):
        train(engine, tiers.inputs(1))
        engine.save(tmp_path / "third")
    engine.close(keep=False)
    with loaded(tiers.blocks, with_budgets(config, None, None), tmp_path / "second") as other:
        train(other, tiers.inputs(1))


def test_damage_is_found_and_nothing_is_loaded(tmp_path):
    config = on_disk(tiers.blocks, options("bf16"), tmp_path, tiers.inputs(1)[0], tiers.Room())
    with small_engine(tiers.blocks, durable(config)) as engine:
        train(engine, tiers.inputs(1))
        engine.save(tmp_path / "step")
    place = CheckpointReader(tmp_path / "step").manifest.files[1].pages.places[-1]
    with (tmp_path / "step" / LINKED).open("r+b") as file:
        file.seek(place)
        file.write(b"damage")
    with pytest.raises(CheckpointError, match=rf"{LINKED} is damaged: the checksum .* at offset {place}"):
        loaded(tiers.blocks, with_budgets(config, None, None), tmp_path / "step")
    os.truncate(tmp_path / "step" / LINKED, place)
    with pytest.raises(CheckpointError, match=r"is damaged: it has \d+ bytes"):
        CheckpointReader(tmp_path / "step")


def test_a_linked_file_without_pages_is_no_failure_of_the_reader(tmp_path):
    pages = ManifestPages(places=[], sizes=[], stored=[])
    file = ManifestFile(name=LINKED, nbytes=0, sums=[], pages=pages)
    manifest = Manifest(processes=1, written_by="a test", page_bytes=BLOCK_BYTES, files=[file], tensors={})
    (tmp_path / LINKED).touch()
    write_manifest(tmp_path, manifest, 1)
    assert read_manifest(tmp_path) == manifest


def test_names_of_killed_processes_are_removed(tmp_path):
    left = tmp_path / ".patrickstar-left.chunks"
    left.write_bytes(b"of a killed process")
    first, second = (SwapFile(tmp_path, BLOCK_BYTES, durable=True) for _ in range(2))
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
    first.close()
    second.close()
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="durable=True needs checksums=True"):
        ps.Disk(tmp_path, durable=True, checksums=False)
