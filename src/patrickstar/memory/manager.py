"""The chunk manager: brings chunks to the compute tier and lets them go, within byte budgets (Algorithms 1 and 2)."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from patrickstar.errors import BudgetError
from patrickstar.layout.lists import PARAM16
from patrickstar.layout.sizes import format_size
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.copies import StreamTransfer
from patrickstar.memory.disk import STAGES, DiskTier
from patrickstar.memory.host import HostTier
from patrickstar.memory.pages import PageBank, can_move_pages, round_up
from patrickstar.memory.slab import ALIGN_BYTES, Place
from patrickstar.memory.traffic import Traffic
from patrickstar.memory.transit import Transit
from patrickstar.schedule.eviction import EvictionPolicy, ListOrder
from patrickstar.schedule.placement import Tier
from patrickstar.schedule.prefetch import Move, Prefetch

# [Note: what is on its way]
# The training thread alone decides what moves, and all that is known of chunks changes there; other threads and streams
# only move bytes. A chunk that is coming has taken its device memory, and is valid once the training thread has seen
# that its transfer ended (`land`). A chunk that is leaving stays valid, and counts, until then. So nothing computes on
# bytes that have not arrived, and no memory is used twice. What is asked for ahead waits in a line until those who
# leave for it are gone; decisions about what comes next reckon with the line, so they don't depend on how fast the
# disk is.


class Manager:
    """Owns the chunks of one engine and the bytes they take on the tiers."""

    def __init__(
        self,
        device: torch.device,
        device_budget_bytes: int,
        host_budget_bytes: int,
        poison: bool,
        *,
        disk: DiskTier | None = None,
        slab_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.device_budget_bytes = device_budget_bytes
        self.poison = poison
        slab_bytes = host_budget_bytes if slab_bytes is None else slab_bytes
        self.host = HostTier(host_budget_bytes, slab_bytes, device.type == "cuda", poison)
        self.bank = PageBank() if device.type == "cpu" and can_move_pages() else None
        page = torch.empty(0, dtype=torch.uint8)
        if disk is not None:
            page = self.host.view(self.host.borrow(disk.page_bytes), torch.uint8)
            # What the threads have allocated themselves.
            self.host.other_bytes += STAGES * disk.page_bytes
        self.transit = Transit(device, disk, page)
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.param16: dict[int, Chunk] = {}
        """Those of them that operators read, by index."""
        self.policy: EvictionPolicy = ListOrder()
        self.prefetch: Prefetch | None = None
        """What brings chunks before they are accessed, while a trace is followed."""
        self.evict_everything = False
        self.keep_duplicates = True
        """Whether a chunk's host copy outlives its fetch, so that it can be dropped from the device without a write."""
        self.now = 0
        self.non_model_bytes = 0
        self.comfort_bytes = device_budget_bytes
        self.device_used = 0
        self.device_peak = 0
        self._moved: set[Chunk] = set()
        self._in_flight: dict[Chunk, None] = {}
        self._line: deque[Move] = deque()

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
        if self.device.type == "cuda":
            return self.device_used
        mapped = self.device_used if self.bank is None else self.bank.mapped_bytes
        return mapped + self.host.touched_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes of chunks that leave the device as soon as they are written."""
        return sum(chunk.nbytes for chunk in self._in_flight if chunk.leaving is not None)

    @property
    def chunkable_bytes(self) -> int:
        """What the device budget leaves for chunks at this moment."""
        return self.device_budget_bytes - self.non_model_bytes

    def new_chunk(self, kind: str, index: int, numel: int, dtype: str, tier: Tier) -> Chunk:
        """Make a chunk of zeros and take memory for it on one tier.

        In memory these are actually written: what was never touched is not resident, and a meter of resident memory
        would miss it.
        """
        chunk = Chunk(kind, index, numel, dtype, self.device, self.bank)
        if tier is Tier.DEVICE:
            self.make_room(chunk.nbytes, protect=())
            self._take_device(chunk)
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

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk and give its memory back."""
        if self.transit.failed is None:
            self.settle_transfers(chunk)
        if chunk.device_bytes:
            self._release_device(chunk)
        if chunk.host is not None:
            self.host.give(chunk)
        chunk.memory.close()
        if self.disk is not None:
            self.disk.forget(chunk)
        del self.chunks[chunk.kind, chunk.index]
        if chunk.kind == PARAM16:
            del self.param16[chunk.index]

    def land_all(self) -> None:
        """Wait for all that is on its way; nothing more comes ahead of need."""
        self.forget_ahead()
        for chunk in list(self._in_flight):
            self.settle_transfers(chunk)

    def drain_moved(self) -> set[Chunk]:
        """The chunks whose memory came, went or changed places since the last call."""
        moved, self._moved = self._moved | self.host.moved, set()
        self.host.moved = set()
        return moved

    def close(self) -> None:
        """Stop what moves bytes; chunks in memory stay."""
        self.abandon()
        self.transit.close()

    def abandon(self) -> None:
        """Drop what is on its way: chunks stay where they were."""
        self._line.clear()
        for chunk in self._in_flight:
            if chunk.coming is not None:
                chunk.coming.cancel()
                chunk.coming = None
                self._release_device(chunk)
            if chunk.leaving is not None:
                chunk.leaving.cancel()
                chunk.leaving = None
        self._in_flight.clear()

    # Access: the compute tier

    def bring(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Have `chunks` on the device, all at once. `gently`: only chunks of `param16` may leave for them.

        One by one: what has come up makes room on the host for what has yet to leave.
        """
        self.transit.check()
        for chunk in chunks:
            if chunk.leaving is not None:
                self._stay(chunk)
            elif chunk in self._in_flight and chunk.coming is None:
                self._land(chunk)
        missing = [chunk for chunk in chunks if not chunk.device_valid]
        later = sum(chunk.nbytes for chunk in missing if chunk.coming is None)
        for chunk in missing:
            if chunk.coming is not None:
                continue
            later -= chunk.nbytes
            self._overtake(chunk)
            self.make_room(chunk.nbytes, protect=chunks, later_bytes=later, gently=gently)
            self._fetch(chunk)
        for chunk in chunks:
            if chunk.coming is not None:
                self._arrive(chunk)
        self.make_room(0, protect=chunks, gently=gently)

    def have(self, *chunks: Chunk) -> None:
        """Have chunks in memory, wherever, and not on their way."""
        if any(chunk.coming is not None or not chunk.in_memory for chunk in chunks):
            self.bring(chunks)

    def _fetch(self, chunk: Chunk) -> None:
        """Copy a chunk up, or begin to read it."""
        if not chunk.host_valid:
            self._begin_to_come(chunk, urgent=True)
            return
        self._take_device(chunk)
        with self.traffic.stalled():
            chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
        chunk.device_valid = True
        self._count_fetch(chunk)
        if not self.keep_duplicates:
            self.host.give(chunk)

    def _begin_to_come(self, chunk: Chunk, urgent: bool) -> None:
        """Have a chunk on its way. See [Note: what is on its way]."""
        self._in_flight[chunk] = None  # first: Ctrl-C may strike between any two lines
        self._take_device(chunk)
        chunk.coming = self.transit.up(chunk, urgent)
        self._count_fetch(chunk)

    def _count_fetch(self, chunk: Chunk) -> None:
        self.traffic.h2d_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes

    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0, *, gently: bool = False) -> None:
        """Evict until `nbytes` more fit into what the budget leaves for chunks.

        First the comfort limit is aimed at (in warm-up 80 % of the budget), by chunks of `param16` only; if the budget
        itself would be exceeded, any chunk that nobody uses may go. `later_bytes` are asked for next, and count in what
        an error says.
        """
        limit = min(self.comfort_bytes - self.non_model_bytes, self.chunkable_bytes)
        comfort = 0 if self.evict_everything else limit
        if self.device_used + self._line_bytes + nbytes > comfort:
            self._evict_until(nbytes, comfort, set(protect), later_bytes, gently)
        if self.bank is not None:
            self.bank.trim(limit - self.device_used - nbytes)

    def _evict_until(self, nbytes: int, comfort: int, protected: set[Chunk], later_bytes: int, gently: bool) -> None:
        movable = [
            chunk
            for chunk in self.chunks.values()
            if chunk.device_valid and not chunk.pins and chunk.leaving is None and chunk not in protected
        ]
        by_index = {chunk.index: chunk for chunk in movable if chunk.kind == PARAM16}
        for index in self.policy.order(by_index, self.now):
            if self._staying_bytes + nbytes <= comfort:
                break
            self._evict(by_index[index])
        for chunk in movable:
            if gently or self._staying_bytes + nbytes <= self.chunkable_bytes:
                break
            if chunk.kind != PARAM16:
                self._evict(chunk)
        limit = comfort if self.evict_everything else self.chunkable_bytes
        for chunk in list(self._in_flight):
            if self.device_used + nbytes <= limit:
                break
            if chunk.leaving is not None and chunk not in protected:
                self._land(chunk)
            elif chunk.coming is not None and chunk not in protected and not chunk.pins:
                # What came early goes again before anything fails.
                self._land(chunk)
                self._evict(chunk)
        if self.device_used + nbytes > self.chunkable_bytes:
            self._fail_device(nbytes + later_bytes, protected)

    @property
    def _line_bytes(self) -> int:
        return sum(self.param16[move.fetch].nbytes for move in self._line)

    @property
    def _staying_bytes(self) -> int:
        """What the device will hold once everybody who leaves is gone, and those in line are there."""
        return self.device_used - self.leaving_bytes + self._line_bytes

    def mark_written(self, chunk: Chunk, on_device: bool) -> None:
        """Say that one copy was written: it is the authoritative one, copies on the other tiers are stale."""
        assert chunk.coming is None, f"{chunk} was written while it was on its way"
        self._stay(chunk)
        chunk.device_valid = on_device
        chunk.host_valid = not on_device
        chunk.disk_valid = False
        chunk.disk_version += 1
        if not on_device and chunk.device_bytes:
            self._release_device(chunk)

    def settle(self, chunk: Chunk, tier: Tier) -> None:
        """Have the chunk on one tier alone, to be written there."""
        self.settle_transfers(chunk)
        if tier is Tier.DEVICE:
            if not chunk.device_valid:
                self.bring([chunk])
            if chunk.host is not None:
                self.host.give(chunk)
        elif tier is Tier.HOST:
            if not chunk.device_valid and not chunk.host_valid:
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
            self._release_device(chunk)
        if chunk.host is not None:
            self.host.give(chunk)

    # Ahead of need

    def advance(self) -> None:
        """Let what is on its way land, and begin what shall come ahead of need."""
        for chunk in list(self._in_flight):
            transfer = chunk.coming or chunk.leaving
            if transfer is None or transfer.done:
                self._land(chunk)
        if self.prefetch is None or self.evict_everything:
            return
        if not self._line:
            self._ask_ahead(self.prefetch)
        while self._line:
            chunk = self.param16[self._line[0].fetch]
            if chunk.leaving is not None or self.device_used + chunk.nbytes > self.chunkable_bytes:
                break  # until those who leave have left
            self._line.popleft()
            if not chunk.device_bytes:
                self._begin_to_come(chunk, urgent=False)
        if self.bank is not None:
            self.bank.trim(self.chunkable_bytes - self.device_used)

    def _ask_ahead(self, prefetch: Prefetch) -> None:
        present = self._present()
        if len(present) == len(self.param16):
            return
        held = {index for index in present if (chunk := self.param16[index]).pins or not chunk.device_valid}
        for index in prefetch.released(self.now, present, held):
            self._evict(self.param16[index])
            present.discard(index)
        for move in prefetch.ahead(self.now, present, held, self.device_budget_bytes):
            self._line.append(move)
            for index in move.leave:
                self._evict(self.param16[index])

    def _present(self) -> set[int]:
        """`param16` chunks that are on the device or will be, without those that leave."""
        return {index for index, chunk in self.param16.items() if chunk.on_device_now and chunk.leaving is None}

    def _overtake(self, chunk: Chunk) -> None:
        """A chunk that waits in line is needed now."""
        if chunk.kind == PARAM16:
            for move in self._line:
                if move.fetch == chunk.index:
                    self._line.remove(move)
                    break

    def forget_ahead(self) -> None:
        """The plan no longer holds: what has begun goes on, nothing more comes ahead of need."""
        self.prefetch = None
        self._line.clear()

    def _arrive(self, chunk: Chunk) -> None:
        """Wait for a chunk that is coming; on a GPU those who compute wait, and not the training thread."""
        if isinstance(chunk.coming, StreamTransfer) and self.keep_duplicates:
            chunk.coming.order()
            chunk.host_reader, chunk.coming = chunk.coming, None
            self._landed(chunk)
        else:
            self._land(chunk)

    def _land(self, chunk: Chunk) -> None:
        """A transfer has ended, or is waited for."""
        transfer = chunk.coming or chunk.leaving
        if transfer is None:  # Ctrl-C came before it began
            del self._in_flight[chunk]
            if chunk.on_device_now and not chunk.device_valid:
                self._release_device(chunk)
            return
        self.transit.wait(transfer)
        if chunk.coming is not None:
            chunk.coming = None
            self._landed(chunk)
            return
        self._stay(chunk)
        self._release_device(chunk)

    def _landed(self, chunk: Chunk) -> None:
        self._in_flight.pop(chunk, None)
        chunk.device_valid = True
        self._moved.add(chunk)
        if not self.keep_duplicates and chunk.host is not None:
            self.host.give(chunk)

    def _stay(self, chunk: Chunk) -> None:
        """A chunk that is leaving is needed again: once it is written it has a copy on disk, and stays."""
        if chunk.leaving is None:
            return
        self.transit.wait(chunk.leaving)
        chunk.leaving = None
        if chunk.leaving_to is Tier.HOST:
            chunk.host_valid = True
        else:
            chunk.disk_valid = True
        self._in_flight.pop(chunk, None)

    def settle_transfers(self, chunk: Chunk) -> None:
        """Have a chunk be where it is going, or stay where it was leaving from."""
        if chunk.coming is not None:
            self._land(chunk)
        self._stay(chunk)
        for transfer in (*chunk.reading, *chunk.writing, *filter(None, [chunk.host_reader])):
            self.transit.wait(transfer)
        chunk.host_reader = None

    def borrow_host(self, nbytes: int, what: str) -> Place:
        """Host memory for something that is no chunk. Where there is a disk, chunks on the host make room for it."""
        nbytes = round_up(nbytes, ALIGN_BYTES)
        if self.disk is not None and not self.host.busy:
            below = [
                chunk
                for chunk in self.chunks.values()
                if chunk.host_valid and not chunk.device_bytes and not chunk.pins
            ]
            # Optimizer chunks first: they save the least, and the last of them have the most time to come back.
            for chunk in sorted(below, key=lambda chunk: (chunk.kind == PARAM16, -chunk.index)):
                if self.host.has_room(nbytes):
                    break
                self.settle(chunk, Tier.DISK)
                self._moved.add(chunk)
        return self.host.borrow(nbytes, what)

    def _lift(self, newcomer: Chunk) -> None:
        """Where the host has no room for `newcomer`, take chunks of `param16` up to where the device has."""
        for chunk in self.chunks.values():
            if self.host.has_room(newcomer.nbytes):
                return
            fits = self.device_used + chunk.nbytes <= self.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and chunk.host_valid and not chunk.device_bytes and fits:
                self._fetch(chunk)

    def _evict(self, chunk: Chunk) -> None:
        if self._leave_device(chunk):
            self.traffic.evictions += 1

    def _leave_device(self, chunk: Chunk) -> bool:
        """Leave the device, written back only if no copy below is current. False if there is no room below.

        With a disk nobody loses a place on the host: a chunk goes where it has one, or finds room, else to disk.
        """
        if chunk.host_valid or chunk.disk_valid:
            self._release_device(chunk)
            return True
        if self.disk is not None and chunk.host is None and self.host.free_bytes < chunk.nbytes:
            self._begin_to_leave(chunk, Tier.DISK)
            return True
        if self.device.type == "cuda" and self._has_host_place(chunk):
            self._begin_to_leave(chunk, Tier.HOST)
            return True
        return self._leave_to_host(chunk)

    def _has_host_place(self, chunk: Chunk) -> bool:
        if chunk.host is None:
            if not self.host.has_room(chunk.nbytes):
                return False
            self.host.take(chunk)
            # It had to be written without need, perhaps: from now on fetched chunks keep their host copy.
            self.keep_duplicates = True
        return True

    def _leave_to_host(self, chunk: Chunk) -> bool:
        """The same, at once."""
        if not chunk.host_valid:
            if not self._has_host_place(chunk):
                return False
            with self.traffic.stalled():
                chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))
            chunk.host_valid = True
            self._count_leave(chunk)
        self._stay(chunk)
        self._release_device(chunk)
        return True

    def _begin_to_leave(self, chunk: Chunk, tier: Tier) -> None:
        """Write a chunk to a tier below; it leaves when that has ended. See [Note: what is on its way]."""
        self._in_flight[chunk] = None
        chunk.leaving_to = tier
        if tier is Tier.HOST:
            chunk.leaving = self.transit.copies.down(chunk)
        else:
            chunk.leaving = self.transit.write(chunk, 0, chunk.device_bytes_view())
        self._count_leave(chunk)

    def _count_leave(self, chunk: Chunk) -> None:
        self.traffic.d2h_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes

    def _take_device(self, chunk: Chunk) -> None:
        chunk.take_device()
        self._moved.add(chunk)
        self.device_used += chunk.nbytes
        self.device_peak = max(self.device_peak, self.device_used)

    def _release_device(self, chunk: Chunk) -> None:
        chunk.free_device(self.poison)
        self._moved.add(chunk)
        self.device_used -= chunk.nbytes

    def count_move(self, nbytes: int, *, to_device: bool) -> None:
        """Note bytes that crossed between the tiers outside whole chunks."""
        if to_device:
            self.traffic.h2d_bytes += nbytes
        else:
            self.traffic.d2h_bytes += nbytes

    def _fail_device(self, nbytes: int, protected: set[Chunk]) -> None:
        short = self.device_used + nbytes - self.chunkable_bytes
        pinned = [chunk for chunk in self.chunks.values() if chunk.pins]
        stuck = {chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins} - protected
        if self.non_model_bytes > self.device_budget_bytes:
            what = "activations alone exceed the device budget"
        elif stuck and self.disk is None:
            what = f"{len(stuck)} chunks can't leave the device, since the host is full ({self.host.account()})"
        else:
            what = f"{nbytes} more bytes of chunks are needed at once on the device"
        where = "host_memory or device_memory" if stuck and self.disk is None else "device_memory"
        raise BudgetError(
            f"{what}: the budget of {self.device_budget_bytes} bytes holds {self.non_model_bytes} bytes of non-model "
            f"data and {self.device_used} bytes of chunks (in use: {pinned}). Raise "
            f"{where} by at least {short} bytes ({format_size(short)}), use activation checkpointing, or a smaller "
            f"batch",
            short,
        )
