"""Moves of whole chunks between tiers: at once, or beside what computes, and then owned until they end."""

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.copy_streams import StreamTransfer
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._memory.device_tier import ComputeTier
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.io_dispatch import Transit
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


class Moves:
    """Brings chunks to the device and takes them away. What has to make room is decided elsewhere."""

    def __init__(self, compute: ComputeTier, host: HostTier, transit: Transit) -> None:
        self.compute = compute
        self.host = host
        self.transit = transit
        self.keep_duplicates = True
        """Whether a chunk's host copy outlives its fetch, so that it can be dropped from the device without a write."""
        self.in_flight: dict[Chunk, None] = {}

    @property
    def leaving_bytes(self) -> int:
        """Bytes of chunks that leave the device as soon as they are written."""
        return sum(chunk.nbytes for chunk in self.in_flight if chunk.leaving is not None)

    # Up

    def fetch(self, chunk: Chunk) -> None:
        """Copy a chunk to the device, or start to read it from disk or to gather it.

        Beside an accelerator the copy runs on its own stream: what is computed from now on is ordered after it, and
        the host does not wait.
        """
        if not chunk.host_valid:
            self.come(chunk, urgent=True)
            return
        if self.transit.hardware.beside:
            self.come(chunk, urgent=True)
            self.arrive(chunk)
            return
        self.compute.take(chunk)
        with self.transit.stalled():
            self.transit.copies.up_now(chunk)
        chunk.device_valid = True
        self._count_up(chunk)
        if not self.keep_duplicates:
            self.host.give(chunk, for_good=True)

    def come(self, chunk: Chunk, urgent: bool) -> None:
        """Start a chunk's transfer to the device. Raises OutOfMemoryError, with nothing changed, if that is full."""
        self.in_flight[chunk] = None  # first: Ctrl-C may strike between any two lines
        try:
            self.compute.take(chunk)
            chunk.coming = self.transit.up(chunk, urgent)
        except torch.OutOfMemoryError:
            del self.in_flight[chunk]
            if chunk.device_bytes:
                self.compute.give(chunk)
            raise
        self._count_up(chunk)

    def _count_up(self, chunk: Chunk) -> None:
        if chunk.shared:
            return  # of which its own part came from the host, and was counted
        self.transit.traffic.h2d_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes

    def arrive(self, chunk: Chunk) -> None:
        """Wait for a chunk that is coming; on a GPU those who compute wait, and not the training thread."""
        if isinstance(chunk.coming, StreamTransfer) and (self.keep_duplicates or chunk.shared):
            chunk.coming.order()
            chunk.host_reader, chunk.coming = chunk.coming, None
            self._landed(chunk)
        else:
            self.land(chunk)

    # Down

    def copy_down(self, chunk: Chunk) -> None:
        """Write a chunk to its place on the host, now, and let it leave the device."""
        if not chunk.host_valid:
            with self.transit.stalled():
                self.transit.copies.down_now(chunk)
            chunk.host_valid = True
            self._count_down(chunk)
        self.compute.give(chunk)

    def leave(self, chunk: Chunk, tier: Tier) -> None:
        """Begin to write a chunk to a tier below; it leaves the device when that has ended."""
        self.in_flight[chunk] = None
        chunk.leaving_to = tier
        if tier is Tier.HOST:
            chunk.leaving = self.transit.copies.down(chunk)
        else:
            chunk.leaving = self.transit.write(chunk, 0, chunk.device_bytes_view())
        self._count_down(chunk)

    def refresh(self, chunk: Chunk) -> None:
        """Have a shared chunk's bytes again where others lie over them."""
        self.in_flight[chunk] = None
        chunk.coming = self.transit.up(chunk, urgent=True)
        self.land(chunk)

    def hand_over(self, chunk: Chunk) -> None:
        """Begin to average the gradients over a shared chunk; it leaves the device when they are with its owners."""
        self.in_flight[chunk] = None
        chunk.leaving = self.transit.to_owners(chunk)

    def _count_down(self, chunk: Chunk) -> None:
        self.transit.traffic.d2h_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes

    # The end of what is on its way

    def land(self, chunk: Chunk) -> None:
        """A transfer has ended, or is waited for: the chunk is where it was going."""
        transfer = chunk.coming or chunk.leaving
        if transfer is None:  # Ctrl-C came before it began
            del self.in_flight[chunk]
            if chunk.on_device_now and not chunk.device_valid:
                self.compute.give(chunk)
            return
        self.transit.wait(transfer)
        if chunk.coming is not None:
            chunk.coming = None
            self._landed(chunk)
            return
        if chunk.shared:
            chunk.owners_valid = True
        elif chunk.leaving_to is Tier.HOST:
            chunk.host_valid = True
        else:
            chunk.disk_valid = True
        chunk.leaving = None
        self.compute.give(chunk)
        self.in_flight.pop(chunk, None)

    def _landed(self, chunk: Chunk) -> None:
        self.in_flight.pop(chunk, None)
        chunk.device_valid = True
        self.compute.moved.add(chunk)
        if not self.keep_duplicates and chunk.host is not None:
            self.host.give(chunk, for_good=True)

    def land_done(self) -> None:
        """Let land whose transfers have ended."""
        for chunk in list(self.in_flight):
            transfer = chunk.coming or chunk.leaving
            if transfer is None or transfer.done:
                self.land(chunk)

    @uninterrupted
    def settle(self, chunk: Chunk) -> None:
        """Have a chunk be where it is going, and none of its pages on their way."""
        if chunk in self.in_flight:
            self.land(chunk)
        for transfer in (*chunk.reading, *chunk.writing, *filter(None, [chunk.host_reader])):
            self.transit.wait(transfer)
        chunk.host_reader = None

    def abandon(self) -> None:
        """Cancel transfers: chunks stay where they were, but for those that have no other copy; these arrive."""
        for chunk in list(self.in_flight):
            only_copy = not (chunk.host_valid or chunk.disk_valid or chunk.shared)
            if chunk.coming is not None and only_copy:
                self.land(chunk)
            elif chunk.coming is not None:
                chunk.coming.cancel()
                chunk.coming = None
                self.compute.give(chunk)
            if chunk.leaving is not None:
                chunk.leaving.cancel()
                chunk.leaving = None
        self.in_flight.clear()
