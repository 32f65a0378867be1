"""The chunk manager: brings chunks to the compute tier and lets them go, within byte budgets (Algorithms 1 and 2)."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import KEPT32, PARAM16, SHARD16, SUM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._memory.device_tier import ComputeTier
from patrickstar._memory.disk_tier import STAGES, DiskTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import ALIGN_BYTES, Place
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.io_dispatch import Transit
from patrickstar._memory.transfer_counters import Traffic
from patrickstar._memory.transfers import Moves
from patrickstar._memory.vm_pool import round_up
from patrickstar._schedule.eviction import EvictionPolicy, ListOrder
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.prefetch import Prefetch
from patrickstar.errors import BudgetError


class Manager:
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
        self.compute = ComputeTier(self.hardware, device_budget_bytes, poison)
        self.host = HostTier(host_budget_bytes, slab_bytes, self.hardware.slab, poison)
        page = torch.empty(0, dtype=torch.uint8, device=self.hardware.host_device)
        if disk is not None:
            page = self.host.view(self.host.borrow(disk.page_bytes), torch.uint8)
            # What the threads have allocated themselves.
            self.host.other_bytes += STAGES * disk.page_bytes
        self.transit = Transit(self.hardware, disk, page)
        self.moves = Moves(self.compute, self.host, self.transit)
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.param16: dict[int, Chunk] = {}
        """Those of them that operators read, by index."""
        self.policy: EvictionPolicy = ListOrder()
        self.prefetch: Prefetch | None = None
        """What brings chunks before they are accessed, while a trace is followed."""
        self.evict_everything = False
        self.now = 0
        self._line: deque[Chunk] = deque()
        """What comes ahead of need as soon as those who leave for it are gone."""

    def __getitem__(self, key: tuple[str, int]) -> Chunk:
        return self.chunks[key]

    @property
    def disk(self) -> DiskTier | None:
        """The tier below the host, if there is one."""
        return self.transit.disk

    @property
    def traffic(self) -> Traffic:
        """What has moved so far."""
        return self.transit.traffic

    @property
    def resident_bytes(self) -> int:
        """Memory of this process that chunks, and what else the host tier holds, take: on a CPU of both tiers."""
        below = 0 if self.hardware.beside else self.host.touched_bytes
        return self.compute.resident_bytes + below

    @uninterrupted
    def new_chunk(self, kind: str, index: int, numel: int, dtype: str, tier: Tier) -> Chunk:
        """Make a chunk of zeros and take memory for it on one tier.

        In memory these are actually written: what was never touched is not resident, and a meter of resident memory
        would miss it.
        """
        chunk = self.compute.new(kind, index, numel, dtype)
        if tier is Tier.DEVICE:
            self.make_room(chunk.nbytes, protect=())
            self._with_retry(self.compute.take, chunk, protect=())
            chunk.on_device(chunk.whole).zero_()
            chunk.device_valid = True
        elif tier is Tier.HOST:
            self._lift(chunk)
            self.host.make_room(chunk.nbytes, repr(chunk))
            self.host.take(chunk).zero_()
            chunk.host_valid = True
        else:
            assert self.disk is not None, f"{chunk} has no disk to go to"
            self.disk.place(chunk)
            chunk.disk_valid = True
        self.chunks[chunk.kind, chunk.index] = chunk
        if chunk.kind == PARAM16:
            self.param16[chunk.index] = chunk
        return chunk

    def new_shared_chunk(self, kind: str, index: int, numel: int, dtype: str) -> Chunk:
        """Make a chunk whose bytes several processes have, each a part. It takes no memory yet."""
        chunk = self.compute.new(kind, index, numel, dtype)
        chunk.shared = chunk.owners_valid = True
        self.chunks[chunk.kind, chunk.index] = self.param16[chunk.index] = chunk
        return chunk

    @uninterrupted
    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk and give its memory back."""
        if self.transit.failed is None:
            self.moves.settle(chunk)
        if chunk.device_bytes:
            self.compute.give(chunk)
        if chunk.host is not None:
            self.host.give(chunk)
        chunk.memory.close()
        if self.disk is not None:
            self.disk.forget(chunk)
        del self.chunks[chunk.kind, chunk.index]
        if chunk.kind == PARAM16:
            del self.param16[chunk.index]

    def drain_moved(self) -> set[Chunk]:
        """The chunks whose memory came, went or changed places since the last call."""
        moved = self.compute.moved | self.host.moved
        self.compute.moved, self.host.moved = set(), set()
        return moved

    @uninterrupted
    def land_all(self) -> None:
        """Wait for all that is on its way; nothing more comes ahead of need."""
        self.forget_ahead()
        for chunk in list(self.moves.in_flight):
            self.moves.settle(chunk)

    @uninterrupted
    def abandon(self) -> None:
        """Drop what is on its way: chunks stay where they were."""
        self._line.clear()
        self.moves.abandon()

    @uninterrupted
    def hand_over(self, chunk: Chunk) -> None:
        """Have the gradients over a shared chunk averaged by its owners; it leaves the device when that has ended."""
        self.moves.hand_over(chunk)

    @uninterrupted
    def drop(self, chunk: Chunk) -> None:
        """Let a shared chunk leave the device; what lay over its parameters was taken."""
        chunk.owners_valid = True
        if not chunk.pins:
            self.compute.give(chunk)
        else:
            self.moves.refresh(chunk)

    @uninterrupted
    def refresh(self, chunk: Chunk) -> None:
        """Gather a shared chunk again, into the memory that it has."""
        chunk.owners_valid = True
        self.moves.refresh(chunk)

    @uninterrupted
    def forget_gathered(self, indices: Iterable[int]) -> None:
        """Drop what was gathered of these chunks: the owners have changed it."""
        self.forget_ahead()
        for index in indices:
            chunk = self.param16[index]
            if chunk.shared:
                if chunk in self.moves.in_flight:
                    self.moves.land(chunk)
                if chunk.on_device_now:
                    self.compute.give(chunk)
                chunk.owners_valid = True

    def close(self) -> None:
        """Stop what moves bytes; chunks in memory stay."""
        self.abandon()
        self.transit.close()

    # Access

    @uninterrupted
    def bring(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Have `chunks` on the device, all at once. `gently`: only chunks of `param16` may leave for them.

        One by one: what has come up makes room on the host for what has yet to leave.
        """
        self.transit.check()
        for chunk in chunks:
            if chunk in self.moves.in_flight and chunk.coming is None:
                self.moves.land(chunk)
        missing = [chunk for chunk in chunks if not chunk.device_valid]
        later = sum(chunk.nbytes for chunk in missing if chunk.coming is None)
        for chunk in missing:
            if chunk.coming is not None:
                continue
            later -= chunk.nbytes
            if chunk in self._line:
                self._line.remove(chunk)
            self.make_room(chunk.nbytes, protect=chunks, later_bytes=later, gently=gently)
            self._with_retry(self.moves.fetch, chunk, protect=chunks)
        for chunk in chunks:
            if chunk.coming is not None:
                self.moves.arrive(chunk)
        self.make_room(0, protect=chunks, gently=gently)

    def have(self, *chunks: Chunk) -> None:
        """Ensure that chunks are in memory, on either tier, with no copy in flight, so that they can be written."""
        if any(chunk.coming is not None or not chunk.in_memory for chunk in chunks):
            self.bring(chunks)
        for chunk in chunks:
            if chunk.host_reader is not None and not chunk.device_valid:
                # An earlier fetch that only the device has waited for may still read what is written now.
                self.transit.wait(chunk.host_reader)
                chunk.host_reader = None

    @uninterrupted
    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0, *, gently: bool = False) -> None:
        """Evict until `nbytes` more fit into what the budget leaves for chunks.

        First the comfort limit is aimed at (in warm-up 80 % of the budget), by chunks of `param16` only; if the budget
        itself would be exceeded, any chunk that nobody uses may go. `later_bytes` are asked for next, and count in what
        an error says.
        """
        comfort = 0 if self.evict_everything else self.compute.comfortable_bytes
        if self.compute.used + self._line_bytes + nbytes > comfort:
            self._evict_until(nbytes, comfort, set(protect), later_bytes, gently)
        self.compute.trim(self.compute.comfortable_bytes - nbytes)

    def _evict_until(self, nbytes: int, comfort: int, protected: set[Chunk], later_bytes: int, gently: bool) -> None:
        movable = self._movable(protected)
        by_index = {chunk.index: chunk for chunk in movable if chunk.kind == PARAM16}
        for index in self.policy.order(by_index, self.now):
            if self._staying_bytes + nbytes <= comfort:
                break
            self._evict(by_index[index])
        for chunk in movable:
            if gently or self._staying_bytes + nbytes <= self.compute.chunkable_bytes:
                break
            if chunk.kind != PARAM16:
                self._evict(chunk)
        limit = comfort if self.evict_everything else self.compute.chunkable_bytes
        for chunk in self._leaving(protected):
            if self.compute.used + nbytes <= limit:
                break
            self.moves.land(chunk)
        if self.compute.used + nbytes > self.compute.chunkable_bytes:
            self._fail_device(nbytes + later_bytes, protected)

    def _movable(self, protected: set[Chunk]) -> list[Chunk]:
        """Return the chunks that may be evicted from the device."""
        return [
            chunk
            for chunk in self.chunks.values()
            if chunk.on_device_now
            and not chunk.pins
            and chunk.leaving is None
            and chunk not in protected
            and not chunk.has_gradients  # which leave for their owners when they are complete
        ]

    def _leaving(self, protected: set[Chunk]) -> list[Chunk]:
        """Return the chunks whose eviction is in flight and can be waited for."""
        serving = self.transit.peers is not None and self.transit.peers.serving
        return [
            chunk
            for chunk in self.moves.in_flight
            if chunk.leaving is not None and chunk not in protected and not (chunk.shared and serving)
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
            compute, report = self.compute, self.hardware.allocator_report()
            raise BudgetError(
                f"{chunk} needs {chunk.nbytes} bytes on the device and the allocator found none, twice, although of "
                f"the budget of {compute.budget_bytes} bytes chunks take only {compute.used} and non-model data "
                f"{compute.non_model_bytes}{report and '; '}{report}. Lower device_memory, so that room is "
                f"left for fragmentation, or end other programs that use this device. PyTorch said: {error}"
            ) from error

    @uninterrupted
    def free_memory(self, nbytes: int | None = None, protect: Iterable[Chunk] = ()) -> None:
        """Give device memory back to the allocator, and from there to the device, after it has found none.

        Args:
            nbytes: evict idle chunks of `param16` of so many bytes in all; by default every idle one.
            protect: chunks that stay.
        """
        protected = set(protect)
        by_index = {chunk.index: chunk for chunk in self._movable(protected) if chunk.kind == PARAM16}
        enough = -1 if nbytes is None else self._staying_bytes - nbytes
        for index in self.policy.order(by_index, self.now):
            if self._staying_bytes <= enough:
                break
            self._evict(by_index[index])
        for chunk in self._leaving(protected):
            self.moves.land(chunk)
        self.hardware.release_cached_memory()
        self.traffic.memory_retries += 1

    @property
    def _line_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._line)

    @property
    def _staying_bytes(self) -> int:
        """What the device will hold once everybody who leaves is gone, and those in line are there."""
        return self.compute.used - self.moves.leaving_bytes + self._line_bytes

    @uninterrupted
    def mark_written(self, chunk: Chunk, on_device: bool) -> None:
        """Say that one copy was written: it is the authoritative one, copies on the other tiers are stale."""
        assert chunk.coming is None and chunk.leaving is None, f"{chunk} was written while it was on its way"
        chunk.owners_valid = False
        chunk.device_valid = on_device
        chunk.host_valid = not on_device
        chunk.disk_valid = False
        chunk.disk_version += 1
        if not on_device and chunk.device_bytes:
            self.compute.give(chunk)

    @uninterrupted
    def settle(self, chunk: Chunk, tier: Tier) -> None:
        """Have the chunk on one tier alone, to be written there."""
        self.moves.settle(chunk)
        if tier is Tier.DEVICE:
            if not chunk.device_valid:
                self.bring([chunk])
            if chunk.host is not None:
                self.host.give(chunk, for_good=True)
        elif tier is Tier.HOST:
            if not chunk.in_memory:
                self._read_to_host(chunk)
            elif chunk.device_bytes:
                if not chunk.host_bytes:
                    self._lift(chunk)
                if not self._leave_to_host(chunk):
                    self.host.make_room(chunk.nbytes, repr(chunk))
        elif not chunk.disk_valid or chunk.in_memory:
            self._settle_on_disk(chunk)

    def _read_to_host(self, chunk: Chunk) -> None:
        self.host.make_room(chunk.nbytes, repr(chunk))
        self.transit.wait(self.transit.read(chunk, 0, self.host.take(chunk).view(torch.uint8), urgent=True))
        chunk.host_valid = True

    def _settle_on_disk(self, chunk: Chunk) -> None:
        if not chunk.disk_valid:
            self.transit.wait(self.transit.write(chunk, 0, chunk.current(chunk.whole).view(torch.uint8)))
            chunk.disk_valid = True
        if chunk.device_bytes:
            self.compute.give(chunk)
        if chunk.host is not None:
            self.host.give(chunk)

    # Ahead of need

    @uninterrupted
    def advance(self) -> None:
        """Let what is on its way land, and begin what shall come ahead of need."""
        self.moves.land_done()
        if self.prefetch is None or self.evict_everything:
            return
        self._ask_ahead(self.prefetch)
        self._begin_line()
        self.compute.trim(self.compute.chunkable_bytes)

    def _begin_line(self) -> None:
        """Start the fetches in line, up to the first that waits: for evictions, or for an update of its host copy."""
        while self._line:
            chunk = self._line[0]
            updating = chunk.pins > 0 and not chunk.device_bytes
            if updating or chunk.leaving is not None or self.compute.used + chunk.nbytes > self.compute.chunkable_bytes:
                break
            self._line.popleft()
            if chunk.device_bytes:
                continue
            try:
                self.moves.come(chunk, urgent=False)
            except torch.OutOfMemoryError:
                # What is needed is fetched when it is accessed, and memory is made for it then.
                self.traffic.memory_retries += 1
                self.prefetch = None
                self._line.clear()

    def _ask_ahead(self, prefetch: Prefetch) -> None:
        present = {index for index, chunk in self.param16.items() if chunk.on_device_now and chunk.leaving is None}
        present.update(chunk.index for chunk in self._line)
        if len(present) == len(self.param16):
            return
        held = {index for index in present if self.param16[index].pins or self.param16[index].has_gradients}
        for index in prefetch.released(self.now, present, held):
            self._evict(self.param16[index])
            present.discard(index)
        for move in prefetch.ahead(self.now, present, held, self.compute.budget_bytes):
            # What the next iteration reads is new after the update.
            if self.param16[move.fetch].shared and prefetch.trace.next_use(move.fetch, self.now) >= len(
                prefetch.trace.moments
            ):
                break
            self._line.append(self.param16[move.fetch])
            for index in move.leave:
                self._evict(self.param16[index])

    @uninterrupted
    def forget_ahead(self) -> None:
        """The plan no longer holds: what it has asked for still comes, nothing more does."""
        self.prefetch = None
        if self._line and self.transit.failed is None:
            for chunk in list(self.moves.in_flight):
                if chunk.leaving is not None:
                    self.moves.land(chunk)
            self._begin_line()
        self._line.clear()

    # The host

    @uninterrupted
    def borrow_host(self, nbytes: int, what: str) -> Place:
        """Host memory for something that is no chunk. Where there is a disk, chunks on the host make room for it."""
        self.clear_host(round_up(nbytes, ALIGN_BYTES))
        return self.host.borrow(nbytes, what)

    @uninterrupted
    def clear_host(self, nbytes: int) -> bool:
        """Have chunks on the host make room for something else, if there is a disk. Returns whether there is room."""
        if self.disk is not None and not self.host.busy:
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
                if self.host.has_room(nbytes):
                    break
                self.settle(chunk, Tier.DISK)
                self.compute.moved.add(chunk)
        return self.host.has_room(nbytes)

    def _lift(self, newcomer: Chunk) -> None:
        """Where the host has no room for `newcomer`, take chunks of `param16` up to where the device has."""
        for chunk in self.chunks.values():
            if self.host.has_room(newcomer.nbytes):
                return
            fits = self.compute.used + chunk.nbytes <= self.compute.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and chunk.host_valid and not chunk.device_bytes and fits:
                self._with_retry(self.moves.fetch, chunk, protect=(newcomer,))

    # Leaving the device

    def _evict(self, chunk: Chunk) -> None:
        if chunk in self._line:
            self._line.remove(chunk)
            return
        if chunk.coming is not None:
            self.moves.land(chunk)
        if self._leave_device(chunk):
            self.traffic.evictions += 1

    def _leave_device(self, chunk: Chunk) -> bool:
        """Leave the device, written back only if no copy below is current. False if there is no room below.

        With a disk nobody loses a place on the host: a chunk goes where it has one, or finds room, else to disk.
        """
        if chunk.host_valid or chunk.disk_valid or chunk.owners_valid:
            self.compute.give(chunk)
            return True
        if chunk.shared:
            return False
        if self.disk is not None and chunk.host is None and self.host.free_bytes < chunk.nbytes:
            self.moves.leave(chunk, Tier.DISK)
            return True
        if self.hardware.beside and self._has_host_place(chunk):
            self.moves.leave(chunk, Tier.HOST)
            return True
        return self._leave_to_host(chunk)

    def _leave_to_host(self, chunk: Chunk) -> bool:
        """The same, at once."""
        if not chunk.host_valid and not self._has_host_place(chunk):
            return False
        self.moves.copy_down(chunk)
        return True

    def _has_host_place(self, chunk: Chunk) -> bool:
        if chunk.host is None:
            if not self.host.has_room(chunk.nbytes):
                return False
            self.host.take(chunk)
            # It had to be written without need, perhaps: from now on fetched chunks keep their host copy.
            self.moves.keep_duplicates = True
        return True

    def count_move(self, nbytes: int, *, to_device: bool) -> None:
        """Note bytes that crossed between the tiers outside whole chunks."""
        self.hardware.crossed(nbytes, to_device=to_device)
        if to_device:
            self.traffic.h2d_bytes += nbytes
        else:
            self.traffic.d2h_bytes += nbytes

    def _fail_device(self, nbytes: int, protected: set[Chunk]) -> None:
        compute = self.compute
        short = compute.used + nbytes - compute.chunkable_bytes
        pinned = [chunk for chunk in self.chunks.values() if chunk.pins]
        idle = {chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins} - protected
        stuck = {chunk for chunk in idle if not chunk.shared}
        if compute.non_model_bytes > compute.budget_bytes:
            what = "activations alone exceed the device budget"
        elif stuck and self.disk is None:
            what = f"{len(stuck)} chunks can't leave the device, since the host is full ({self.host.account()})"
        else:
            what = f"{nbytes} more bytes of chunks are needed at once on the device"
        where = "host_memory or device_memory" if stuck and self.disk is None else "device_memory"
        raise BudgetError(
            f"{what}: the budget of {compute.budget_bytes} bytes holds {compute.non_model_bytes} bytes of non-model "
            f"data and {compute.used} bytes of chunks (in use: {pinned}). Raise "
            f"{where} by at least {short} bytes ({format_size(short)}), use activation checkpointing, or a smaller "
            f"batch",
            short,
        )
