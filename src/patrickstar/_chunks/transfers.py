"""Transfers of whole chunks between tiers: synchronous, or asynchronous and tracked until complete."""

import torch

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import StreamTransfer
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.io_dispatch import IODispatch

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
        self.in_flight: dict[Chunk, None] = {}

    @property
    def evicting_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.in_flight if chunk.eviction_transfer is not None)

    # Fetch

    def fetch(self, chunk: Chunk) -> None:
        """Copy a chunk from the host to the device, or start to read it from disk or to gather it.

        On a GPU the copy runs on its own stream: later kernels are ordered after it, and the host does not wait.
        """
        if not chunk.host_valid:
            self.start_fetch(chunk, urgent=True)
            return
        if self.io_dispatch.hardware.has_gpu:
            self.start_fetch(chunk, urgent=True)
            self.wait_fetch(chunk)
            return
        self.device_tier.allocate(chunk)
        with profiler_range("fetch", chunk), self.io_dispatch.stalled(chunk):
            self.io_dispatch.up_now(chunk)
        chunk.device_valid = True
        self._count_h2d(chunk)
        if not self.keep_duplicates:
            self.host_tier.free(chunk, for_good=True)

    def start_fetch(self, chunk: Chunk, urgent: bool) -> None:
        """Start a chunk's transfer to the device. Raises OutOfMemoryError without any change."""
        chunk.wait_for_update()
        self.in_flight[chunk] = None  # first: Ctrl-C may interrupt between any two lines
        try:
            self.device_tier.allocate(chunk)
            with profiler_range("fetch" if urgent else "prefetch", chunk):
                chunk.fetch_transfer = self.io_dispatch.start_fetch(chunk, urgent)
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

    def wait_fetch(self, chunk: Chunk) -> None:
        """Wait for a fetch; on a GPU the compute stream waits, not the training thread."""
        if isinstance(chunk.fetch_transfer, StreamTransfer):
            with self.io_dispatch.ordered(chunk):
                chunk.fetch_transfer.order()
            chunk.h2d_transfer, chunk.fetch_transfer = chunk.fetch_transfer, None
            self._finish_fetch(chunk)
        else:
            self.complete(chunk)

    def complete_in_order(self, chunk: Chunk) -> None:
        """Complete the transfer of a chunk that is in flight, if any; copies of an accelerator are only ordered."""
        if chunk.fetch_transfer is not None:
            self.wait_fetch(chunk)
        elif chunk in self.in_flight:
            self.complete(chunk)

    @staticmethod
    def would_wait(chunk: Chunk) -> bool:
        """Return whether the host would wait to complete the transfer of a chunk."""
        transfer = chunk.fetch_transfer or chunk.eviction_transfer
        return transfer is not None and not isinstance(transfer, StreamTransfer) and not transfer.done

    # Evict

    def evict_now(self, chunk: Chunk) -> None:
        """Copy a chunk to its host block synchronously and free its device memory."""
        if not chunk.host_valid:
            with profiler_range("evict", chunk), self.io_dispatch.stalled(chunk):
                self.io_dispatch.down_now(chunk)
            chunk.host_valid = True
            self._count_d2h(chunk)
        self.device_tier.free(chunk)

    def start_eviction(self, chunk: Chunk, tier: Tier) -> None:
        """Start to write a chunk to a tier below; its device memory is freed when that is complete."""
        self.in_flight[chunk] = None
        chunk.eviction_tier = tier
        with profiler_range("evict", chunk):
            if tier is Tier.HOST:
                chunk.eviction_transfer = self.io_dispatch.down(chunk)
            else:
                chunk.eviction_transfer = self.io_dispatch.write(chunk, 0, chunk.device_bytes_view())
        self._count_d2h(chunk)

    def start_regather(self, chunk: Chunk) -> None:
        """Gather a sharded chunk into device memory that now holds other bytes (gradients, or stale parameters)."""
        self.in_flight[chunk] = None
        chunk.fetch_transfer = self.io_dispatch.start_fetch(chunk, urgent=True)
        self.complete(chunk)

    def evict_by_reduction(self, chunk: Chunk) -> None:
        """Request the reduction of a sharded chunk's gradients; its device memory is freed when that is complete."""
        self.in_flight[chunk] = None
        chunk.eviction_transfer = self.io_dispatch.request_reduction(chunk)

    def _count_d2h(self, chunk: Chunk) -> None:
        self.io_dispatch.counters.d2h_bytes += chunk.nbytes
        chunk.transferred_bytes += chunk.nbytes

    # New content

    @defer_sigint
    def host_renewed(self, chunk: Chunk, urgent: bool) -> None:
        """Mark the host copy as the only valid one; beside an accelerator, start to copy it over the device copy."""
        self.complete_in_order(chunk)
        chunk.version += 1
        chunk.device_valid, chunk.host_valid, chunk.disk_valid = False, True, False
        if not chunk.device_resident:
            return
        if not self.io_dispatch.hardware.has_gpu:
            self.device_tier.free(chunk)
            return
        self.in_flight[chunk] = None
        with profiler_range("prefetch", chunk):
            chunk.fetch_transfer = self.io_dispatch.start_fetch(chunk, urgent)
        self._count_h2d(chunk)

    @defer_sigint
    def exchange(self, chunk: Chunk, other: Chunk) -> None:
        """Exchange the contents of a chunk, which has host memory, and of one on the host. No update uses them.

        Beside an accelerator a copy on the device goes down, and the new content up; the host does not wait.
        """
        self.complete_in_order(chunk)
        down = None
        if chunk.device_valid:
            with profiler_range("evict", chunk):
                down = self.io_dispatch.down(chunk)
            self._count_d2h(chunk)
            chunk.d2h_transfer = down
        self.host_tier.exchange_blocks(chunk, other)
        for each in (chunk, other):
            each.version += 1
            each.device_valid, each.host_valid, each.disk_valid = False, True, False
        if down is None:
            return
        self.in_flight[chunk] = None
        with profiler_range("prefetch", chunk):
            chunk.fetch_transfer = self.io_dispatch.up(chunk, after=down)
        self._count_h2d(chunk)

    @defer_sigint
    def disk_renewed(self, chunk: Chunk) -> None:
        """Mark the disk copy, whose pages were exchanged, as the only valid one, and free the others."""
        self.complete_in_order(chunk)
        chunk.version += 1
        chunk.disk_valid = True
        if chunk.device_resident:
            self.device_tier.free(chunk)
        if chunk.host is not None:
            self.host_tier.free_in_order(chunk)

    # Completion

    def complete(self, chunk: Chunk) -> None:
        """Wait for a chunk's transfer and update the chunk's state; a D2H copy of an accelerator is only ordered."""
        transfer = chunk.fetch_transfer or chunk.eviction_transfer
        if transfer is None:  # Ctrl-C interrupted before it was issued
            del self.in_flight[chunk]
            if chunk.device_resident and not chunk.device_valid:
                self.device_tier.free(chunk)
            return
        if chunk.fetch_transfer is not None:
            self.io_dispatch.wait(transfer)
            chunk.fetch_transfer = None
            self._finish_fetch(chunk)
            return
        if isinstance(transfer, StreamTransfer) and chunk.eviction_tier is Tier.HOST and not chunk.sharded:
            # The device memory is reused in stream order. Only access by the host has to wait for the copy.
            transfer.order()
            chunk.d2h_transfer = transfer
        else:
            self.io_dispatch.wait(transfer)
        if chunk.sharded:
            chunk.shards_valid = True
        elif chunk.eviction_tier is Tier.HOST:
            chunk.host_valid = True
        else:
            chunk.disk_valid = True
        chunk.eviction_transfer = None
        self.device_tier.free(chunk)
        self.in_flight.pop(chunk, None)

    def _finish_fetch(self, chunk: Chunk) -> None:
        self.in_flight.pop(chunk, None)
        chunk.device_valid = True
        self.device_tier.moved.add(chunk)
        if self.keep_duplicates or chunk.host is None:
            return
        if chunk.h2d_transfer is not None:
            self.host_tier.free_in_order(chunk)
        else:
            self.host_tier.free(chunk, for_good=True)

    def complete_finished(self) -> None:
        """Complete the transfers that have ended, without waiting."""
        for chunk in list(self.in_flight):
            transfer = chunk.fetch_transfer or chunk.eviction_transfer
            if transfer is None or transfer.done:
                self.complete(chunk)

    @defer_sigint
    def wait_idle(self, chunk: Chunk) -> None:
        """Wait until no transfer of a chunk or of its pages is in flight."""
        self.complete_io(chunk)
        if chunk.h2d_transfer is not None:
            self.io_dispatch.wait(chunk.h2d_transfer)
        chunk.h2d_transfer = None
        chunk.wait_for_d2h()

    @defer_sigint
    def complete_io(self, chunk: Chunk) -> None:
        """Complete a chunk's transfer and wait for its pages; copies of an accelerator may only be ordered."""
        chunk.wait_for_update()
        if chunk in self.in_flight:
            self.complete(chunk)
        for transfer in (*chunk.page_reads, *chunk.page_writes.values()):
            self.io_dispatch.wait(transfer)

    def cancel_all(self) -> None:
        """Cancel transfers: chunks stay where they were. A fetch of the only copy is completed instead."""
        for chunk in list(self.in_flight):
            only_copy = not (chunk.host_valid or chunk.disk_valid or chunk.sharded)
            if chunk.fetch_transfer is not None and only_copy:
                self.complete(chunk)
            elif chunk.fetch_transfer is not None:
                chunk.fetch_transfer.cancel()
                chunk.fetch_transfer = None
                self.device_tier.free(chunk)
            if chunk.eviction_transfer is not None:
                chunk.eviction_transfer.cancel()
                chunk.eviction_transfer = None
        self.in_flight.clear()
