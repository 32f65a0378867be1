"""The laws with packed pages on disk: exactness, predicted traffic, damaged pages."""

from functools import partial

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from probes import manager_of
from sampling import drawn
from seeded import run_step
from simulated_machines import DESKTOP, LAPTOP
from toys import batches, layers, train

import patrickstar as ps
from patrickstar._dry_run.simulation import simulate
from patrickstar._hardware.vm_pool import private_memory
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._layout.schema import EXP_AVG, PARAM16
from patrickstar._perf_model.machine_spec import DiskDrive
from patrickstar._tiers import page_codec
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import DiskError

from . import tiers
from .models import precisions
from .test_dry_run import compare
from .test_three_tiers import loops
from .tiers import on_disk, options, rooms, small_engine, wide_shapes


@pytest.fixture
def small_pages(monkeypatch):
    """Let pages of a block gain something: they are not rounded to whole blocks."""
    monkeypatch.setattr(page_codec, "BLOCK_BYTES", 64)


def packed(config: ps.Config) -> ps.Config:
    return config.model_copy(update={"disk": ps.Disk(config.disk.directory, packed=True)})


@drawn(100, wide_shapes, tiers.chunk_sizes, precisions, rooms, loops, fast=4)
def test_exactness(tmp_path_factory, shape, chunk_size, precision, room, loop):
    assume(precision != "fp16" or "update" not in loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_codec, "BLOCK_BYTES", 64)
        config = on_disk(
            shape.build, options(precision, chunk_size), tmp_path_factory.mktemp("disk"), batches(1)[0], room
        )
        script = lambda trainer, optimizer: train(trainer, batches(4), **loop)  # noqa: E731
        tiers.compare(shape.build, packed(config), script, evict_everything=room.evict_everything)


@drawn(8, wide_shapes, st.sampled_from([9000, 40000]), rooms, fast=2)
def test_bytes_equal_those_of_a_dry_run(tmp_path_factory, shape, chunk_size, room):
    """Planned pages have room for a quarter of the exponents, so that all pages are as planned."""
    directory = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_codec, "BLOCK_BYTES", 64)
        patch.setattr(page_codec, "LISTED_SHARE", 4)
        config = on_disk(shape.build, options("bf16", chunk_size), directory, batches(1)[0], room)
        compare(shape.build, packed(config), page_bytes=tiers.PAGE_BYTES)


def test_packed_states_take_seven_eighths_of_the_bytes(tmp_path, small_pages):
    """Statistics count what is transferred, whether pages are as planned or not."""
    transferred = {}
    for packs in (False, True):
        config = on_disk(tiers.blocks, options("fp32"), tmp_path, tiers.inputs(1)[0], tiers.Room())
        config = config.model_copy(update={"disk": ps.Disk(tmp_path, packed=packs)})
        with small_engine(tiers.blocks, config, speculates=False) as engine:
            train(engine, tiers.inputs(4))
            tiers.assert_at_rest(engine)
            transferred[packs] = manager_of(engine).counters.disk_write_bytes
    assert 0.88 < transferred[True] / transferred[False] < 0.93  # the last page of a chunk is short


@pytest.mark.parametrize(("machine", "drive_rate", "faster"), [(DESKTOP, 1e8, True), (LAPTOP, 1e12, False)])
def test_a_dry_run_is_faster_where_the_drive_is_slow_and_slower_where_the_cores_are(
    tmp_path, machine, drive_rate, faster
):
    disk = DiskDrive(capacity="100GB", read=drive_rate, write=drive_rate)
    machine = machine.model_copy(update={"disk": disk})
    seconds, nbytes = {}, {}
    for packs in (False, True):
        options_ = options("bf16", 1 << 16, device_memory=1 << 20, host_memory=3 << 20)
        options_ = options_.model_copy(update={"disk": ps.Disk(tmp_path, packed=packs)})
        step = partial(run_step, batch=(torch.empty(64, 256, device="meta"),))
        report = simulate(ps.Engine, partial(layers, 256, 12, bias=False), options_, step, machine, page_bytes=1 << 16)
        seconds[packs], nbytes[packs] = report.seconds, report.stats.disk_read_bytes
    assert 0.9 < nbytes[True] / nbytes[False] < 0.95  # a page of 64 KiB has 15 blocks in place of 16
    assert (seconds[True] < 0.96 * seconds[False]) if faster else (seconds[True] > seconds[False])


def chunk_on_disk(directory, values, **more) -> tuple[DiskTier, Chunk]:
    """Return a disk tier with a chunk of these values, as packed pages."""
    tier = DiskTier(SwapFile(directory, 1 << 20, **more), tiers.PAGE_BYTES, codec=CppBackend.load().codec)
    chunk = Chunk(EXP_AVG, 0, values.numel(), "float32", torch.device("cpu"))
    tier.reserve(chunk)
    tier.write(chunk, 0, values.view(torch.uint8)).wait()
    return tier, chunk


def test_pages_of_any_bits_are_restored_and_chunks_of_16_bits_are_not_packed(tmp_path, small_pages):
    seed = torch.Generator().manual_seed(0)
    near = torch.randn(5 * 1024 + 300, generator=seed)
    anything = torch.randint(-(2**31), 2**31 - 1, near.shape, generator=seed).to(torch.int32).view(torch.float32)
    for values, packs in ((near, True), (anything, False)):
        tier, chunk = chunk_on_disk(tmp_path, values)
        read = torch.full_like(values, torch.nan)
        tier.read(chunk, 0, read.view(torch.uint8)).wait()
        assert read.view(torch.int32).equal(values.view(torch.int32))
        stored = tier.written_bytes(chunk, 0, values.nbytes)
        assert (stored < 0.95 * values.nbytes) == packs and stored == tier.file.written_bytes == tier.file.read_bytes
        assert (
            stored == tier.planned_bytes(chunk, values.nbytes) + tier.pop_unplanned_bytes()
            and not tier.pop_unplanned_bytes()
        )
        halves = Chunk(PARAM16, 1, 2048, "bfloat16", torch.device("cpu"))
        assert tier.planned_bytes(halves, 4096) == 4096
        tier.close()


def test_a_damaged_page_is_an_error_without_checksums_too(tmp_path, small_pages):
    tier, chunk = chunk_on_disk(tmp_path, torch.randn(1024), checksums=False)
    length = tier.written_bytes(chunk, 0, 4096)
    memory = memoryview(private_memory(4096)).cast("B")  # whole blocks of the disk
    memory[:] = bytes([255]) * len(memory)
    tier.file.write(chunk.disk.offset, memory, length, "damage")
    with pytest.raises(DiskError, match=r"exp_avg\[0\].*is damaged"):
        tier.read(chunk, 0, torch.empty(4096, dtype=torch.uint8)).wait()
    tier.close()


SPECIAL = (0, 1, 0x80000000, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)
words = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(0, 2**32 - 1),
    st.integers(100 << 23, 127 << 23),
    st.integers(112 << 23, 113 << 23),
)


@drawn(
    400, st.lists(words, min_size=1, max_size=64), st.integers(1, 1500), st.sampled_from(CppBackend.load().variants())
)
def test_all_variants_restore_all_bits(values, numel, variant):
    codec = CppBackend.find(variant).codec
    page = torch.tensor([values[i * 7 % len(values)] for i in range(numel)], dtype=torch.int64).to(torch.int32)
    room = torch.full((page.nbytes + 64,), 0xA5, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_codec, "BLOCK_BYTES", 1)
        length = codec.pack(page.data_ptr(), page.nbytes, room.data_ptr())
    assert (room[page.nbytes :] == 0xA5).all(), "bytes beyond the page's are written"
    if length == page.nbytes:
        return  # nothing gained: stored as it is
    assert length < page.nbytes
    restored = torch.full((numel + 16,), -1, dtype=torch.int32)
    assert codec.unpack(room.data_ptr(), length, restored.data_ptr(), page.nbytes)
    assert restored[:numel].equal(page) and (restored[numel:] == -1).all()


@drawn(200, st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from(CppBackend.load().variants()))
def test_damage_writes_nothing_beyond_the_page(seed, length, variant):
    """Pages of random bytes: whatever they are said to hold, nothing outside of either buffer is accessed."""
    source, codec = torch.Generator().manual_seed(seed), CppBackend.find(variant).codec
    stored = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=source)
    if length >= 4 and seed % 2:
        stored[2:4] = 0  # a number of listed exponents that may be right
    restored = torch.full((700 + 16,), -1, dtype=torch.int32)
    codec.unpack(stored.data_ptr(), length, restored.data_ptr(), 2800)
    assert (restored[700:] == -1).all()
