"""Transfers of whole chunks between tiers: synchronous, or asynchronous and tracked until complete."""

import torch

from patrickstar._chunks.io_dispatch import IODispatch
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import Transfer
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import StreamTransfer
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar._tiers.host_tier import HostTier

# [Note: transfers in flight]
# Only the training thread decides which chunks move and changes their state; other threads and streams only copy bytes.
# A chunk that is being fetched owns its device memory, but is valid only after the training thread has completed the
# transfer (`ChunkTransfers.complete`). A chunk that is being evicted keeps its memory until then, and counts against
# the budget. So no operator reads bytes that have not arrived, and no memory is used twice.
#
# Decisions must not depend on the speed of a disk, else no plan could predict them. So planning treats a transfer as
# complete once it is issued: a chunk that is being fetched counts as present and may be evicted; a chunk that is being
# evicted counts as absent and is fetched again on access, even if its bytes are still on the device.


class ChunkTransfers:
    """Fetches and evicts chunks. Callers make room first."""

    def __init__(self, device_tier: DeviceTier, host_tier: HostTier, io_dispatch: IODispatch) -> None:
        self.device_tier = device_tier
        self.host_tier = host_tier
        self.io_dispatch = io_dispatch
        self.keep_duplicates = True
        """True to keep the host copy after a fetch, so that an eviction needs no write."""
        self.in_flight: dict[Chunk, Tier] = {}
        """Chunks that are being fetched or evicted, and the tiers that they move to."""

    @property
    def evicting_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.in_flight if chunk.device.reader is not None)

    # Fetch

    def fetch(self, chunk: Chunk) -> None:
        """Copy a chunk from the host to the device, or start to read it from disk or to gather it.

        On a GPU the copy runs on its own stream: later kernels are ordered after it, and the host does not wait.
        """
        if not chunk.host.valid:
            self.start_fetch(chunk, urgent=True)
            return
        if self.io_dispatch.hardware.has_gpu:
            self.start_fetch(chunk, urgent=True)
            self.complete(chunk)
            return
        self.device_tier.allocate(chunk)
        with profiler_range("fetch", chunk), self.io_dispatch.stalled(chunk):
            self.io_dispatch.up_now(chunk)
        chunk.device.valid = True
        self._count_h2d(chunk)
        if not self.keep_duplicates:
            self.host_tier.free(chunk, for_good=True)

    def start_fetch(self, chunk: Chunk, urgent: bool) -> None:
        """Start a chunk's transfer to the device. Raises OutOfMemoryError without any change."""
        chunk.finish_update()
        self.in_flight[chunk] = Tier.DEVICE  # first: Ctrl-C may interrupt between any two lines
        try:
            self.device_tier.allocate(chunk)
            with profiler_range("fetch" if urgent else "prefetch", chunk):
                self._start_fetch(chunk, urgent)
        except torch.OutOfMemoryError:
            del self.in_flight[chunk]
            if chunk.device_bytes:
                self.device_tier.free(chunk)
            raise
        self._count_h2d(chunk)

    def _count_h2d(self, chunk: Chunk) -> None:
        if chunk.sharded:
            return  # its local shard was counted when it was copied from the host
        self.io_dispatch.counters.h2d_bytes += chunk.nbytes
        chunk.transferred_bytes += chunk.nbytes
        chunk.fetched_bytes += chunk.nbytes

    def _start_fetch(self, chunk: Chunk, urgent: bool) -> None:
        chunk.device.writer = self.io_dispatch.start_fetch(chunk, urgent)
        if chunk.host.valid:
            chunk.host.reader = chunk.device.writer

    @staticmethod
    def would_wait(chunk: Chunk) -> bool:
        """Return whether the host would wait to complete the transfer of a chunk."""
        transfer = chunk.device.writer or chunk.device.reader
        return transfer is not None and not isinstance(transfer, StreamTransfer) and not transfer.done

    # Evict

    def evict_now(self, chunk: Chunk) -> None:
        """Copy a chunk to its host block synchronously and free its device memory."""
        if not chunk.host.valid:
            with profiler_range("evict", chunk), self.io_dispatch.stalled(chunk):
                self.io_dispatch.down_now(chunk)
            chunk.host.valid = True
            self._count_d2h(chunk)
        self.device_tier.free(chunk)

    def start_eviction(self, chunk: Chunk, tier: Tier) -> None:
        """Start to write a chunk to a tier below; its device memory is freed when that is complete."""
        self.in_flight[chunk] = tier
        with profiler_range("evict", chunk):
            if tier is Tier.HOST:
                chunk.device.reader = chunk.host.writer = self.io_dispatch.down(chunk)
            else:
                chunk.device.reader = self.io_dispatch.write(chunk, 0, chunk.device_bytes_view())
        self._count_d2h(chunk)

    def start_regather(self, chunk: Chunk) -> None:
        """Gather a sharded chunk into device memory that now holds other bytes (gradients, or stale parameters)."""
        self.in_flight[chunk] = Tier.DEVICE
        self._start_fetch(chunk, urgent=True)
        self.complete(chunk)

    def evict_by_reduction(self, chunk: Chunk) -> None:
        """Request the reduction of a sharded chunk's gradients; its device memory is freed when that is complete."""
        self.in_flight[chunk] = Tier.HOST
        chunk.device.reader = self.io_dispatch.request_reduction(chunk)

    def _count_d2h(self, chunk: Chunk) -> None:
        self.io_dispatch.counters.d2h_bytes += chunk.nbytes
        chunk.transferred_bytes += chunk.nbytes

    # New content

    def host_renewed(self, chunk: Chunk, urgent: bool) -> None:
        """Mark the host copy as the only valid one; beside an accelerator, start to copy it over the device copy."""
        self.complete(chunk)
        chunk.version += 1
        chunk.device.valid, chunk.host.valid, chunk.disk.valid = False, True, False
        if not chunk.device.present:
            return
        if not self.io_dispatch.hardware.has_gpu:
            self.device_tier.free(chunk)
            return
        self.in_flight[chunk] = Tier.DEVICE
        with profiler_range("prefetch", chunk):
            self._start_fetch(chunk, urgent)
        self._count_h2d(chunk)

    def exchange(self, chunk: Chunk, other: Chunk) -> None:
        """Exchange the contents of a settled chunk, which has host memory, and of one on the host.

        Beside an accelerator a copy on the device goes down, and the new content up; the host does not wait.
        """
        down = None
        if chunk.device.valid:
            with profiler_range("evict", chunk):
                down = self.io_dispatch.down(chunk)
            self._count_d2h(chunk)
            chunk.host.writer = down
        self.host_tier.exchange_blocks(chunk, other)
        for each in (chunk, other):
            each.version += 1
            each.device.valid, each.host.valid, each.disk.valid = False, True, False
        if down is None:
            return
        self.in_flight[chunk] = Tier.DEVICE
        with profiler_range("prefetch", chunk):
            chunk.device.writer = chunk.host.reader = self.io_dispatch.up(chunk, after=down)
        self._count_h2d(chunk)

    def disk_renewed(self, chunk: Chunk) -> None:
        """Mark the disk copy, whose pages were exchanged, as the only valid one, and free the others."""
        self.complete(chunk)
        chunk.version += 1
        chunk.disk.valid = True
        if chunk.device.present:
            self.device_tier.free(chunk)
        if chunk.host.present:
            self.host_tier.free(chunk, in_order=True)

    # Completion

    def complete(self, chunk: Chunk) -> None:
        """End the fetch or eviction of a chunk that is in flight; the host does not wait for an accelerator's copies.

        The device's work is ordered after these. The host settles its copy before it accesses it.
        """
        if chunk not in self.in_flight:
            return
        if chunk.device.writer is not None:
            self._arrive(chunk, chunk.device.writer)
            chunk.device.writer = None
            self._finish_fetch(chunk)
        elif chunk.device.reader is not None:
            self._arrive(chunk, chunk.device.reader)
            self._finish_eviction(chunk)
        else:  # Ctrl-C interrupted before it was issued
            del self.in_flight[chunk]
            if chunk.device.present and not chunk.device.valid:
                self.device_tier.free(chunk)

    def _arrive(self, chunk: Chunk, transfer: Transfer) -> None:
        """Wait for a transfer, or only order the device's work after it if that is enough."""
        if isinstance(transfer, StreamTransfer) and (chunk.device.writer is transfer or chunk.host.writer is transfer):
            with self.io_dispatch.ordered(chunk):
                transfer.order()
            return
        self.io_dispatch.wait(transfer)
        if chunk.host.reader is transfer:
            chunk.host.reader = None
        if chunk.host.writer is transfer:
            chunk.host.writer = None

    def _finish_fetch(self, chunk: Chunk) -> None:
        self.in_flight.pop(chunk, None)
        chunk.device.valid = True
        self.device_tier.moved.add(chunk)
        if self.keep_duplicates or not chunk.host.present:
            return
        if chunk.host.reader is not None:
            self.host_tier.free(chunk, in_order=True)
        else:
            self.host_tier.free(chunk, for_good=True)

    def _finish_eviction(self, chunk: Chunk) -> None:
        if chunk.sharded:
            chunk.shards_valid = True
        elif self.in_flight[chunk] is Tier.HOST:
            chunk.host.valid = True
        else:
            chunk.disk.valid = True
        chunk.device.reader = None
        self.device_tier.free(chunk)
        self.in_flight.pop(chunk, None)

    def complete_finished(self) -> None:
        """Complete the transfers that have ended, without waiting."""
        for chunk in list(self.in_flight):
            transfer = chunk.device.writer or chunk.device.reader
            if transfer is None or transfer.done:
                self.complete(chunk)

    def settle(self, chunk: Chunk, *, in_order: bool = False) -> None:
        """End all that uses a chunk's memory. `in_order`: but copies of an accelerator are only ordered."""
        chunk.finish_update()
        self.complete(chunk)
        chunk.disk.settle(write=True, wait=self.io_dispatch.wait)
        if not in_order:
            chunk.host.settle(write=True, wait=self.io_dispatch.wait)

    def cancel_all(self) -> None:
        """Cancel transfers: chunks stay where they were. A fetch of the only copy is completed instead."""
        for chunk in list(self.in_flight):
            only_copy = not (chunk.host.valid or chunk.disk.valid or chunk.sharded)
            if chunk.device.writer is not None and only_copy:
                self.complete(chunk)
            elif chunk.device.writer is not None:
                chunk.device.writer.cancel()
                chunk.device.writer = chunk.host.reader = None
                self.device_tier.free(chunk)
            if chunk.device.reader is not None:
                chunk.device.reader.cancel()
                chunk.device.reader = chunk.host.writer = None
        self.in_flight.clear()
