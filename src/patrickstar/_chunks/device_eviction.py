"""Eviction of chunks from the device, within byte budgets (PatrickStar, Algorithm 2)."""

import logging
from collections import deque
from collections.abc import Callable, Iterable

import torch

from patrickstar._chunks.transfers import ChunkTransfers
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import PARAM16
from patrickstar._schedule.eviction import EvictionPolicy, ListOrder
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.io_dispatch import IODispatch
from patrickstar._tiers.transfer_counters import TransferCounters
from patrickstar.errors import BudgetError

_log = logging.getLogger(__name__)


class DeviceEviction:
    """Chunks of one engine and their eviction from the device: the part of `ChunkManager` that frees device memory."""

    def __init__(
        self, device_tier: DeviceTier, host_tier: HostTier, io_dispatch: IODispatch, evict_everything: bool
    ) -> None:
        self.hardware = io_dispatch.hardware
        self.device_tier = device_tier
        self.host_tier = host_tier
        self.io_dispatch = io_dispatch
        self.transfers = ChunkTransfers(device_tier, host_tier, io_dispatch)
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.param16: dict[int, Chunk] = {}
        """Chunks of the `param16` list by index: operators read these."""
        self.eviction_policy: EvictionPolicy = ListOrder()
        self.evict_everything = evict_everything
        self.now = 0
        self._fetch_queue: deque[Chunk] = deque()
        """Prefetches that start once the evictions before them have freed enough memory."""
        self._ahead: set[Chunk] = set()
        """Prefetched chunks that no operator has accessed since: whether they have arrived depends on transfers."""
        self.decides_alike = False
        """True if no decision may depend on whether a transfer has ended. See [Note: linked processes]."""
        self.held: list[Chunk] = []
        """Chunks pinned until the iteration ends. See [Note: resident iterations]."""

    @property
    def param_budget_bytes(self) -> int:
        """Part of the device budget that optimizer chunks on the device leave for `param16` and non-model data."""
        others = (
            chunk.nbytes
            for (kind, _), chunk in self.chunks.items()
            if kind != PARAM16 and chunk.device.present and chunk.device.reader is None
        )
        return self.device_tier.budget_bytes - sum(others)

    @property
    def disk_tier(self) -> DiskTier | None:
        return self.io_dispatch.disk

    @property
    def counters(self) -> TransferCounters:
        return self.io_dispatch.counters

    @property
    def settled_bytes(self) -> int:
        """Bytes of chunks on the device once all evictions in flight are complete."""
        return self.device_tier.used - self.transfers.evicting_bytes

    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0, *, gently: bool = False) -> None:
        """Evict chunks until `nbytes` more fit into the part of the budget left for chunks.

        `param16` chunks are evicted down to the soft limit (80 % of the budget in warm-up); other idle chunks only if
        the budget itself would be exceeded (beside an accelerator: the soft limit), and not if `gently`. `later_bytes`
        are requested next: only the error counts them. Raises BudgetError.
        """
        soft_chunkable = self.device_tier.soft_chunkable_bytes
        soft_limit = 0 if self.evict_everything else soft_chunkable
        if self.device_tier.used + self._queued_bytes + nbytes > soft_limit:
            self._evict_until(nbytes, soft_limit, set(protect), later_bytes, gently)
        self.device_tier.trim(soft_chunkable - nbytes)

    def _evict_until(self, nbytes: int, soft_limit: int, protected: set[Chunk], later_bytes: int, gently: bool) -> None:
        evictable = self._evictable(protected)
        self._evict_params(evictable, soft_limit - nbytes)
        limit = others_limit = self.device_tier.chunkable_bytes
        if self.hardware.has_gpu:  # an operator may need the rest, and would fail
            limit = min(limit, self.device_tier.soft_chunkable_bytes)
            if self.device_tier.soft_limit_bytes:  # else nothing is known yet, and states would move in vain
                others_limit = limit
        for chunk in evictable:
            if gently or self._bytes_after_transfers + nbytes <= others_limit:
                break
            if chunk.kind != PARAM16:
                self._evict(chunk)
        if self.held and self._bytes_after_transfers + nbytes > self.device_tier.chunkable_bytes:
            self._evict_held(self.device_tier.chunkable_bytes - nbytes, protected)
        limit = soft_limit if self.evict_everything else limit
        for chunk in self._evicting(protected):
            if self.device_tier.used + nbytes <= limit:
                break
            self.transfers.complete(chunk)
        if self.device_tier.used + nbytes > self.device_tier.chunkable_bytes:
            self._raise_device_budget(nbytes + later_bytes, protected)

    def evict_idle(self, nbytes: int, protect: Iterable[Chunk]) -> None:
        """Evict `param16` chunks that nothing uses until `nbytes` more fit into the budget, or none is left.

        Those that are held for the iteration go last.
        """
        limit = self.device_tier.chunkable_bytes - nbytes
        if self.device_tier.used + self._queued_bytes <= limit:
            return
        protected = set(protect)
        self._evict_params(self._evictable(protected), limit)
        if self.held:
            self._evict_held(limit, protected)
        if self.device_tier.used > limit:
            for chunk in self._evicting(protected):
                self.transfers.complete(chunk)

    def _evict_params(self, evictable: Iterable[Chunk], target_bytes: int) -> None:
        """Evict `param16` chunks in the policy's order until at most `target_bytes` of chunks remain."""
        by_index = {chunk.index: chunk for chunk in evictable if chunk.kind == PARAM16}
        for index in self.eviction_policy.eviction_order(by_index, self.now):
            if self._bytes_after_transfers <= target_bytes:
                break
            self._evict(by_index[index])

    def hold(self, chunk: Chunk) -> None:
        """Pin a chunk until `withdraw_holds`."""
        if not chunk.held:
            chunk.held = True
            chunk.pins += 1
            self.held.append(chunk)

    def withdraw_hold(self, chunk: Chunk) -> None:
        """Unpin a held chunk before the iteration ends."""
        chunk.held = False
        chunk.pins -= 1
        self.held.remove(chunk)

    def withdraw_holds(self) -> None:
        """Unpin all held chunks."""
        for chunk in self.held:
            chunk.held = False
            chunk.pins -= 1
        self.held.clear()

    def _evict_held(self, target_bytes: int, protected: set[Chunk]) -> None:
        """Evict held chunks that no operator uses, the last used first, until `target_bytes` of chunks remain."""
        for chunk in list(reversed(self.held)):  # an update that ends withdraws the hold on its chunk
            if self._bytes_after_transfers <= target_bytes:
                break
            if chunk.held and chunk.pins == 1 and chunk not in protected:
                self.withdraw_hold(chunk)
                self._evict(chunk)

    def _evictable(self, protected: set[Chunk]) -> list[Chunk]:
        return [
            chunk
            for chunk in self.chunks.values()
            if chunk.device.present
            and not chunk.pins
            and chunk.device.reader is None
            and chunk not in protected
            and not chunk.has_gradients  # these are freed by their reduction
        ]

    def _evicting(self, protected: set[Chunk]) -> list[Chunk]:
        """Return the chunks whose eviction is in flight and can be waited for, those that have started first."""
        serving = self.io_dispatch.comm is not None and self.io_dispatch.comm.serving
        evicting = [
            (chunk.device.reader, chunk)
            for chunk in self.transfers.in_flight
            if chunk.device.reader is not None and chunk not in protected and not (chunk.sharded and serving)
        ]
        return [chunk for transfer, chunk in sorted(evicting, key=lambda pair: not pair[0].started)]

    # Out of memory in the allocator

    def _with_retry(self, allocate: Callable[[Chunk], None], chunk: Chunk, protect: Iterable[Chunk]) -> None:
        """Run `allocate`, which takes device memory for a chunk; after an out-of-memory error, once more.

        The budget has room, so the cause is fragmentation or another program. Raises BudgetError.
        """
        try:
            allocate(chunk)
            return
        except torch.OutOfMemoryError:
            self.free_memory(chunk.nbytes, protect)
        try:
            allocate(chunk)
        except torch.OutOfMemoryError as error:
            device, report = self.device_tier, self.hardware.allocator_report()
            raise BudgetError(
                f"{chunk} needs {chunk.nbytes} bytes on the device. The allocator failed twice, although of the "
                f"budget of {device.budget_bytes} bytes chunks use only {device.used} and non-model data "
                f"{device.non_model_bytes}{report and '; '}{report}. Lower device_memory to leave room for "
                f"fragmentation, or end other programs that use this device. PyTorch error: {error}"
            ) from error

    def free_memory(self, nbytes: int | None = None, protect: Iterable[Chunk] = ()) -> None:
        """Evict idle `param16` chunks of `nbytes` (default: all) and empty the allocator's cache after an OOM error."""
        protected = set(protect)
        self._evict_params(self._evictable(protected), -1 if nbytes is None else self._bytes_after_transfers - nbytes)
        for chunk in self._evicting(protected):
            self.transfers.complete(chunk)
        self.hardware.release_cached_memory()
        self.counters.memory_retries += 1

    @property
    def _queued_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._fetch_queue) if self._fetch_queue else 0

    @property
    def _bytes_after_transfers(self) -> int:
        """Bytes of chunks on the device once all evictions in flight and all queued fetches are complete."""
        return self.settled_bytes + self._queued_bytes

    # One chunk

    def _promote_to_device(self, newcomer: Chunk) -> None:
        """Fetch `param16` chunks from the host while it has no room for `newcomer` and the device has room."""
        for chunk in self.chunks.values():
            if self.host_tier.has_room(newcomer.nbytes):
                return
            fits = self.device_tier.used + chunk.nbytes <= self.device_tier.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and chunk.host.valid and not chunk.device_bytes and fits:
                self._with_retry(self.transfers.fetch, chunk, protect=(newcomer,))

    def _evict(self, chunk: Chunk) -> None:
        self._ahead.discard(chunk)
        if chunk in self._fetch_queue:
            self._fetch_queue.remove(chunk)
            return
        chunk.finish_update()
        if not chunk.device.present:  # the update has moved it to the host
            return
        if chunk.device.writer is not None:
            self.transfers.complete(chunk)
        if self._start_eviction(chunk):
            self.counters.evictions += 1
            _log.debug("evicted %s (%d bytes) at moment %d", chunk, chunk.nbytes, self.now)

    def _start_eviction(self, chunk: Chunk) -> bool:
        """Start to evict a chunk, written back only if no tier below has a valid copy. Return False without room below.

        With a disk tier it goes to host memory that is free, or that of a duplicate, else to disk.
        """
        if chunk.host.valid or chunk.disk.valid or chunk.shards_valid:
            self.device_tier.free(chunk)
            return True
        if chunk.sharded:
            return False
        if self.disk_tier is not None and not chunk.host.present and not self._free_duplicates(chunk.nbytes):
            self.transfers.start_eviction(chunk, Tier.DISK)
            return True
        if self.hardware.has_gpu and self._ensure_host_block(chunk):
            self.transfers.start_eviction(chunk, Tier.HOST)
            return True
        return self._evict_to_host(chunk)

    def _free_duplicates(self, nbytes: int) -> bool:
        """Free host copies of parameters on the device until `nbytes` are free there. Return False if they do not fit.

        Chunks on their way to the device keep theirs: whether they have arrived depends on the speed of transfers.
        """
        for chunk in reversed(self.param16.values()):
            if self.host_tier.free_bytes >= nbytes:
                break
            if chunk.host.present and chunk.device.present and chunk not in self._ahead:
                chunk.finish_update()  # which may change the copies that there are
                if chunk.host.present and chunk.device.present and chunk.device.reader is None:
                    self.host_tier.free(chunk, in_order=True)
        return self.host_tier.free_bytes >= nbytes

    def _evict_to_host(self, chunk: Chunk) -> bool:
        """Evict a chunk to the host synchronously. Return False if the host has no room."""
        if not chunk.host.valid and not self._ensure_host_block(chunk):
            return False
        if self.hardware.has_gpu and not chunk.host.valid:
            self.transfers.start_eviction(chunk, Tier.HOST)
            self.transfers.complete(chunk)
        else:
            self.transfers.evict_now(chunk)
        return True

    def exchange(self, chunk: Chunk, other: Chunk) -> bool:
        """Exchange the contents of a chunk in memory and of one on the host, by exchanging their memory there.

        Return False if that is not possible: without an accelerator for a chunk on the device, or without room.
        """
        self.transfers.settle(other, in_order=True)
        self.transfers.settle(chunk, in_order=True)
        if chunk.device.valid and not (self.hardware.has_gpu and self._ensure_host_block(chunk)):
            return False
        if not chunk.device.valid and not chunk.host.valid:
            return False
        if chunk.held:
            self.withdraw_hold(chunk)  # its device memory is filled anew
        self.transfers.exchange(chunk, other)
        return True

    def _ensure_host_block(self, chunk: Chunk) -> bool:
        """Allocate a host block for a chunk that has none. Return False if the host has no room."""
        if not chunk.host.present:
            if not self.host_tier.has_room(chunk.nbytes):
                return False
            self.host_tier.allocate(chunk)
            # A duplicate copy might have saved this write: from now on fetched chunks keep their host copy.
            self.transfers.keep_duplicates = True
        return True

    def _raise_device_budget(self, nbytes: int, protected: set[Chunk]) -> None:
        device = self.device_tier
        short = device.more_budget_bytes(device.used + nbytes - device.chunkable_bytes)
        pinned = [chunk for chunk in self.chunks.values() if chunk.pins]
        idle = {chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins} - protected
        unevictable = {chunk for chunk in idle if not chunk.sharded}
        if device.non_model_bytes > device.budget_bytes:
            cause = "activations alone exceed the device budget"
        elif unevictable and self.disk_tier is None:
            host_usage = f"because the host is full ({self.host_tier.usage_summary()})"
            cause = f"{len(unevictable)} chunks cannot be evicted from the device, {host_usage}"
        elif nbytes == 0:
            cause = "activations grew, and chunks that are in use leave too little of the device budget"
        else:
            cause = f"the device needs {nbytes} more bytes of chunks at once"
        option = "host_memory or device_memory" if unevictable and self.disk_tier is None else "device_memory"
        in_use = f" (in use: {', '.join(map(repr, pinned))})" if pinned else ""
        raise BudgetError(
            f"{cause}: the budget of {device.budget_bytes} bytes holds {device.non_model_bytes} bytes of non-model "
            f"data and {device.used} bytes of chunks{in_use}",
            short,
            f"Raise {option} by at least {short} bytes ({format_size(short)}), use activation checkpointing, or use a "
            f"smaller batch",
        )
