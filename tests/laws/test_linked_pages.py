"""Restarts that read the pages of a checkpoint's linked file in place: bits, bytes, and damage."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import reject
from hypothesis import strategies as st
from probes import manager_of
from sampling import drawn
from seeded import assert_same_model, reference_of
from toys import batches, train

import patrickstar as ps
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._tiers import page_codec
from patrickstar.errors import DiskError

from . import tiers
from .models import precisions
from .tiers import LINKED, durable, loaded, on_disk, options, rooms, small_engine, step_of, wide_shapes, with_budgets

STEPS = 6


def durable_config(directory: Path, **more: object) -> ps.Config:
    room = tiers.Room(host_bytes=8_000)
    return durable(on_disk(tiers.blocks, options("bf16"), directory, tiers.inputs(1)[0], room), **more)


def trained(config: ps.Config, steps: int, **hooks: object) -> ps.Engine:
    """Return an engine after some steps, with a checkpoint of the last in `first`."""
    engine = small_engine(tiers.blocks, config, **hooks)
    train(engine, tiers.inputs(steps))
    engine.save(Path(config.disk.directory) / "first")
    return engine


def plain_state(config: ps.Config, folder: Path) -> ps.Engine:
    """Return an engine in memory that has loaded a checkpoint."""
    return loaded(tiers.blocks, with_budgets(config, None, None), folder)


@drawn(
    120,
    wide_shapes,
    tiers.chunk_sizes,
    precisions,
    rooms,
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
    fast=4,
)
def test_restarts_at_any_step_change_no_bit(tmp_path_factory, shape, chunk_size, precision, room, packed, waits, seed):
    """Each run may save at once, or load its own checkpoint, and deletes the one whose pages it reads."""
    directory, data, draw = tmp_path_factory.mktemp("disk"), batches(STEPS), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_codec, "BLOCK_BYTES", 64)
        config = on_disk(shape.build, options(precision, chunk_size), directory, data[0], room)
        reference = reference_of(shape.build, with_budgets(config, None, None))
        config = durable(config, packed=packed)
        checkpoints = ps.Checkpoints(directory / "steps", keep=1)
        engine = small_engine(shape.build, config, evict_everything=room.evict_everything)
        if engine.inspect().disk is None:
            engine.close()
            reject()
        for step, batch in enumerate(data, start=1):
            expected, found = (step_of(trainer, batch, step) for trainer in (reference, engine))
            ps.testing.assert_same_bits(expected, found, f"seed {seed}, step {step}")
            checkpoints.save(engine, step, wait=waits)
            if draw.random() < 0.5:
                engine.close()
                engine = loaded(shape.build, config, checkpoints.newest())
                if draw.random() < 0.5:
                    checkpoints.save(engine, step, wait=waits)
                    engine.finish_saving()
            elif draw.random() < 0.5:
                checkpoints.load(engine)
        assert_same_model(reference, engine, f"seed {seed}, ")
        tiers.assert_at_rest(engine)
        engine.close()
        with loaded(shape.build, config, checkpoints.newest()) as other:
            assert_same_model(reference, other, f"seed {seed}, ")
    assert [path.name for path in directory.iterdir()] == ["steps"], "a hidden link is left"


def test_a_restart_moves_what_memory_holds_and_a_step_takes_over_the_pages(tmp_path):
    config = durable_config(tmp_path)
    with trained(config, 3) as engine:
        states = tiers.optimizer_bytes_on_disk(engine)
    open_before = tiers.open_files()
    engine = small_engine(tiers.blocks, config, speculates=False)
    file = manager_of(engine).disk_tier.file
    written, read = file.written_bytes, file.read_bytes
    engine.load(tmp_path / "first")
    assert file.written_bytes - written < 0.2 * states, "more than 16-bit parameters was written"
    assert file.read_bytes - read < 0.6 * states, "more than masters and 16-bit parameters was read"
    assert len(list(tmp_path.glob(".patrickstar-*"))) == 2, "no link keeps the pages that are read"
    shutil.rmtree(tmp_path / "first")
    train(engine, tiers.inputs(1))
    engine.save(tmp_path / "next")
    assert list(tmp_path.glob(".patrickstar-*")) == [file.path], "the linked file is open after all pages were written"
    reference = reference_of(tiers.blocks, with_budgets(config, None, None))
    train(reference, tiers.inputs(3))
    train(reference, tiers.inputs(1))
    assert_same_model(reference, engine)
    engine.close()
    assert tiers.open_files() == open_before
    with plain_state(config, tmp_path / "next") as other:
        assert_same_model(reference, other)


def test_the_run_that_wrote_the_pages_may_go_on_and_delete_the_checkpoint(tmp_path):
    config = durable_config(tmp_path)
    with trained(config, 2) as writer:
        first = tmp_path / "first"
        with plain_state(config, first) as expected, loaded(tiers.blocks, config, first) as reader:
            shutil.rmtree(tmp_path / "first")
            for step in range(4):  # each step would write over the pages that no checkpoint has
                train(writer, tiers.inputs(1))
                writer.save(tmp_path / f"more-{step}")
                shutil.rmtree(tmp_path / f"more-{step}")
            assert_same_model(expected, reader)
            for engine in (expected, reader):
                train(engine, tiers.inputs(2))
            assert_same_model(expected, reader)


def test_a_run_that_goes_back_to_its_own_checkpoint_keeps_its_pages(tmp_path):
    """They are places of its own swap file, which a deleted checkpoint would free if they were not read."""
    config = durable_config(tmp_path)
    with trained(config, 2) as engine:
        train(engine, tiers.inputs(2))
        engine.load(tmp_path / "first")
        with plain_state(config, tmp_path / "first") as expected:
            assert len(list(tmp_path.glob(".patrickstar-*"))) == 2, "no page is read in place"
            shutil.rmtree(tmp_path / "first")
            for number in range(3):
                for trainer in (expected, engine):
                    train(trainer, tiers.inputs(1))
                engine.save(tmp_path / f"more-{number}")
                assert_same_model(expected, engine)


@pytest.mark.parametrize("other", ["unpacked", "other chunks", "without durable", "more on the host"])
def test_engines_with_other_pages_load_a_checkpoint(tmp_path, other):
    written = durable_config(tmp_path, packed=True)
    changes = {
        "unpacked": {"disk": ps.Disk(tmp_path, durable=True)},
        "other chunks": {"chunk_size": 4_000, "device_memory": written.device_memory + 4_000},
        "without durable": {"disk": ps.Disk(tmp_path, packed=True)},
        "more on the host": {"host_memory": written.host_memory + 20_000},
    }
    with trained(written, 2):
        pass
    first, changed = tmp_path / "first", written.model_copy(update=changes[other])
    with plain_state(written, first) as expected, loaded(tiers.blocks, changed, first) as engine:
        for trainer in (expected, engine):
            train(trainer, tiers.inputs(2))
        assert_same_model(expected, engine)


def test_damage_names_the_checkpoint_and_changes_nothing_of_it(tmp_path):
    config = durable_config(tmp_path)
    with trained(config, 2):
        pass
    folder = tmp_path / "first"
    pages = CheckpointReader(folder).manifest.files[-1].pages
    before = (folder / LINKED).read_bytes()
    for place in (pages.places[0], pages.places[-2]):  # of a master and a state; the last page is padding
        damaged = bytearray(before)
        damaged[place : place + 6] = b"damage"
        (folder / LINKED).write_bytes(damaged)
        message = rf"the loaded checkpoint's {folder}/{LINKED}: the page is damaged: .*resume from an older checkpoint"
        with pytest.raises(DiskError, match=message):
            train(loaded(tiers.blocks, config, folder), tiers.inputs(2))
        assert (folder / LINKED).read_bytes() == bytes(damaged)
    (folder / LINKED).write_bytes(before)
    with plain_state(config, folder) as expected, loaded(tiers.blocks, config, folder) as engine:
        assert_same_model(expected, engine)


@pytest.mark.parametrize("update", [None, ps.Delayed(after=1)], ids=["speculating", "delayed"])
def test_late_updates_and_speculation_go_on_from_linked_pages(tmp_path, update):
    data, first = tiers.inputs(5), tmp_path / "first"
    room = tiers.Room(host_bytes=40_000)
    config = durable(on_disk(tiers.blocks, options("bf16", update=update), tmp_path, data[0], room))
    with small_engine(tiers.blocks, config) as engine:
        train(engine, data[:2], max_norm=1.0)
        engine.save(first)
    found = []
    for each in (config, with_budgets(config, None, None)):
        with loaded(tiers.blocks, each, first) as engine:
            if each is config:
                assert len(list(tmp_path.glob(".patrickstar-*"))) == 2, "no page is read in place"
            found.append([*train(engine, data[2:], max_norm=1.0), *engine.state_dict().values()])
    ps.testing.assert_same_bits(*found, "from linked pages")


def test_a_file_that_can_not_be_linked_is_copied_and_said_so(tmp_path, monkeypatch):
    config = durable_config(tmp_path)
    with trained(config, 2):
        pass

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(UserWarning, match=r"pages of .*first/rank-00000.chunks are copied, .*Operation not permitted"):
        engine = loaded(tiers.blocks, config, tmp_path / "first")
    with engine, plain_state(config, tmp_path / "first") as expected:
        assert_same_model(expected, engine)
