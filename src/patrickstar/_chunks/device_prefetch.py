"""Prefetch of chunks to the device, as a plan says, while there is room."""

from collections import deque
from collections.abc import Iterable

import torch

from patrickstar._chunks.device_eviction import DeviceEviction
from patrickstar._schedule.prefetch import PrefetchPolicy
from patrickstar._tiers.chunk import Chunk


class DevicePrefetch(DeviceEviction):
    """Prefetches of one engine's chunks: the part of `ChunkManager` that fetches before an access."""

    prefetch_policy: PrefetchPolicy | None = None
    """Set while a planned iteration follows its trace."""

    def poll_transfers(self) -> None:
        """Complete finished transfers and start the prefetches that are due."""
        ahead = self.prefetch_policy is not None and self.prefetch_policy.ahead
        if ahead or self._fetch_queue or self.transfers.in_flight:
            self._poll_transfers()

    def _poll_transfers(self) -> None:
        self.transfers.complete_finished()
        if self.prefetch_policy is None or self.evict_everything:
            if self._fetch_queue:
                self._start_queued_fetches()
            return
        if self.prefetch_policy.ahead:
            self._queue_prefetches(self.prefetch_policy)
            self._start_queued_fetches()
        self.device_tier.trim(self.device_tier.chunkable_bytes)

    def queue_fetches(self, chunks: Iterable[Chunk]) -> None:
        """Prefetch chunks that all have room, in order."""
        self._fetch_queue.extend(chunk for chunk in chunks if chunk not in self._fetch_queue)
        self._ahead.update(self._fetch_queue)
        self._start_queued_fetches()

    def _start_queued_fetches(self) -> None:
        """Start queued fetches in order, up to the first that must wait for evictions or an update of its host copy."""
        while self._fetch_queue:
            chunk = self._fetch_queue[0]
            if self.decides_alike:
                self._finish_evictions(chunk)
            updating = chunk.updating and not chunk.device_bytes
            if (
                updating
                or (chunk.disk.has_writes and not chunk.host.valid)
                or chunk.device.reader is not None
                or self.device_tier.used + chunk.nbytes > self.device_tier.chunkable_bytes
            ):
                break
            self._fetch_queue.popleft()
            if chunk.device_bytes:
                continue
            try:
                self.transfers.start_fetch(chunk, urgent=False)
            except torch.OutOfMemoryError:
                # Stop prefetching. Chunks are then fetched on access, where memory is freed for them.
                self.counters.memory_retries += 1
                self.prefetch_policy = None
                self._fetch_queue.clear()

    def _finish_evictions(self, newcomer: Chunk) -> None:
        """Wait for evictions that have started, if they leave room for a chunk."""
        started = [
            chunk
            for chunk in self.transfers.in_flight
            if chunk.device.reader is not None and chunk.device.reader.started
        ]
        device = self.device_tier
        remaining = device.used - sum(chunk.nbytes for chunk in started)
        if remaining + newcomer.nbytes <= device.chunkable_bytes:
            for chunk in started:
                if chunk is newcomer or device.used + newcomer.nbytes > device.chunkable_bytes:
                    self.transfers.complete(chunk)

    def _queue_prefetches(self, policy: PrefetchPolicy) -> None:
        present = {
            index for index, chunk in self.param16.items() if chunk.device.present and chunk.device.reader is None
        }
        present.update(chunk.index for chunk in self._fetch_queue)
        if len(present) == len(self.param16):
            return
        held = {index for index in present if self.param16[index].pins or self.param16[index].has_gradients}
        for move in policy.prefetches(self.now, present, held, self.device_tier.budget_bytes):
            # Do not gather shards for the next iteration: the optimizer step will change them.
            if self.param16[move.fetch].sharded and policy.trace.next_use(move.fetch, self.now) >= len(
                policy.trace.moments
            ):
                break
            self._fetch_queue.append(self.param16[move.fetch])
            self._ahead.add(self.param16[move.fetch])
            for index in move.evict:
                self._evict(self.param16[index])

    def cancel_prefetch(self) -> None:
        """Stop prefetching: the plan is over. Queued fetches that have room start, after updates of their chunks."""
        self.prefetch_policy = None
        if self._fetch_queue and self.io_dispatch.failed is None:
            for chunk in list(self.transfers.in_flight):
                if chunk.device.reader is not None:
                    self.transfers.complete(chunk)
            self._start_queued_fetches()
        free = self.device_tier.chunkable_bytes - self.device_tier.used
        waiting, self._fetch_queue = self._fetch_queue, deque()
        for chunk in waiting:
            free -= chunk.nbytes
            if chunk.updating and free >= 0:
                self._fetch_queue.append(chunk)
