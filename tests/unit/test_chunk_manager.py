"""Chunk manager: random sequences of operations against a model of every chunk's content."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar
from unittest.mock import patch

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampling import draws

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._schedule.eviction_prefetch import DemandFetch
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.trace import Moment, Trace
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import STAGES, DiskTier
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ALIGN_BYTES, ArenaBlock
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.swap_file import SwapFile
from patrickstar._tiers.transfer_counters import TransferCounters
from patrickstar.errors import BudgetError

CPU = torch.device("cpu")
DTYPES = {PARAM16: "bfloat16", PARAM32: "float32"}
KINDS = list(DTYPES)
UNIT = 2 * ALIGN_NUMEL
"""Bytes of the smallest 16-bit chunk."""
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST])


class CheckedChunk(Chunk):
    """Chunk that checks the device budget at every allocation and records when it is freed."""

    manager: ClassVar[ChunkManager]
    evicted: ClassVar[list["CheckedChunk"]] = []  # chunks freed on the device, in order
    dropped = False

    def allocate_device(self) -> None:
        super().allocate_device()
        assert real_bytes(self.manager, self)[0] <= self.manager.device_tier.chunkable_bytes

    def free_device(self, poison: bool) -> None:
        super().free_device(poison)
        self.evicted.append(self)


class CheckedHostTier(HostTier):
    """Host tier that checks its budget at every allocation and records the freed chunks."""

    manager: ClassVar[ChunkManager]

    def allocate(self, chunk: CheckedChunk) -> torch.Tensor:
        host = super().allocate(chunk)
        assert real_bytes(self.manager, chunk)[1] + self.other_bytes <= self.budget_bytes
        return host

    def free(self, chunk: CheckedChunk, *, for_good: bool = False) -> None:
        super().free(chunk, for_good=for_good)
        chunk.dropped = True


def real_bytes(manager: ChunkManager, *more: Chunk) -> tuple[int, int]:
    """Return the bytes allocated to chunks on the device (without page rounding) and in the host arena."""
    chunks = {*manager.chunks.values(), *more}
    device = sum(chunk.nbytes for chunk in chunks if chunk.device.present)
    if manager.device_tier.page_pool is None:
        assert device == sum(chunk.storage.nbytes() for chunk in chunks)
    else:
        pages = sum(round_up(chunk.nbytes) for chunk in chunks if chunk.device.present)
        assert manager.device_tier.page_pool.mapped_bytes - manager.device_tier.page_pool.parked_bytes == pages
    (arena,) = manager.host_tier.arenas
    base = arena.memory.data_ptr()
    memories = [chunk.host.memory for chunk in chunks if chunk.host.present]
    hosts = sorted((memory.data_ptr() - base, memory.nbytes) for memory in memories)
    assert all(end <= start for (_, end), (start, _) in pairwise((start, start + nbytes) for start, nbytes in hosts))
    assert all(start >= 0 and start + nbytes <= arena.nbytes for start, nbytes in hosts)
    return device, sum(nbytes for _, nbytes in hosts)


def named_figure(error: BudgetError, tier: str) -> int:
    match = re.search(rf"[Rr]aise (?:host_memory or )?{tier}_memory by at least (\d+) bytes", str(error))
    assert match, error
    assert int(match[1]) == error.short_bytes
    return int(match[1])


class Operations(RuleBasedStateMachine):
    """Each chunk is filled with its own number, a new one after every write."""

    @initialize(data=st.data(), device=st.integers(2, 24), host=st.integers(0, 48))
    def begin(self, data, device: int, host: int) -> None:
        self.manager = ChunkManager(CPU, device * UNIT, host * UNIT, poison=True)
        CheckedChunk.manager = CheckedHostTier.manager = self.manager
        host_tier = CheckedHostTier(host * UNIT, host * UNIT, Hardware(CPU).host_arena, True, self.manager.moved)
        self.manager.host_tier = self.manager.transfers.host_tier = self.manager.cache.host_tier = host_tier
        self.blocks: dict[ArenaBlock, int] = {}
        self.value: dict[CheckedChunk, int] = {}
        self.writes = 0
        names = st.tuples(st.sampled_from(KINDS), st.integers(0, 3))
        for kind, index in data.draw(st.lists(names, min_size=4, unique=True)):
            self.create(kind, index, size=data.draw(st.integers(1, 5)), tier=data.draw(tiers))

    def draw_chunk(self, data, *, pinned: bool | None = None) -> CheckedChunk:
        return data.draw(st.sampled_from([c for c in self.value if pinned is None or bool(c.pins) is pinned]))

    def draw_chunks(self, data) -> list[CheckedChunk]:
        return data.draw(st.lists(st.sampled_from(list(self.value)), unique=True, max_size=3)) if self.value else []

    def fill(self, chunk: CheckedChunk, on_device: bool) -> None:
        self.writes += 1
        identity = chunk.index + 4 * (chunk.kind == PARAM32)
        self.value[chunk] = identity * 30 + self.writes % 30 + 1  # at most 241: exact in bfloat16
        (chunk.on_device if on_device else chunk.on_host)(chunk.whole).fill_(self.value[chunk])
        self.manager.mark_written(chunk, on_device)

    def operate(self, call: Callable[[], None], protect: list[CheckedChunk], nbytes: int | None) -> bool:
        """Run an operation; check the evictions and write backs. Return False if it raised BudgetError.

        Args:
            call: the operation.
            protect: chunks that must stay on the device.
            nbytes: additional device bytes that it needs; None if it needs none.
        """
        manager = self.manager
        counters, manager.io_dispatch.counters = manager.counters, TransferCounters()
        before = {c: (c.device.valid, c.host.valid, c.transferred_bytes) for c in self.value}
        for chunk in self.value:
            chunk.dropped = False
        addresses = {c: c.host.memory.data_ptr() for c in self.value if c.host.present}
        manager.moved.clear()
        CheckedChunk.evicted.clear()
        error = None
        try:
            call()
        except BudgetError as caught:
            error = caught
        left = [*CheckedChunk.evicted]
        assert set(left) == {c for c in self.value if before[c][0] and not c.device.valid}
        fetched = [c for c in self.value if not before[c][0] and c.device.valid]
        for chunk, (_, host_valid, moved) in before.items():
            written_back = chunk in left and (not host_valid or chunk.dropped)
            assert chunk.transferred_bytes - moved == chunk.nbytes * ((chunk in fetched) + written_back)
        assert not any(c.pins for c in left)
        reported = set(manager.moved)
        assert {*fetched, *left} <= reported
        for chunk in self.value:
            if chunk in addresses and chunk.host.present and not chunk.dropped:
                assert chunk in reported or chunk.host.memory.data_ptr() == addresses[chunk], "a move was not reported"
        unmoved = reported - {*fetched, *left}
        assert all(c.host.present or c.dropped for c in unmoved), "a chunk was reported without a change"
        assert manager.counters.h2d_bytes == sum(c.nbytes for c in fetched)
        moved = sum(c.transferred_bytes - before[c][2] for c in self.value)
        assert manager.counters.d2h_bytes == moved - manager.counters.h2d_bytes
        if nbytes is not None:
            assert manager.counters.evictions == len(left)
            wanted = manager.device_tier.used + nbytes - sum(c.nbytes for c in fetched)
            others = [c for c in self.value if c not in protect]
            if error is None:
                assert wanted <= manager.device_tier.chunkable_bytes
                self.check_each_was_needed(left, others, wanted)
            else:
                assert named_figure(error, "device") == wanted - manager.device_tier.chunkable_bytes > 0
                assert not any(self.is_evictable(c) for c in others), "raised although a chunk could be evicted"
                if "the host is full" in str(error):
                    assert any(c.device_bytes and not c.pins for c in others)
        elif error is not None:
            assert named_figure(error, "host") == protect[0].nbytes - self.host_room() > 0
        manager.io_dispatch.counters = counters
        return error is None

    def check_each_was_needed(self, left: list[CheckedChunk], others: list[CheckedChunk], wanted: int) -> None:
        """`param16` is evicted down to the soft limit, other chunks only if the budget requires it."""
        manager = self.manager
        compute = manager.device_tier
        soft_limit = 0 if manager.cache.evict_everything else compute.soft_limit_bytes - compute.non_model_bytes
        limits = {PARAM16: min(soft_limit, compute.chunkable_bytes), PARAM32: compute.chunkable_bytes}
        if wanted > limits[PARAM16]:
            evictable = [c for c in others if c.kind == PARAM16 and self.is_evictable(c)]
            assert not evictable, "a chunk was kept above the soft limit"
        for chunk in reversed(left):
            wanted += chunk.nbytes
            assert wanted > limits[chunk.kind]

    def host_room(self) -> int:
        """Return the free host bytes, with all duplicate copies freed."""
        needed = sum(c.host_bytes for c in self.value if not c.device.valid)
        return self.manager.host_tier.budget_bytes - self.manager.host_tier.other_bytes - needed

    def is_evictable(self, chunk: CheckedChunk) -> bool:
        """Return True if a chunk can be evicted from the device."""
        return bool(chunk.device_bytes) and not chunk.pins and (chunk.host_bytes or self.host_room()) >= chunk.nbytes

    @rule(kind=st.sampled_from(KINDS), index=st.integers(0, 3), size=st.integers(1, 5), tier=tiers)
    def create(self, kind: str, index: int, size: int, tier: Tier) -> None:
        if (kind, index) in self.manager.chunks:
            return
        on_device = tier is Tier.DEVICE
        try:
            with patch("patrickstar._tiers.device_tier.Chunk", CheckedChunk):
                chunk = self.manager.new_chunk(kind, index, ALIGN_NUMEL * size, DTYPES[kind], tier)
            assert self.manager[kind, index] is chunk
        except BudgetError as error:
            needs = named_figure(error, tier.value)
            nbytes = ALIGN_NUMEL * size * getattr(torch, DTYPES[kind]).itemsize
            assert needs > 0 if on_device else needs == nbytes - self.host_room()
            return
        assert chunk.device.valid is on_device and chunk.host.valid is not on_device
        assert (chunk.current(chunk.whole) == 0).all()
        self.fill(chunk, on_device)

    @precondition(lambda self: any(not c.pins for c in self.value))
    @rule(data=st.data())
    def remove(self, data) -> None:
        chunk = self.draw_chunk(data, pinned=False)
        del self.value[chunk]
        self.manager.moved.clear()
        was_on_device = chunk.device.present
        self.manager.remove(chunk)
        assert chunk.device_bytes == chunk.host_bytes == 0
        assert was_on_device or chunk not in self.manager.moved, "a removed chunk is reported as moved"

    @rule(data=st.data())
    def fetch(self, data) -> None:
        chunks = self.draw_chunks(data)
        fetched = [c for c in chunks if not c.device.valid]
        if self.operate(lambda: self.manager.cache.fetch(chunks), chunks, sum(c.nbytes for c in fetched)):
            assert all(c.device.valid for c in chunks)
            assert all(c.host.valid is (c.host.present) for c in fetched)
            assert self.manager.transfers.keep_duplicates or not any(c.host.valid for c in fetched)

    @rule(data=st.data(), nbytes=st.integers(0, 4000) | st.integers(0, 15).map(lambda n: UNIT * n))
    def make_room(self, data, nbytes: int) -> None:
        protect = self.draw_chunks(data)
        self.operate(lambda: self.manager.cache.make_room(nbytes, protect), protect, nbytes)

    @precondition(lambda self: any(not c.pins for c in self.value))
    @rule(data=st.data(), tier=tiers)
    def move_to_tier(self, data, tier: Tier) -> None:
        chunk, on_device = self.draw_chunk(data, pinned=False), tier is Tier.DEVICE
        needs = chunk.nbytes if on_device and not chunk.device.valid else None
        if self.operate(lambda: self.manager.move_to_tier(chunk, tier), [chunk], needs):
            assert (chunk.device.valid, chunk.host.valid) == (on_device, not on_device)
            assert (chunk.device_bytes, chunk.host_bytes) == ((chunk.nbytes, 0) if on_device else (0, chunk.nbytes))

    @precondition(lambda self: self.value)
    @rule(data=st.data(), on_device=st.booleans())
    def write(self, data, on_device: bool) -> None:
        chunk = self.draw_chunk(data)
        if chunk.device.valid if on_device else chunk.host.valid and not chunk.pins:
            self.fill(chunk, on_device)

    @precondition(lambda self: any(c.device.valid for c in self.value))
    @rule(data=st.data(), pins=st.integers(0, 2))
    def pin(self, data, pins: int) -> None:
        data.draw(st.sampled_from([c for c in self.value if c.device.valid])).pins = pins

    @rule(nbytes=st.integers(0, 4000))
    def reserve(self, nbytes: int) -> None:
        room = self.host_room()
        try:
            block = self.manager.host_tier.allocate_block(nbytes)
        except BudgetError as error:
            assert 0 <= named_figure(error, "host") - (nbytes - room) < ALIGN_BYTES
            return
        self.writes += 1
        self.blocks[block] = self.writes % 251
        view = self.manager.host_tier.view(block, torch.uint8)
        assert view.numel() >= nbytes
        view.fill_(self.blocks[block])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release_block(self, data) -> None:
        block = data.draw(st.sampled_from(list(self.blocks)))
        del self.blocks[block]
        self.manager.host_tier.view(block, torch.uint8).fill_(255)
        self.manager.host_tier.release_block(block)

    @rule(non_model=st.integers(0, 5), soft_limit=st.integers(0, 120), everything=st.booleans(), keep=st.booleans())
    def conditions(self, non_model: int, soft_limit: int, everything: bool, keep: bool) -> None:
        self.manager.device_tier.non_model_bytes = min(UNIT * non_model, self.manager.device_tier.budget_bytes)
        self.manager.device_tier.soft_limit_bytes = self.manager.device_tier.budget_bytes * soft_limit // 100
        self.manager.cache.evict_everything = everything
        self.manager.transfers.keep_duplicates = keep

    @invariant()
    def content_is_kept_and_accounting_matches_real_bytes(self) -> None:
        manager = self.manager
        assert set(manager.chunks.values()) == set(self.value)
        for chunk, value in self.value.items():
            assert chunk.device.valid or chunk.host.valid
            assert chunk.device_bytes == (chunk.nbytes if chunk.device.valid else 0)
            assert not chunk.device.valid or (chunk.on_device(chunk.whole) == value).all()
            assert not chunk.host.valid or (chunk.on_host(chunk.whole) == value).all()
        host = manager.host_tier
        assert (manager.device_tier.used, host.used) == real_bytes(manager)
        assert host.other_bytes == sum(block.nbytes for block in self.blocks)
        assert manager.device_tier.used <= manager.device_tier.peak <= manager.device_tier.budget_bytes
        assert host.used <= host.peak and host.other_bytes <= host.other_peak
        assert host.free_bytes == host.budget_bytes - host.used - host.other_bytes >= 0
        assert all((host.view(block, torch.uint8) == number).all() for block, number in self.blocks.items())
        if manager.device_tier.page_pool is not None:
            assert manager.device_tier.page_pool.mapped_bytes + host.touched_bytes == manager.cache.resident_bytes


TestOperations = Operations.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=draws(200), stateful_step_count=30)


def test_the_policy_is_given_the_current_moment():
    manager = ChunkManager(CPU, 3 * UNIT, 10 * UNIT, poison=True)
    chunks = [manager.new_chunk(PARAM16, index, ALIGN_NUMEL, "bfloat16", Tier.HOST) for index in range(4)]
    manager.cache.eviction_policy = DemandFetch(Trace([Moment((index,)) for index in (0, 1, 2, 1, 3, 0, 2, 1)]), {}, 0)
    manager.cache.fetch(chunks[:3])
    manager.cache.now = 4
    manager.cache.fetch(chunks[3:])
    assert [chunk.device.valid for chunk in chunks] == [True, False, True, True]


def test_an_evicted_chunk_takes_the_host_memory_of_a_duplicate_before_it_goes_to_disk(tmp_path):
    disk, nbytes = DiskTier(SwapFile(tmp_path, 0), 4096), 4096
    manager = ChunkManager(CPU, 2 * nbytes, nbytes + (STAGES + 1) * disk.page_bytes, poison=True, disk=disk)
    first, second, third = (manager.new_chunk(PARAM16, i, nbytes // 2, "bfloat16", Tier.DISK) for i in range(3))
    for value, chunk in enumerate((first, second, third)):
        manager.cache.fetch([chunk])
        chunk.on_device(chunk.whole).fill_(value)
        manager.mark_written(chunk, on_device=True)
    assert first.host.valid and not second.host.present, "the first is evicted to the host"
    manager.move_to_tier(second, Tier.DISK)
    manager.cache.queue_fetches([first])
    manager.cache.make_room(nbytes, protect=(first,))
    assert third.disk.valid and first.host.present, (
        "no operator has accessed it: its copy stays, even if it has arrived"
    )
    manager.cache.fetch([first, second])
    manager.mark_written(second, on_device=True)
    manager.cache.make_room(nbytes, protect=(first,))
    assert second.host.valid and not first.host.present
    manager.cache.make_room(2 * nbytes, protect=())
    manager.transfers.complete(first)
    assert first.disk.valid, "the host is full of what is nowhere else"
    for value, chunk in enumerate((first, second, third)):
        manager.cache.fetch([chunk])
        assert chunk.on_device(chunk.whole).unique().tolist() == [value]
    manager.close()
