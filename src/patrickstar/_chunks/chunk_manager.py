"""Chunk manager: moves chunks between the tiers within byte budgets (PatrickStar, Algorithms 1 and 2)."""

from collections.abc import Iterable

import torch

from patrickstar._chunks.device_cache import DeviceCache
from patrickstar._chunks.io_dispatch import IODispatch, PeerTransfers
from patrickstar._chunks.transfers import ChunkTransfers
from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.schema import HOST_ONLY, PARAM16, SHARD16
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import StepTimeline
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar._tiers.disk_tier import STAGES, DiskTier
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ALIGN_BYTES, ArenaBlock
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.timeline import Timeline
from patrickstar._tiers.transfer_counters import TransferCounters


class ChunkManager:
    """Owner of one engine's chunks and of their memory on the tiers.

    `DeviceCache` decides which chunks are on the device; `ChunkTransfers` moves them. See [Note: transfers in flight].
    """

    def __init__(
        self,
        device: torch.device,
        device_budget_bytes: int,
        host_budget_bytes: int,
        poison: bool,
        *,
        disk: DiskTier | None = None,
        arena_bytes: int | None = None,
        hardware: Hardware | None = None,
        comm: PeerTransfers | None = None,
        evict_everything: bool = False,
    ) -> None:
        self.device = device
        self.timeline: Timeline | None = None
        """Recorder of the step, if it is recorded."""
        hardware = hardware if hardware is not None else Hardware(device)
        arena_bytes = host_budget_bytes if arena_bytes is None else arena_bytes
        device_tier = DeviceTier(hardware, device_budget_bytes, poison)
        self.moved = device_tier.moved
        """Chunks whose memory was allocated, freed or moved since their Parameters were pointed at it."""
        host_tier = HostTier(host_budget_bytes, arena_bytes, hardware.host_arena, poison, self.moved)
        page = torch.empty(0, dtype=torch.uint8, device=hardware.host_device)
        if disk is not None:
            page = host_tier.view(host_tier.allocate_block(disk.page_bytes), torch.uint8)
            # Staging buffers that the worker threads allocate themselves.
            host_tier.other_bytes += STAGES * disk.page_bytes
        self.hardware = hardware
        self.device_tier, self.host_tier, self.disk_tier = device_tier, host_tier, disk
        self.io_dispatch = IODispatch(hardware, disk, page, comm)
        self.transfers = ChunkTransfers(device_tier, host_tier, self.io_dispatch)
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.param16: dict[int, Chunk] = {}
        """Chunks of the `param16` list by index: operators read these."""
        self.cache = DeviceCache(self.chunks, self.param16, self.transfers, evict_everything)
        """Chooses the chunks that are on the device."""

    def __getitem__(self, key: tuple[str, int]) -> Chunk:
        return self.chunks[key]

    @property
    def counters(self) -> TransferCounters:
        return self.io_dispatch.counters

    def new_chunk(self, kind: str, index: int, numel: int, dtype: str, tier: Tier) -> Chunk:
        """Create a chunk of zeros on one tier.

        In memory the zeros are written: a meter of resident memory would miss untouched pages, and memory that the
        machine does not have is missed now and not in a step. `fill_` faults pages in on all threads, unlike `zero_`.
        """
        chunk = self.device_tier.new(kind, index, numel, dtype)
        if tier is Tier.DEVICE:
            self.cache.make_room(chunk.nbytes, protect=())
            self.cache.with_retry(self.device_tier.allocate, chunk, protect=())
            chunk.on_device(chunk.whole).fill_(0)
            chunk.device.valid = True
        elif tier is Tier.HOST:
            self.cache.make_host_room(chunk)
            self.free_host(chunk.nbytes)
            self.host_tier.make_room(chunk.nbytes, repr(chunk))
            self.host_tier.allocate(chunk).fill_(0)
            chunk.host.valid = True
        else:
            assert self.disk_tier is not None, f"cannot place {chunk} on disk: there is no disk tier"
            self.disk_tier.reserve(chunk)
            chunk.disk.valid = True
        self.chunks[chunk.kind, chunk.index] = chunk
        if chunk.kind == PARAM16:
            self.param16[chunk.index] = chunk
        return chunk

    def new_shared_chunk(self, kind: str, index: int, numel: int, dtype: str) -> Chunk:
        """Create a chunk that is sharded over several processes. It uses no memory yet."""
        chunk = self.device_tier.new(kind, index, numel, dtype)
        chunk.sharded = chunk.shards_valid = True
        self.chunks[chunk.kind, chunk.index] = self.param16[chunk.index] = chunk
        return chunk

    def remove(self, chunk: Chunk, *, for_good: bool = False) -> None:
        """Remove a chunk; `for_good` also returns its memory on the host to the system, as `HostTier.free`."""
        if self.io_dispatch.failed is None:
            self.transfers.settle(chunk)
        self.cache.forget(chunk)
        if chunk.device_bytes:
            self.device_tier.free(chunk)
        if chunk.host.present:
            self.host_tier.free(chunk, for_good=for_good)
        chunk.memory.close()
        chunk.deferred = None  # it refers to the engine
        self.device_tier.forget(chunk)
        if self.disk_tier is not None:
            self.disk_tier.release(chunk)
        del self.chunks[chunk.kind, chunk.index]
        if chunk.kind == PARAM16:
            del self.param16[chunk.index]

    def complete_transfers(self) -> None:
        """Complete all transfers in flight and stop prefetching."""
        self.cache.cancel_prefetch()
        self.cache.drop_queue()
        for chunk in list(self.transfers.in_flight):
            self.transfers.settle(chunk)

    def cancel_transfers(self) -> None:
        """Cancel the transfers in flight: chunks stay on the tier they were on."""
        self.cache.drop_queue()
        self.transfers.cancel_all()

    def drop(self, chunk: Chunk) -> None:
        """Discard the gradients in a sharded chunk; free its device memory, or gather it again if it is pinned."""
        if chunk.pins:
            return self.regather(chunk)
        chunk.shards_valid = True
        self.device_tier.free(chunk)

    def regather(self, chunk: Chunk) -> None:
        """Gather a sharded chunk again, into the device memory that it has."""
        chunk.shards_valid = True
        self.transfers.start_regather(chunk)

    def drop_gathered(self, indices: Iterable[int]) -> None:
        """Free the gathered copies of these chunks, which are stale: the shards have changed."""
        self.cache.cancel_prefetch()
        for index in indices:
            chunk = self.param16[index]
            if chunk.sharded:
                self.transfers.complete(chunk)
                self.cache.withdraw_hold(chunk)
                if chunk.device.present:
                    self.device_tier.free(chunk)
                chunk.shards_valid = True

    def close(self) -> None:
        """Cancel transfers and stop the worker threads. Chunks in memory stay readable."""
        self.cancel_transfers()
        self.io_dispatch.close()
        self.device_tier.close()

    # Records

    def begin_timeline(self) -> None:
        """Record the step that begins."""
        accelerator, seconds = self.hardware.accelerator, self.hardware.seconds
        self.io_dispatch.copies.timed = accelerator is not None
        clock = None if accelerator is None else DeviceClock(accelerator, seconds)
        self._record(Timeline(seconds, clock, self.chunks.values()))

    def end_timeline(self, step: int) -> StepTimeline | None:
        """End the record of a step, and return it; None if it was not recorded. Waits for an accelerator."""
        timeline = self.timeline
        if timeline is None:
            return None
        if self.hardware.accelerator is not None:
            self.hardware.accelerator.synchronize()
        self.begin_phase("")
        self._record(None)
        return timeline.finish(step)

    def _record(self, timeline: Timeline | None) -> None:
        self.timeline = self.io_dispatch.timeline = self.device_tier.timeline = self.host_tier.timeline = timeline

    def begin_phase(self, name: str) -> None:
        """Note in the record, if there is one, that a part of the step begins: forward, backward or step."""
        if self.timeline is not None:
            self.timeline.phase(name)
            self.host_tier.note_other()
            self.timeline.disk_bytes(0 if self.disk_tier is None else self.disk_tier.file.used_bytes)

    # Access

    def ensure_in_memory(self, *chunks: Chunk, in_order: bool = False) -> None:
        """Ensure that chunks are on the device or host, and that no copy reads them, so that they can be written.

        Views of a host copy wait until the device has written it. `in_order`: the caller waits for copies itself.
        """
        missing = any(chunk.device.writer is not None or not chunk.in_memory for chunk in chunks)
        if missing and (fetched := [chunk for chunk in chunks if not self.load_shard(chunk)]):
            self.cache.fetch(fetched)
        for chunk in () if in_order else chunks:
            if not chunk.device.valid:  # an earlier fetch, only ordered on streams, may still read what is written
                chunk.host.settle(write=True, wait=self.io_dispatch.wait)

    def load_shard(self, chunk: Chunk, *, read: bool = True) -> bool:
        """Move a shard of `param16` that is only on disk to the host. Return False for other chunks.

        `read`: with its content, which is not about to be overwritten.
        """
        if chunk.kind != SHARD16 or chunk.device.present or chunk.host.valid:
            return False
        aside, self.host_tier.set_aside_bytes = self.host_tier.set_aside_bytes, 0
        try:
            self.free_host(chunk.nbytes)
            self._read_to_host(chunk, read=read)
        finally:
            self.host_tier.set_aside_bytes = aside
        return True

    def mark_written(self, chunk: Chunk, on_device: bool) -> None:
        """Mark the device copy (or the host copy) as the only valid one after an in-place write."""
        assert chunk.device.writer is None and chunk.device.reader is None, (
            f"{chunk} was written while a transfer was in flight"
        )
        chunk.shards_valid = False
        chunk.device.valid = on_device
        chunk.host.valid = not on_device
        chunk.disk.valid = False
        chunk.version += 1
        if not on_device and chunk.device_bytes:
            self.device_tier.free(chunk)

    def move_to_tier(self, chunk: Chunk, tier: Tier) -> None:
        """Move the chunk to one tier and free its memory on the others, so that it can be written there.

        On the host, the device may have yet to write it (`Copy.writer`).
        """
        self.transfers.settle(chunk, in_order=True)
        if tier is Tier.DEVICE:
            if not chunk.device.valid:
                self.cache.fetch([chunk])
            if chunk.host.present:
                self.host_tier.free(chunk, for_good=True)
        elif tier is Tier.HOST:
            if not chunk.in_memory:
                self._read_to_host(chunk)
            elif chunk.device_bytes:
                if not chunk.host_bytes:
                    self.cache.make_host_room(chunk)
                if not self.cache.evict_to_host(chunk):
                    self.host_tier.make_room(chunk.nbytes, repr(chunk))
        elif not chunk.disk.valid or chunk.in_memory:
            self._move_to_disk(chunk)

    def exchange(self, chunk: Chunk, other: Chunk) -> bool:
        """Exchange the contents of a settled chunk in memory and of one on the host, by exchanging their memory there.

        Return False if that is not possible: without an accelerator for a chunk on the device, or without room.
        """
        assert self.transfers.in_flight.keys().isdisjoint((chunk, other)), f"{chunk} or {other} is in flight"
        if chunk.device.valid and not (self.hardware.has_gpu and self.cache.ensure_host_block(chunk)):
            return False
        if not chunk.device.valid and not chunk.host.valid:
            return False
        self.cache.withdraw_hold(chunk)  # its device memory is filled anew
        self.transfers.exchange(chunk, other)
        return True

    def _read_to_host(self, chunk: Chunk, *, read: bool = True) -> None:
        self.host_tier.make_room(chunk.nbytes, repr(chunk))
        memory = self.host_tier.allocate(chunk).view(torch.uint8)
        if read:
            self.io_dispatch.wait(self.io_dispatch.read(chunk, 0, memory, urgent=True))
        chunk.host.valid = True

    def _move_to_disk(self, chunk: Chunk) -> None:
        chunk.host.settle(write=True, wait=self.io_dispatch.wait)  # a reduction may still write a shard
        if not chunk.disk.valid:
            self.io_dispatch.wait(self.io_dispatch.write(chunk, 0, chunk.current(chunk.whole).view(torch.uint8)))
            chunk.disk.valid = True
        if chunk.device_bytes:
            self.device_tier.free(chunk)
        if chunk.host.present:
            self.host_tier.free(chunk)

    # Host memory other than chunks

    def allocate_host(self, nbytes: int, description: str) -> ArenaBlock:
        """Allocate host memory that is no chunk. With a disk tier, chunks are moved to disk to make room."""
        self.free_host(round_up(nbytes, ALIGN_BYTES))
        return self.host_tier.allocate_block(nbytes, description)

    def free_host(self, nbytes: int) -> bool:
        """Move chunks from the host to the disk tier, if there is one, until `nbytes` fit. Return True if they fit."""
        if self.disk_tier is not None:
            movable = [
                chunk
                for chunk in self.chunks.values()
                if chunk.host.valid and not chunk.device_bytes and not chunk.pins and chunk.kind not in HOST_ONLY
            ]
            # Optimizer chunks first: host memory saves them the least time, and the last ones are needed the latest.
            for chunk in sorted(movable, key=lambda chunk: (chunk.kind in (PARAM16, SHARD16), -chunk.index)):
                if self.host_tier.has_room(nbytes):
                    break
                self.move_to_tier(chunk, Tier.DISK)
                self.moved.add(chunk)
        return self.host_tier.has_room(nbytes)

    def count_transfer(self, nbytes: int, *, to_device: bool, by_kernel: bool = False) -> None:
        """Count a copy between host and device of bytes that are not a whole chunk.

        `by_kernel`: it is part of an update, so that a dry run adds its time there.
        """
        if not by_kernel:
            self.hardware.on_partial_copy(nbytes, to_device=to_device)
        if to_device:
            self.counters.h2d_bytes += nbytes
        else:
            self.counters.d2h_bytes += nbytes
