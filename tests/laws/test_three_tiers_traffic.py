"""Law 4 with a disk: transfers follow from home tiers and plan, not from the speed of the disk."""

import dataclasses
import random
import time
import typing
from unittest import mock

import pytest
from hypothesis import assume, example
from hypothesis import strategies as st
from probes import complete_updates, disk_step_of, manager_of
from sampling import drawn
from seeded import run_step
from toys import Shape, batches

from patrickstar._layout.schema import PARAM16
from patrickstar._step.staging_pool import StagingPool
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.swap_file import SwapFile

from . import tiers
from .tiers import Room, on_disk, options, rooms, small_engine, wide_shapes


class Slow(SwapFile):
    """Swap file on a disk with a random delay at each call."""

    seed = 0

    def read(self, *args):
        time.sleep(random.Random(self.seed + self.read_bytes).choice([0, 0, 0, 0.002]))
        super().read(*args)

    def write(self, *args):
        time.sleep(random.Random(self.seed - self.written_bytes).choice([0, 0, 0, 0.002]))
        super().write(*args)


def steps(engine, count):
    """Return the bytes that each step moved, including speculative reads for it, and the bytes of dropped reads.

    Speculative reads that were dropped do not count for any step.
    """
    transfers, dropped, drop = [], [0], StagingPool.drop

    def record(pool, pages):
        dropped[0] += bytes_of(engine, pages) if pages.owner is None else 0
        drop(pool, pages)

    with mock.patch.object(StagingPool, "drop", record):
        for batch in batches(count):
            before, speculative = engine.inspect(), speculative_bytes(engine) + dropped[0]
            run_step(engine, batch)
            complete_updates(engine)
            h2d, d2h, read, written = transferred(before, engine.inspect())
            transfers.append((h2d, d2h, read + speculative - speculative_bytes(engine) - dropped[0], written))
    return transfers, dropped[0]


def transferred(before, after):
    """Return the bytes moved between two inspections: to the device, to the host, read from disk, written to disk."""
    names = ("h2d_bytes", "d2h_bytes", "disk_read_bytes", "disk_write_bytes")
    return tuple(getattr(after, name) - getattr(before, name) for name in names)


def speculative_bytes(engine):
    """Return the bytes in staging buffers that were read speculatively: they belong to no update yet."""
    disk_step = disk_step_of(engine)
    live = () if disk_step is None else disk_step.staging_pool.live
    return sum(bytes_of(engine, pages) for pages in live if pages.owner is None)


def bytes_of(engine, pages):
    """Return the bytes of a page set that were ever written to the disk."""
    disk, sizes = manager_of(engine).disk_tier, [(chunk, chunk.dtype.itemsize) for chunk in pages.lists]
    return sum(disk.written_bytes(chunk, pages.first * size, pages.numel * size) for chunk, size in sizes)


@drawn(64, wide_shapes, st.sampled_from([1000, 9000, 40000]), rooms, fast=1)
@example(Shape(("mlp", "mlp"), False, False, True, width=64), 1000, Room())  # windows are suspended
def test_transfers_do_not_depend_on_the_speed_of_the_disk(folder, shape, chunk_size, room):
    """Check every step, including those before the plan: no decision depends on the speed of a disk."""
    config = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
    transfers = []
    for kind, seed in ((SwapFile, 0), (Slow, 1), (Slow, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("patrickstar._tiers.hardware.SwapFile", kind)
            patch.setattr(Slow, "seed", seed)
            with small_engine(shape.build, config, evict_everything=room.evict_everything) as engine:
                assume(engine.inspect().disk is not None)
                transfers.append(steps(engine, 6)[0])
                tiers.assert_at_rest(engine)
    assert transfers[1:] == transfers[:1] * 2


class RecordingDisk(DiskTier):
    """Disk tier that records transfers, and write-backs of chunks with a valid copy on host or disk."""

    moved: typing.ClassVar[list] = []
    clean: typing.ClassVar[list] = []

    def read(self, chunk, start, target, urgent=False):
        self.moved.append(("read", chunk.kind, self.written_bytes(chunk, start, target.numel())))
        return super().read(chunk, start, target, urgent)

    def write(self, chunk, start, source, **options):
        self.moved.append(("write", chunk.kind, source.numel()))
        from_device = source.untyped_storage()._cdata == chunk.storage._cdata
        if from_device and (chunk.host.valid or chunk.disk.valid):
            self.clean.append(chunk)
        return super().write(chunk, start, source, **options)


@drawn(6, wide_shapes, tiers.chunk_sizes, rooms, st.integers(1, 3))
def test_optimizer_states_follow_home_tiers_and_clean_parameters_are_not_written(
    folder, shape, chunk_size, room, count
):
    # Recomputation in backward may move a gradient away, and read its master from disk again to restore the parameter.
    shape = dataclasses.replace(shape, checkpointing=False)
    config = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
    with (
        mock.patch("patrickstar._tiers.hardware.DiskTier", RecordingDisk),
        small_engine(shape.build, config, evict_everything=room.evict_everything) as engine,
    ):
        assume(engine.inspect().disk is not None)
        steps(engine, 5)
        RecordingDisk.moved.clear()
        RecordingDisk.clean.clear()
        ahead = speculative_bytes(engine)
        ahead -= steps(engine, count)[1] + speculative_bytes(engine)
        expected = count * tiers.optimizer_bytes_on_disk(engine)
        sums = {"read": ahead, "write": 0}
        for operation, kind, nbytes in RecordingDisk.moved:
            sums[operation] += nbytes if kind != PARAM16 else 0
        assert sums == {"read": expected, "write": expected}
        assert not RecordingDisk.clean, "unmodified chunks were written back"
        tiers.assert_at_rest(engine)
