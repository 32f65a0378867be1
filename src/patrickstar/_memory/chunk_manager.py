"""The chunk manager: brings chunks to the compute tier and lets them go, within byte budgets (Algorithms 1 and 2)."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import KEPT32, PARAM16, SHARD16, SUM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.device_tier import DeviceTier
from patrickstar._memory.disk_tier import STAGES, DiskTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import ALIGN_BYTES, ArenaBlock
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.io_dispatch import IODispatch
from patrickstar._memory.transfer_counters import TransferCounters
from patrickstar._memory.transfers import ChunkTransfers
from patrickstar._memory.vm_pool import round_up
from patrickstar._schedule.eviction import EvictionPolicy, ListOrder
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.prefetch import PrefetchPolicy
from patrickstar.errors import BudgetError


class ChunkManager:
    """Owns the chunks of one engine and the bytes they take on the tiers.

    It decides who moves, and has them moved. See [Note: what is on its way].
    """

    def __init__(
        self,
        device: torch.device,
        device_budget_bytes: int,
        host_budget_bytes: int,
        poison: bool,
        *,
        disk: DiskTier | None = None,
        slab_bytes: int | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        self.device = device
        self.hardware = hardware if hardware is not None else Hardware(device)
        slab_bytes = host_budget_bytes if slab_bytes is None else slab_bytes
        self.device_tier = DeviceTier(self.hardware, device_budget_bytes, poison)
        self.host_tier = HostTier(host_budget_bytes, slab_bytes, self.hardware.host_arena, poison)
        page = torch.empty(0, dtype=torch.uint8, device=self.hardware.host_device)
        if disk is not None:
            page = self.host_tier.view(self.host_tier.allocate_block(disk.page_bytes), torch.uint8)
            # What the threads have allocated themselves.
            self.host_tier.other_bytes += STAGES * disk.page_bytes
        self.io_dispatch = IODispatch(self.hardware, disk, page)
        self.transfers = ChunkTransfers(self.device_tier, self.host_tier, self.io_dispatch)
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.param16: dict[int, Chunk] = {}
        """Those of them that operators read, by index."""
        self.policy: EvictionPolicy = ListOrder()
        self.prefetch: PrefetchPolicy | None = None
        """What brings chunks before they are accessed, while a trace is followed."""
        self.evict_everything = False
        self.now = 0
        self._fetch_queue: deque[Chunk] = deque()
        """What comes ahead of need as soon as those who leave for it are gone."""

    def __getitem__(self, key: tuple[str, int]) -> Chunk:
        return self.chunks[key]

    @property
    def disk_tier(self) -> DiskTier | None:
        """The tier below the host, if there is one."""
        return self.io_dispatch.disk

    @property
    def counters(self) -> TransferCounters:
        """What has moved so far."""
        return self.io_dispatch.counters

    @property
    def resident_bytes(self) -> int:
        """Memory of this process that chunks, and what else the host tier holds, take: on a CPU of both tiers."""
        below = 0 if self.hardware.has_gpu else self.host_tier.touched_bytes
        return self.device_tier.resident_bytes + below

    @defer_sigint
    def new_chunk(self, kind: str, index: int, numel: int, dtype: str, tier: Tier) -> Chunk:
        """Make a chunk of zeros and take memory for it on one tier.

        In memory these are actually written: what was never touched is not resident, and a meter of resident memory
        would miss it.
        """
        chunk = self.device_tier.new(kind, index, numel, dtype)
        if tier is Tier.DEVICE:
            self.make_room(chunk.nbytes, protect=())
            self._with_retry(self.device_tier.allocate, chunk, protect=())
            chunk.on_device(chunk.whole).zero_()
            chunk.device_valid = True
        elif tier is Tier.HOST:
            self._promote_to_device(chunk)
            self.host_tier.make_room(chunk.nbytes, repr(chunk))
            self.host_tier.allocate(chunk).zero_()
            chunk.host_valid = True
        else:
            assert self.disk_tier is not None, f"{chunk} has no disk to go to"
            self.disk_tier.reserve(chunk)
            chunk.disk_valid = True
        self.chunks[chunk.kind, chunk.index] = chunk
        if chunk.kind == PARAM16:
            self.param16[chunk.index] = chunk
        return chunk

    def new_shared_chunk(self, kind: str, index: int, numel: int, dtype: str) -> Chunk:
        """Make a chunk whose bytes several processes have, each a part. It takes no memory yet."""
        chunk = self.device_tier.new(kind, index, numel, dtype)
        chunk.sharded = chunk.shards_valid = True
        self.chunks[chunk.kind, chunk.index] = self.param16[chunk.index] = chunk
        return chunk

    @defer_sigint
    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk and give its memory back."""
        if self.io_dispatch.failed is None:
            self.transfers.wait_idle(chunk)
        if chunk.device_bytes:
            self.device_tier.free(chunk)
        if chunk.host is not None:
            self.host_tier.free(chunk)
        chunk.memory.close()
        if self.disk_tier is not None:
            self.disk_tier.release(chunk)
        del self.chunks[chunk.kind, chunk.index]
        if chunk.kind == PARAM16:
            del self.param16[chunk.index]

    def drain_moved(self) -> set[Chunk]:
        """The chunks whose memory came, went or changed places since the last call."""
        moved = self.device_tier.moved | self.host_tier.moved
        self.device_tier.moved, self.host_tier.moved = set(), set()
        return moved

    @defer_sigint
    def complete_transfers(self) -> None:
        """Wait for all that is on its way; nothing more comes ahead of need."""
        self.cancel_prefetch()
        for chunk in list(self.transfers.in_flight):
            self.transfers.wait_idle(chunk)

    @defer_sigint
    def cancel_transfers(self) -> None:
        """Drop what is on its way: chunks stay where they were."""
        self._fetch_queue.clear()
        self.transfers.cancel_all()

    @defer_sigint
    def reduce_gradients(self, chunk: Chunk) -> None:
        """Have the gradients over a shared chunk averaged by its owners; it leaves the device when that has ended."""
        self.transfers.start_reduction(chunk)

    @defer_sigint
    def drop(self, chunk: Chunk) -> None:
        """Let a shared chunk leave the device; what lay over its parameters was taken."""
        chunk.shards_valid = True
        if not chunk.pins:
            self.device_tier.free(chunk)
        else:
            self.transfers.start_regather(chunk)

    @defer_sigint
    def regather(self, chunk: Chunk) -> None:
        """Gather a shared chunk again, into the memory that it has."""
        chunk.shards_valid = True
        self.transfers.start_regather(chunk)

    @defer_sigint
    def drop_gathered(self, indices: Iterable[int]) -> None:
        """Drop what was gathered of these chunks: the owners have changed it."""
        self.cancel_prefetch()
        for index in indices:
            chunk = self.param16[index]
            if chunk.sharded:
                if chunk in self.transfers.in_flight:
                    self.transfers.complete(chunk)
                if chunk.device_resident:
                    self.device_tier.free(chunk)
                chunk.shards_valid = True

    def close(self) -> None:
        """Stop what moves bytes; chunks in memory stay."""
        self.cancel_transfers()
        self.io_dispatch.close()

    # Access

    @defer_sigint
    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Have `chunks` on the device, all at once. `gently`: only chunks of `param16` may leave for them.

        One by one: what has come up makes room on the host for what has yet to leave.
        """
        self.io_dispatch.check()
        for chunk in chunks:
            if chunk in self.transfers.in_flight and chunk.fetch_transfer is None:
                self.transfers.complete(chunk)
        missing = [chunk for chunk in chunks if not chunk.device_valid]
        later = sum(chunk.nbytes for chunk in missing if chunk.fetch_transfer is None)
        for chunk in missing:
            if chunk.fetch_transfer is not None:
                continue
            later -= chunk.nbytes
            if chunk in self._fetch_queue:
                self._fetch_queue.remove(chunk)
            self.make_room(chunk.nbytes, protect=chunks, later_bytes=later, gently=gently)
            self._with_retry(self.transfers.fetch, chunk, protect=chunks)
        for chunk in chunks:
            if chunk.fetch_transfer is not None:
                self.transfers.wait_fetch(chunk)
        self.make_room(0, protect=chunks, gently=gently)

    def ensure_in_memory(self, *chunks: Chunk) -> None:
        """Ensure that chunks are in memory, on either tier, with no copy in flight, so that they can be written."""
        if any(chunk.fetch_transfer is not None or not chunk.in_memory for chunk in chunks):
            self.fetch(chunks)
        for chunk in chunks:
            if chunk.h2d_transfer is not None and not chunk.device_valid:
                # An earlier fetch that only the device has waited for may still read what is written now.
                self.io_dispatch.wait(chunk.h2d_transfer)
                chunk.h2d_transfer = None

    @defer_sigint
    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0, *, gently: bool = False) -> None:
        """Evict until `nbytes` more fit into what the budget leaves for chunks.

        First the comfort limit is aimed at (in warm-up 80 % of the budget), by chunks of `param16` only; if the budget
        itself would be exceeded, any chunk that nobody uses may go. `later_bytes` are asked for next, and count in what
        an error says.
        """
        comfort = 0 if self.evict_everything else self.device_tier.within_soft_limit_bytes
        if self.device_tier.used + self._queued_bytes + nbytes > comfort:
            self._evict_until(nbytes, comfort, set(protect), later_bytes, gently)
        self.device_tier.trim(self.device_tier.within_soft_limit_bytes - nbytes)

    def _evict_until(self, nbytes: int, comfort: int, protected: set[Chunk], later_bytes: int, gently: bool) -> None:
        movable = self._evictable(protected)
        by_index = {chunk.index: chunk for chunk in movable if chunk.kind == PARAM16}
        for index in self.policy.order(by_index, self.now):
            if self._bytes_after_transfers + nbytes <= comfort:
                break
            self._evict(by_index[index])
        for chunk in movable:
            if gently or self._bytes_after_transfers + nbytes <= self.device_tier.chunkable_bytes:
                break
            if chunk.kind != PARAM16:
                self._evict(chunk)
        limit = comfort if self.evict_everything else self.device_tier.chunkable_bytes
        for chunk in self._evicting(protected):
            if self.device_tier.used + nbytes <= limit:
                break
            self.transfers.complete(chunk)
        if self.device_tier.used + nbytes > self.device_tier.chunkable_bytes:
            self._raise_device_budget(nbytes + later_bytes, protected)

    def _evictable(self, protected: set[Chunk]) -> list[Chunk]:
        """Return the chunks that may be evicted from the device."""
        return [
            chunk
            for chunk in self.chunks.values()
            if chunk.device_resident
            and not chunk.pins
            and chunk.eviction_transfer is None
            and chunk not in protected
            and not chunk.has_gradients  # which leave for their owners when they are complete
        ]

    def _evicting(self, protected: set[Chunk]) -> list[Chunk]:
        """Return the chunks whose eviction is in flight and can be waited for."""
        serving = self.io_dispatch.comm is not None and self.io_dispatch.comm.serving
        return [
            chunk
            for chunk in self.transfers.in_flight
            if chunk.eviction_transfer is not None and chunk not in protected and not (chunk.sharded and serving)
        ]

    # When the allocator has no memory

    def _with_retry(self, take: Callable[[Chunk], None], chunk: Chunk, protect: Iterable[Chunk]) -> None:
        """Run `take`, which allocates a chunk's device memory; once more if the allocator finds none.

        The budget has room, so it is fragmentation, or another program. Raises BudgetError if the second try fails.
        """
        try:
            take(chunk)
            return
        except torch.OutOfMemoryError:
            self.free_memory(chunk.nbytes, protect)
        try:
            take(chunk)
        except torch.OutOfMemoryError as error:
            compute, report = self.device_tier, self.hardware.allocator_report()
            raise BudgetError(
                f"{chunk} needs {chunk.nbytes} bytes on the device and the allocator found none, twice, although of "
                f"the budget of {compute.budget_bytes} bytes chunks take only {compute.used} and non-model data "
                f"{compute.non_model_bytes}{report and '; '}{report}. Lower device_memory, so that room is "
                f"left for fragmentation, or end other programs that use this device. PyTorch said: {error}"
            ) from error

    @defer_sigint
    def free_memory(self, nbytes: int | None = None, protect: Iterable[Chunk] = ()) -> None:
        """Give device memory back to the allocator, and from there to the device, after it has found none.

        Args:
            nbytes: evict idle chunks of `param16` of so many bytes in all; by default every idle one.
            protect: chunks that stay.
        """
        protected = set(protect)
        by_index = {chunk.index: chunk for chunk in self._evictable(protected) if chunk.kind == PARAM16}
        enough = -1 if nbytes is None else self._bytes_after_transfers - nbytes
        for index in self.policy.order(by_index, self.now):
            if self._bytes_after_transfers <= enough:
                break
            self._evict(by_index[index])
        for chunk in self._evicting(protected):
            self.transfers.complete(chunk)
        self.hardware.release_cached_memory()
        self.counters.memory_retries += 1

    @property
    def _queued_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._fetch_queue)

    @property
    def _bytes_after_transfers(self) -> int:
        """What the device will hold once everybody who leaves is gone, and those in line are there."""
        return self.device_tier.used - self.transfers.evicting_bytes + self._queued_bytes

    @defer_sigint
    def mark_written(self, chunk: Chunk, on_device: bool) -> None:
        """Say that one copy was written: it is the authoritative one, copies on the other tiers are stale."""
        assert chunk.fetch_transfer is None and chunk.eviction_transfer is None, (
            f"{chunk} was written while it was on its way"
        )
        chunk.shards_valid = False
        chunk.device_valid = on_device
        chunk.host_valid = not on_device
        chunk.disk_valid = False
        chunk.disk_version += 1
        if not on_device and chunk.device_bytes:
            self.device_tier.free(chunk)

    @defer_sigint
    def move_to_tier(self, chunk: Chunk, tier: Tier) -> None:
        """Have the chunk on one tier alone, to be written there."""
        self.transfers.wait_idle(chunk)
        if tier is Tier.DEVICE:
            if not chunk.device_valid:
                self.fetch([chunk])
            if chunk.host is not None:
                self.host_tier.free(chunk, for_good=True)
        elif tier is Tier.HOST:
            if not chunk.in_memory:
                self._read_to_host(chunk)
            elif chunk.device_bytes:
                if not chunk.host_bytes:
                    self._promote_to_device(chunk)
                if not self._evict_to_host(chunk):
                    self.host_tier.make_room(chunk.nbytes, repr(chunk))
        elif not chunk.disk_valid or chunk.in_memory:
            self._move_to_disk(chunk)

    def _read_to_host(self, chunk: Chunk) -> None:
        self.host_tier.make_room(chunk.nbytes, repr(chunk))
        self.io_dispatch.wait(
            self.io_dispatch.read(chunk, 0, self.host_tier.allocate(chunk).view(torch.uint8), urgent=True)
        )
        chunk.host_valid = True

    def _move_to_disk(self, chunk: Chunk) -> None:
        if not chunk.disk_valid:
            self.io_dispatch.wait(self.io_dispatch.write(chunk, 0, chunk.current(chunk.whole).view(torch.uint8)))
            chunk.disk_valid = True
        if chunk.device_bytes:
            self.device_tier.free(chunk)
        if chunk.host is not None:
            self.host_tier.free(chunk)

    # Ahead of need

    @defer_sigint
    def poll_transfers(self) -> None:
        """Let what is on its way land, and begin what shall come ahead of need."""
        self.transfers.complete_finished()
        if self.prefetch is None or self.evict_everything:
            return
        self._queue_prefetches(self.prefetch)
        self._start_queued_fetches()
        self.device_tier.trim(self.device_tier.chunkable_bytes)

    def _start_queued_fetches(self) -> None:
        """Start the fetches in line, up to the first that waits: for evictions, or for an update of its host copy."""
        while self._fetch_queue:
            chunk = self._fetch_queue[0]
            updating = chunk.pins > 0 and not chunk.device_bytes
            if (
                updating
                or chunk.eviction_transfer is not None
                or self.device_tier.used + chunk.nbytes > self.device_tier.chunkable_bytes
            ):
                break
            self._fetch_queue.popleft()
            if chunk.device_bytes:
                continue
            try:
                self.transfers.start_fetch(chunk, urgent=False)
            except torch.OutOfMemoryError:
                # What is needed is fetched when it is accessed, and memory is made for it then.
                self.counters.memory_retries += 1
                self.prefetch = None
                self._fetch_queue.clear()

    def _queue_prefetches(self, prefetch: PrefetchPolicy) -> None:
        present = {
            index for index, chunk in self.param16.items() if chunk.device_resident and chunk.eviction_transfer is None
        }
        present.update(chunk.index for chunk in self._fetch_queue)
        if len(present) == len(self.param16):
            return
        held = {index for index in present if self.param16[index].pins or self.param16[index].has_gradients}
        for index in prefetch.early_evictions(self.now, present, held):
            self._evict(self.param16[index])
            present.discard(index)
        for move in prefetch.prefetches(self.now, present, held, self.device_tier.budget_bytes):
            # What the next iteration reads is new after the update.
            if self.param16[move.fetch].sharded and prefetch.trace.next_use(move.fetch, self.now) >= len(
                prefetch.trace.moments
            ):
                break
            self._fetch_queue.append(self.param16[move.fetch])
            for index in move.evict:
                self._evict(self.param16[index])

    @defer_sigint
    def cancel_prefetch(self) -> None:
        """The plan no longer holds: what it has asked for still comes, nothing more does."""
        self.prefetch = None
        if self._fetch_queue and self.io_dispatch.failed is None:
            for chunk in list(self.transfers.in_flight):
                if chunk.eviction_transfer is not None:
                    self.transfers.complete(chunk)
            self._start_queued_fetches()
        self._fetch_queue.clear()

    # The host

    @defer_sigint
    def allocate_host(self, nbytes: int, what: str) -> ArenaBlock:
        """Host memory for something that is no chunk. Where there is a disk, chunks on the host make room for it."""
        self.free_host(round_up(nbytes, ALIGN_BYTES))
        return self.host_tier.allocate_block(nbytes, what)

    @defer_sigint
    def free_host(self, nbytes: int) -> bool:
        """Have chunks on the host make room for something else, if there is a disk. Returns whether there is room."""
        if self.disk_tier is not None and not self.host_tier.busy:
            below = [
                chunk
                for chunk in self.chunks.values()
                if chunk.host_valid
                and not chunk.device_bytes
                and not chunk.pins
                and chunk.kind not in (SHARD16, SUM32, KEPT32)
            ]
            # Optimizer chunks first: they save the least, and the last of them have the most time to come back.
            for chunk in sorted(below, key=lambda chunk: (chunk.kind == PARAM16, -chunk.index)):
                if self.host_tier.has_room(nbytes):
                    break
                self.move_to_tier(chunk, Tier.DISK)
                self.device_tier.moved.add(chunk)
        return self.host_tier.has_room(nbytes)

    def _promote_to_device(self, newcomer: Chunk) -> None:
        """Where the host has no room for `newcomer`, take chunks of `param16` up to where the device has."""
        for chunk in self.chunks.values():
            if self.host_tier.has_room(newcomer.nbytes):
                return
            fits = self.device_tier.used + chunk.nbytes <= self.device_tier.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and chunk.host_valid and not chunk.device_bytes and fits:
                self._with_retry(self.transfers.fetch, chunk, protect=(newcomer,))

    # Leaving the device

    def _evict(self, chunk: Chunk) -> None:
        if chunk in self._fetch_queue:
            self._fetch_queue.remove(chunk)
            return
        if chunk.fetch_transfer is not None:
            self.transfers.complete(chunk)
        if self._start_eviction(chunk):
            self.counters.evictions += 1

    def _start_eviction(self, chunk: Chunk) -> bool:
        """Leave the device, written back only if no copy below is current. False if there is no room below.

        With a disk nobody loses a place on the host: a chunk goes where it has one, or finds room, else to disk.
        """
        if chunk.host_valid or chunk.disk_valid or chunk.shards_valid:
            self.device_tier.free(chunk)
            return True
        if chunk.sharded:
            return False
        if self.disk_tier is not None and chunk.host is None and self.host_tier.free_bytes < chunk.nbytes:
            self.transfers.start_eviction(chunk, Tier.DISK)
            return True
        if self.hardware.has_gpu and self._has_host_block(chunk):
            self.transfers.start_eviction(chunk, Tier.HOST)
            return True
        return self._evict_to_host(chunk)

    def _evict_to_host(self, chunk: Chunk) -> bool:
        """The same, at once."""
        if not chunk.host_valid and not self._has_host_block(chunk):
            return False
        self.transfers.evict_now(chunk)
        return True

    def _has_host_block(self, chunk: Chunk) -> bool:
        if chunk.host is None:
            if not self.host_tier.has_room(chunk.nbytes):
                return False
            self.host_tier.allocate(chunk)
            # It had to be written without need, perhaps: from now on fetched chunks keep their host copy.
            self.transfers.keep_duplicates = True
        return True

    def count_transfer(self, nbytes: int, *, to_device: bool) -> None:
        """Note bytes that crossed between the tiers outside whole chunks."""
        self.hardware.crossed(nbytes, to_device=to_device)
        if to_device:
            self.counters.h2d_bytes += nbytes
        else:
            self.counters.d2h_bytes += nbytes

    def _raise_device_budget(self, nbytes: int, protected: set[Chunk]) -> None:
        compute = self.device_tier
        short = compute.used + nbytes - compute.chunkable_bytes
        pinned = [chunk for chunk in self.chunks.values() if chunk.pins]
        idle = {chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins} - protected
        bound_to_device = {chunk for chunk in idle if not chunk.sharded}
        if compute.non_model_bytes > compute.budget_bytes:
            what = "activations alone exceed the device budget"
        elif bound_to_device and self.disk_tier is None:
            full = f"since the host is full ({self.host_tier.usage_summary()})"
            what = f"{len(bound_to_device)} chunks can't leave the device, {full}"
        else:
            what = f"{nbytes} more bytes of chunks are needed at once on the device"
        where = "host_memory or device_memory" if bound_to_device and self.disk_tier is None else "device_memory"
        raise BudgetError(
            f"{what}: the budget of {compute.budget_bytes} bytes holds {compute.non_model_bytes} bytes of non-model "
            f"data and {compute.used} bytes of chunks (in use: {pinned}). Raise "
            f"{where} by at least {short} bytes ({format_size(short)}), use activation checkpointing, or a smaller "
            f"batch",
            short,
        )
