"""Moves of whole chunks between tiers: at once, or beside what computes, and then owned until they end."""

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.copy_streams import StreamTransfer
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.device_tier import DeviceTier
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.io_dispatch import IODispatch
from patrickstar._schedule.placement import Tier

# [Note: what is on its way]
# The training thread alone decides what moves, and all that is known of chunks changes there; other threads and streams
# only move bytes. A chunk that is coming has taken its device memory, and is valid once the training thread has seen
# that its transfer ended (`land`). A chunk that is leaving keeps its memory until then, and counts. So nothing computes
# on bytes that have not arrived, and no memory is used twice.
#
# Decisions must not depend on how fast a disk is, or no plan could say what moves. So they take a move for done when it
# begins: who comes is there, and may be sent away again; who leaves is gone, and whoever needs it has it fetched, even
# where its bytes have not left yet.


class ChunkTransfers:
    """Brings chunks to the device and takes them away. What has to make room is decided elsewhere."""

    def __init__(self, compute: DeviceTier, host: HostTier, io_dispatch: IODispatch) -> None:
        self.device_tier = compute
        self.host_tier = host
        self.io_dispatch = io_dispatch
        self.keep_duplicates = True
        """Whether a chunk's host copy outlives its fetch, so that it can be dropped from the device without a write."""
        self.in_flight: dict[Chunk, None] = {}

    @property
    def evicting_bytes(self) -> int:
        """Bytes of chunks that leave the device as soon as they are written."""
        return sum(chunk.nbytes for chunk in self.in_flight if chunk.eviction_transfer is not None)

    # Up

    def fetch(self, chunk: Chunk) -> None:
        """Copy a chunk to the device, or start to read it from disk or to gather it.

        Beside an accelerator the copy runs on its own stream: what is computed from now on is ordered after it, and
        the host does not wait.
        """
        if not chunk.host_valid:
            self.start_fetch(chunk, urgent=True)
            return
        if self.io_dispatch.hardware.has_gpu:
            self.start_fetch(chunk, urgent=True)
            self.wait_fetch(chunk)
            return
        self.device_tier.allocate(chunk)
        with self.io_dispatch.stalled():
            self.io_dispatch.copies.up_now(chunk)
        chunk.device_valid = True
        self._count_h2d(chunk)
        if not self.keep_duplicates:
            self.host_tier.free(chunk, for_good=True)

    def start_fetch(self, chunk: Chunk, urgent: bool) -> None:
        """Start a chunk's transfer to the device. Raises OutOfMemoryError, with nothing changed, if that is full."""
        self.in_flight[chunk] = None  # first: Ctrl-C may strike between any two lines
        try:
            self.device_tier.allocate(chunk)
            chunk.fetch_transfer = self.io_dispatch.up(chunk, urgent)
        except torch.OutOfMemoryError:
            del self.in_flight[chunk]
            if chunk.device_bytes:
                self.device_tier.free(chunk)
            raise
        self._count_h2d(chunk)

    def _count_h2d(self, chunk: Chunk) -> None:
        if chunk.sharded:
            return  # of which its own part came from the host, and was counted
        self.io_dispatch.counters.h2d_bytes += chunk.nbytes
        chunk.transferred_bytes += chunk.nbytes

    def wait_fetch(self, chunk: Chunk) -> None:
        """Wait for a chunk that is coming; on a GPU those who compute wait, and not the training thread."""
        if isinstance(chunk.fetch_transfer, StreamTransfer) and (self.keep_duplicates or chunk.sharded):
            chunk.fetch_transfer.order()
            chunk.h2d_transfer, chunk.fetch_transfer = chunk.fetch_transfer, None
            self._complete_one(chunk)
        else:
            self.complete(chunk)

    # Down

    def evict_now(self, chunk: Chunk) -> None:
        """Write a chunk to its place on the host, now, and let it leave the device."""
        if not chunk.host_valid:
            with self.io_dispatch.stalled():
                self.io_dispatch.copies.down_now(chunk)
            chunk.host_valid = True
            self._count_d2h(chunk)
        self.device_tier.free(chunk)

    def start_eviction(self, chunk: Chunk, tier: Tier) -> None:
        """Begin to write a chunk to a tier below; it leaves the device when that has ended."""
        self.in_flight[chunk] = None
        chunk.eviction_tier = tier
        if tier is Tier.HOST:
            chunk.eviction_transfer = self.io_dispatch.copies.down(chunk)
        else:
            chunk.eviction_transfer = self.io_dispatch.write(chunk, 0, chunk.device_bytes_view())
        self._count_d2h(chunk)

    def start_regather(self, chunk: Chunk) -> None:
        """Have a shared chunk's bytes again where others lie over them."""
        self.in_flight[chunk] = None
        chunk.fetch_transfer = self.io_dispatch.up(chunk, urgent=True)
        self.complete(chunk)

    def start_reduction(self, chunk: Chunk) -> None:
        """Begin to average the gradients over a shared chunk; it leaves the device when they are with its owners."""
        self.in_flight[chunk] = None
        chunk.eviction_transfer = self.io_dispatch.to_owners(chunk)

    def _count_d2h(self, chunk: Chunk) -> None:
        self.io_dispatch.counters.d2h_bytes += chunk.nbytes
        chunk.transferred_bytes += chunk.nbytes

    # The end of what is on its way

    def complete(self, chunk: Chunk) -> None:
        """A transfer has ended, or is waited for: the chunk is where it was going."""
        transfer = chunk.fetch_transfer or chunk.eviction_transfer
        if transfer is None:  # Ctrl-C came before it began
            del self.in_flight[chunk]
            if chunk.device_resident and not chunk.device_valid:
                self.device_tier.free(chunk)
            return
        self.io_dispatch.wait(transfer)
        if chunk.fetch_transfer is not None:
            chunk.fetch_transfer = None
            self._complete_one(chunk)
            return
        if chunk.sharded:
            chunk.shards_valid = True
        elif chunk.eviction_tier is Tier.HOST:
            chunk.host_valid = True
        else:
            chunk.disk_valid = True
        chunk.eviction_transfer = None
        self.device_tier.free(chunk)
        self.in_flight.pop(chunk, None)

    def _complete_one(self, chunk: Chunk) -> None:
        self.in_flight.pop(chunk, None)
        chunk.device_valid = True
        self.device_tier.moved.add(chunk)
        if not self.keep_duplicates and chunk.host is not None:
            self.host_tier.free(chunk, for_good=True)

    def complete_finished(self) -> None:
        """Let land whose transfers have ended."""
        for chunk in list(self.in_flight):
            transfer = chunk.fetch_transfer or chunk.eviction_transfer
            if transfer is None or transfer.done:
                self.complete(chunk)

    @defer_sigint
    def wait_idle(self, chunk: Chunk) -> None:
        """Have a chunk be where it is going, and none of its pages on their way."""
        if chunk in self.in_flight:
            self.complete(chunk)
        for transfer in (*chunk.page_reads, *chunk.page_writes, *filter(None, [chunk.h2d_transfer])):
            self.io_dispatch.wait(transfer)
        chunk.h2d_transfer = None

    def cancel_all(self) -> None:
        """Cancel transfers: chunks stay where they were, but for those that have no other copy; these arrive."""
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
