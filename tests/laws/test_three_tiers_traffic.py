"""Law 4 with a disk: what moves is what the homes and the plan say, however fast the disk is."""

import contextlib
import dataclasses
import random
import time
import typing

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patrickstar._layout.schema import PARAM16
from patrickstar._memory.disk_tier import DiskTier
from patrickstar._memory.swap_file import SwapFile

from . import models
from .models import batches, shapes
from .tiers import (
    WIDTH,
    assert_at_rest,
    chunk_sizes,
    on_disk,
    optimizer_bytes_on_disk,
    options,
    rooms,
    small_engine,
)


@pytest.fixture(autouse=True)
def _wide_models(monkeypatch):
    """Those of `models.py` are so small here that the host would hold them."""
    monkeypatch.setattr(models, "WIDTH", WIDTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty directory, which is empty again at the end."""
    made = tmp_path_factory.mktemp("disk")
    yield made
    assert not list(made.iterdir())


class Slow(SwapFile):
    """A disk that takes its time, another one at every call."""

    seed = 0

    def read(self, *args):
        time.sleep(random.Random(self.seed + self.read_bytes).choice([0, 0, 0, 0.002]))
        super().read(*args)

    def write(self, *args):
        time.sleep(random.Random(self.seed - self.written_bytes).choice([0, 0, 0, 0.002]))
        super().write(*args)


def steps(engine, count):
    """What each of some steps moved to the last byte, wherever pages of its update were read before it.

    Without what was read for nothing: for an update that did not come next.
    """
    found, dropped, ring = [], [0], engine._core.optimizer_step.disk_step.staging_pool
    drop = type(ring).drop

    def watch(there):
        dropped[0] += bytes_of(engine, there) if there.owner is None else 0
        drop(ring, there)

    ring.drop = watch
    for batch in batches(count):
        before, told = engine._core.manager.counters.copy(), on_trust(engine) + dropped[0]
        loss = engine(*batch)
        engine.backward(loss)
        engine.optimizer.step()
        engine._core.complete()
        moved = engine._core.manager.counters.since(before)
        read = moved.disk_read_bytes + told - on_trust(engine) - dropped[0]
        found.append((moved.h2d_bytes, moved.d2h_bytes, read, moved.disk_write_bytes))
    del ring.drop
    return found, dropped[0]


def on_trust(engine):
    """Bytes that were read for the next updates."""
    return sum(
        bytes_of(engine, there)
        for there in engine._core.optimizer_step.disk_step.staging_pool.live
        if there.owner is None
    )


def bytes_of(engine, there):
    """What a set of pages takes of the disk, where it was ever written."""
    disk, sizes = engine._core.manager.disk_tier, [(chunk, chunk.dtype.itemsize) for chunk in there.lists]
    return sum(disk.written_bytes(chunk, there.first * size, there.numel * size) for chunk, size in sizes)


@settings(max_examples=4, deadline=None, print_blob=True)
@given(shape=shapes, chunk_size=st.sampled_from([1000, 9000, 40000]), room=rooms)
def test_what_moves_is_the_same_however_fast_the_disk_is(folder, shape, chunk_size, room):
    check_speeds(folder, shape, chunk_size, room)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, print_blob=True)
@given(shape=shapes, chunk_size=st.sampled_from([1000, 9000, 40000]), room=rooms)
def test_what_moves_is_the_same_in_many_more_cases(folder, shape, chunk_size, room):
    check_speeds(folder, shape, chunk_size, room)


def check_speeds(folder, shape, chunk_size, room):
    """Step by step: also of what is done on the way to a plan, no decision waits to see how fast a disk is."""
    config = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
    seen = []
    for kind, seed in ((SwapFile, 0), (Slow, 1), (Slow, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("patrickstar._memory.hardware.SwapFile", kind)
            patch.setattr(Slow, "seed", seed)
            hooks = {"evict_everything": room.evict_everything}
            with contextlib.closing(small_engine(shape.build, config, **hooks)) as engine:
                assume(engine._core.manager.disk_tier is not None)
                seen.append(steps(engine, 6)[0])
                assert_at_rest(engine)
    assert seen[1:] == seen[:1] * 2


class Noted(DiskTier):
    """Notes what moves, and what was written back although a copy below was current."""

    moved: typing.ClassVar[list] = []
    clean: typing.ClassVar[list] = []

    def read(self, chunk, start, target, urgent=False):
        self.moved.append(("read", chunk.kind, self.written_bytes(chunk, start, target.numel())))
        return super().read(chunk, start, target, urgent)

    def write(self, chunk, start, source):
        self.moved.append(("write", chunk.kind, source.numel()))
        leaves = source.untyped_storage().data_ptr() == chunk.storage.data_ptr()
        if leaves and (chunk.host_valid or chunk.disk_valid):
            self.clean.append(chunk)
        return super().write(chunk, start, source)


@settings(max_examples=6, deadline=None, print_blob=True)
@given(shapes, chunk_sizes, rooms, st.integers(1, 3))
def test_optimizer_states_move_as_their_homes_say_and_clean_parameters_are_not_written(
    folder, shape, chunk_size, room, count
):
    # What is recomputed in backward may have a gradient make way, and its parameter be rounded from the disk again.
    shape = dataclasses.replace(shape, checkpointing=False)
    config = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("patrickstar._memory.hardware.DiskTier", Noted)
        engine = small_engine(shape.build, config, evict_everything=room.evict_everything)
        stack.callback(engine.close)
        assume(engine._core.manager.disk_tier is not None)
        steps(engine, 5)
        Noted.moved.clear()
        Noted.clean.clear()
        told = on_trust(engine)
        told -= steps(engine, count)[1] + on_trust(engine)
        expected = count * optimizer_bytes_on_disk(engine)
        sums = {"read": told, "write": 0}
        for how, kind, nbytes in Noted.moved:
            sums[how] += nbytes if kind != PARAM16 else 0
        assert sums == {"read": expected, "write": expected}
        assert not Noted.clean, "what was not written was written back"
        assert_at_rest(engine)
