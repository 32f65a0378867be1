"""Checkpoints that refer to pages of the swap file: bits, bytes written, places, power cuts and full disks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st
from sampling import drawn
from seeded import assert_same_model, reference_of
from toys import batches, train

import patrickstar as ps
from patrickstar._tiers import page_codec

from . import tiers
from .models import precisions
from .tiers import on_disk, options, rooms, small_engine, wide_shapes, with_budgets

LINKED = "rank-00000.chunks"
STEPS = 4


def durable(config: ps.Config, **more: Any) -> ps.Config:
    return config.model_copy(update={"disk": ps.Disk(config.disk.directory, durable=True, **more)})


def loaded(build: tiers.Build, config: ps.Config, folder: Path) -> ps.Engine:
    """Return an engine of other initial values that has loaded a checkpoint."""
    torch.manual_seed(1)
    hooks = {"meter": ps.testing.NoMeter(), "poison": True, "page_bytes": tiers.PAGE_BYTES}
    engine = ps.Engine(build, config, **hooks)
    engine.load(folder)
    return engine


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
                ps.testing.assert_same_bits(train(reference, [batch]), train(engine, [batch]), f"step {step}")
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
            train(reference, [batch])
            if (folder := directory / "steps" / f"step-{step}") in folders:
                with loaded(shape.build, plain if step % 2 else config, folder) as other:
                    assert_same_model(reference, other, f"step {step}, ")
