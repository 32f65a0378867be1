"""Cache of chunks in device memory, within byte budgets (PatrickStar, Algorithms 1 and 2)."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from patrickstar._chunks.transfers import ChunkTransfers
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import PARAM16
from patrickstar._schedule.eviction_prefetch import EvictionPolicy, ListOrder, PrefetchPolicy
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError

_log = logging.getLogger(__name__)


class DeviceCache:
    """Chooses the chunks that are on the device: fetches for accesses and before them, and evicts to make room.

    `chunks` and `param16` are those of the chunk manager: all chunks, and by index those that operators read.
    """

    def __init__(
        self,
        chunks: dict[tuple[str, int], Chunk],
        param16: dict[int, Chunk],
        transfers: ChunkTransfers,
        evict_everything: bool,
    ) -> None:
        self.chunks, self.param16 = chunks, param16
        self.transfers = transfers
        self.device_tier, self.host_tier = transfers.device_tier, transfers.host_tier
        self.io_dispatch = transfers.io_dispatch
        self.hardware = transfers.io_dispatch.hardware
        self.eviction_policy: EvictionPolicy = ListOrder()
        self.prefetch_policy: PrefetchPolicy | None = None
        """Set while a planned iteration follows its trace."""
        self.evict_everything = evict_everything
        self.now = 0
        """Current moment, which the policies are asked about."""
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
    def settled_bytes(self) -> int:
        """Bytes of chunks on the device once all evictions in flight are complete."""
        return self.device_tier.used - (self.transfers.evicting_bytes if self.transfers.in_flight else 0)

    @property
    def resident_bytes(self) -> int:
        """Memory that the device tier uses; on a CPU, that of this process for both tiers.

        Beside a GPU, less what the allocator adds to the chunks that have no memory: see `DeviceTier.rounding_bytes`.
        """
        if self.hardware.has_gpu:
            return self.device_tier.used - self.device_tier.rounding_bytes
        return self.device_tier.resident_bytes + self.host_tier.touched_bytes

    # Access

    def at_rest(self, chunks: Iterable[Chunk]) -> bool:
        """Return True if `chunks` are on the device, the budget is kept, and no transfer is due or in flight."""
        device, policy = self.device_tier, self.prefetch_policy
        if self._fetch_queue or self.transfers.in_flight or self.evict_everything or (policy and policy.ahead):
            return False
        for chunk in chunks:  # a loop, since this runs for every operator
            if not chunk.device.valid or chunk in self._ahead:
                return False
        return self.io_dispatch.failed is None and device.resident_bytes <= device.soft_chunkable_bytes

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Fetch `chunks` to the device, all resident at once. `gently`: evict only `param16` chunks for them.

        They are fetched one by one: each fetch may free host memory that the next eviction needs.
        """
        self.io_dispatch.check()
        self._ahead.difference_update(chunks)
        for chunk in chunks:
            if chunk in self.transfers.in_flight and chunk.device.writer is None:
                self.transfers.complete(chunk)
        missing = [chunk for chunk in chunks if not chunk.device.valid and chunk.device.writer is None]
        later = sum([chunk.nbytes for chunk in missing])
        for chunk in missing:
            if chunk.device.writer is not None:
                continue
            later -= chunk.nbytes
            if chunk in self._fetch_queue:
                self._fetch_queue.remove(chunk)
            self.device_tier.trim(self._make_room(chunk.nbytes, chunks, later, gently))  # it takes unused pages first
            self.with_retry(self.transfers.fetch, chunk, protect=chunks)
        for chunk in chunks:
            if chunk.device.writer is not None:
                self.transfers.complete(chunk)
        self.make_room(0, protect=chunks, gently=gently)

    # Eviction

    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0, *, gently: bool = False) -> None:
        """Evict chunks until `nbytes` more fit into the part of the budget left for chunks.

        `param16` chunks are evicted down to the soft limit (80 % of the budget in warm-up); other idle chunks only if
        the budget itself would be exceeded (beside an accelerator: the soft limit), and not if `gently`. `later_bytes`
        are requested next: only the error counts them. Raises BudgetError.
        """
        self.device_tier.trim(self._make_room(nbytes, protect, later_bytes, gently) - nbytes)

    def _make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int, gently: bool) -> int:
        """Do the same, but trim no unused pages; return the part of the soft limit left for chunks."""
        soft_chunkable = self.device_tier.soft_chunkable_bytes
        soft_limit = 0 if self.evict_everything else soft_chunkable
        queued = self.queued_bytes if self._fetch_queue else 0
        if self.device_tier.used + queued + nbytes > soft_limit:
            self._evict_until(nbytes, soft_limit, set(protect), later_bytes, gently)
        return soft_chunkable

    def _evict_until(self, nbytes: int, soft_limit: int, protected: set[Chunk], later_bytes: int, gently: bool) -> None:
        evictable = self._evictable(protected)
        self._evict_params(evictable, soft_limit - nbytes)
        chunkable = limit = others_limit = self.device_tier.chunkable_bytes
        if self.hardware.has_gpu:  # an operator may need the rest, and would fail
            limit = min(limit, self.device_tier.soft_chunkable_bytes)
            if self.device_tier.soft_limit_bytes:  # else nothing is known yet, and states would move in vain
                others_limit = limit
        for chunk in evictable if not gently else ():
            if chunk.kind != PARAM16:
                if self._bytes_after_transfers + nbytes <= others_limit:
                    break
                self._evict(chunk)
        if self.held and self._bytes_after_transfers + nbytes > chunkable:
            self._evict_held(chunkable - nbytes, protected)
        limit = soft_limit if self.evict_everything else limit
        if self.device_tier.used + nbytes > limit:
            self._complete_evictions(limit - nbytes, protected)
        if self.device_tier.used + nbytes > chunkable:
            self._raise_device_budget(nbytes + later_bytes, protected)

    def _complete_evictions(self, target_bytes: int, protected: set[Chunk]) -> None:
        """Wait for evictions in flight until at most `target_bytes` of chunks are on the device."""
        for chunk in self._evicting(protected):
            if self.device_tier.used <= target_bytes:
                break
            self.transfers.complete(chunk)

    def evict_idle(self, nbytes: int, protect: Iterable[Chunk]) -> None:
        """Evict `param16` chunks that nothing uses until `nbytes` more fit into the budget, or none is left.

        Those that are held for the iteration go last.
        """
        limit = self.device_tier.chunkable_bytes - nbytes
        if self.device_tier.used + self.queued_bytes <= limit:
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
        """Unpin a chunk before the iteration ends, if it is held."""
        if chunk.held:
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
            if chunk.held and chunk.pins == 1 and chunk not in protected and not chunk.has_gradients:
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
            and not (chunk.sharded and chunk.has_gradients)  # these are freed by their reduction
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

    def with_retry(self, allocate: Callable[[Chunk], None], chunk: Chunk, protect: Iterable[Chunk]) -> None:
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
        self.io_dispatch.counters.memory_retries += 1

    @property
    def queued_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._fetch_queue)

    @property
    def _bytes_after_transfers(self) -> int:
        """Bytes of chunks on the device once all evictions in flight and all queued fetches are complete."""
        nbytes = self.device_tier.used
        if self.transfers.in_flight or self._fetch_queue:
            nbytes += self.queued_bytes - self.transfers.evicting_bytes
        return nbytes

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk that is removed."""
        self._ahead.discard(chunk)

    # Prefetch

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
                self.finish_evictions(chunk.nbytes, self.device_tier.chunkable_bytes, chunk)
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
                self.io_dispatch.counters.memory_retries += 1
                self.prefetch_policy = None
                self._fetch_queue.clear()

    def finish_evictions(self, nbytes: int, limit_bytes: int, newcomer: Chunk | None = None) -> bool:
        """Wait for evictions that have started until `nbytes` more fit into a limit. Return False if they never do.

        So the answer does not depend on whether they have ended. If they fit, an eviction of `newcomer` ends, too.
        """
        in_flight, device = self.transfers.in_flight, self.device_tier
        started = [each for each in in_flight if (reader := each.device.reader) is not None and reader.started]
        if device.used - sum(chunk.nbytes for chunk in started) + nbytes > limit_bytes:
            return False
        for chunk in started:
            if chunk is newcomer or device.used + nbytes > limit_bytes:
                self.transfers.complete(chunk)
        return True

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

    def drop_queue(self) -> None:
        """Start none of the queued prefetches."""
        self._fetch_queue.clear()

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

    # One chunk

    def make_host_room(self, newcomer: Chunk) -> None:
        """Fetch `param16` chunks from the host while it has no room for `newcomer` and the device has room."""
        for chunk in self.chunks.values():
            if self.host_tier.has_room(newcomer.nbytes):
                return
            fits = self.device_tier.used + chunk.nbytes <= self.device_tier.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and chunk.host.valid and not chunk.device_bytes and fits:
                self.with_retry(self.transfers.fetch, chunk, protect=(newcomer,))

    def _evict(self, chunk: Chunk) -> None:
        self._ahead.discard(chunk)
        if chunk in self._fetch_queue:
            self._fetch_queue.remove(chunk)
            return
        updated_below = chunk.device.update is None and chunk.host.update is not None
        if updated_below and chunk.device.present and chunk not in self.transfers.in_flight:
            chunk.device.valid, chunk.host.valid = False, True  # its update does not need the device copy: do not wait
        else:
            chunk.finish_update()
            if not chunk.device.present:  # the update has moved it to the host
                return
            if chunk.device.writer is not None:
                self.transfers.complete(chunk)
        if self._start_eviction(chunk):
            self.io_dispatch.counters.evictions += 1
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
        has_disk = self.io_dispatch.disk is not None
        if has_disk and not chunk.host.present and not self._free_duplicates(chunk.nbytes):
            self.transfers.start_eviction(chunk, Tier.DISK)
            return True
        if self.hardware.has_gpu and self.ensure_host_block(chunk):
            self.transfers.start_eviction(chunk, Tier.HOST)
            return True
        return self.evict_to_host(chunk)

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

    def evict_to_host(self, chunk: Chunk) -> bool:
        """Evict a chunk to the host synchronously. Return False if the host has no room."""
        if not chunk.host.valid and not self.ensure_host_block(chunk):
            return False
        if self.hardware.has_gpu and not chunk.host.valid:
            self.transfers.start_eviction(chunk, Tier.HOST)
            self.transfers.complete(chunk)
        else:
            self.transfers.evict_now(chunk)
        return True

    def ensure_host_block(self, chunk: Chunk) -> bool:
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
        elif unevictable and self.io_dispatch.disk is None:
            host_usage = f"because the host is full ({self.host_tier.usage_summary()})"
            cause = f"{len(unevictable)} chunks cannot be evicted from the device, {host_usage}"
        elif nbytes == 0:
            cause = "activations grew, and chunks that are in use leave too little of the device budget"
        else:
            cause = f"the device needs {nbytes} more bytes of chunks at once"
        option = "host_memory or device_memory" if unevictable and self.io_dispatch.disk is None else "device_memory"
        in_use = f" (in use: {', '.join(map(repr, pinned))})" if pinned else ""
        raise BudgetError(
            f"{cause}: the budget of {device.budget_bytes} bytes holds {device.non_model_bytes} bytes of non-model "
            f"data and {device.used} bytes of chunks{in_use}",
            short,
            f"Raise {option} by at least {short} bytes ({format_size(short)}), use activation checkpointing, or use a "
            f"smaller batch",
        )
