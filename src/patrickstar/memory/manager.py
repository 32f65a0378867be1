"""The chunk manager: brings chunks to the compute tier and lets them go, within byte budgets (Algorithms 1 and 2)."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from patrickstar.errors import BudgetError, DiskError, MoveError, TrainingError
from patrickstar.layout.lists import PARAM16
from patrickstar.layout.sizes import format_size
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.copies import Copies, StreamTransfer
from patrickstar.memory.disk import STAGES, DiskTier
from patrickstar.memory.host import HostTier
from patrickstar.memory.movers import Transfer
from patrickstar.memory.pages import PageBank, can_move_pages, round_up
from patrickstar.memory.slab import ALIGN_BYTES, Place
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


@dataclass
class Traffic:
    """What moved. Bytes are of chunks and of offloaded activations alike."""

    h2d_bytes: int = 0
    """Bytes that came to the device, from the host or from disk."""
    d2h_bytes: int = 0
    """Bytes that left the device, to the host or to disk."""
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    evictions: int = 0
    stall_s: float = 0.0

    def since(self, earlier: "Traffic") -> "Traffic":
        """The difference to an earlier reading."""
        return Traffic(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> "Traffic":
        """A reading that will not change."""
        return replace(self)


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
        self.disk = disk
        self.bank = PageBank() if device.type == "cpu" and can_move_pages() else None
        self.copies = Copies(device)
        self.page = torch.empty(0, dtype=torch.uint8)
        """One page of the host tier, for those who look into a chunk on disk."""
        if disk is not None:
            self.page = self.host.slab.view(self.host.borrow(disk.page_bytes), torch.uint8)
            # What the threads have allocated themselves.
            self.host.other_bytes += STAGES * disk.page_bytes
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
        self.leaving_bytes = 0
        """Of those, bytes of chunks that leave the device as soon as they are written."""
        self.device_peak = 0
        self.traffic = Traffic()
        self.failed: BaseException | None = None
        """The error of the disk, or of a thread, after which nothing is known to be whole."""
        self._moved: set[Chunk] = set()
        self._in_flight: dict[Chunk, None] = {}
        self._line: deque[Move] = deque()

    def __getitem__(self, key: tuple[str, int]) -> Chunk:
        return self.chunks[key]

    @property
    def resident_bytes(self) -> int:
        """Memory of this process that chunks, and what else the host tier holds, take: on a CPU of both tiers."""
        if self.device.type == "cuda":
            return self.device_used
        mapped = self.device_used if self.bank is None else self.bank.mapped_bytes
        return mapped + self.host.slab.touched_bytes

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
            if not self.free_host_room(chunk.nbytes):
                self._fail_host(chunk)
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
        self.settle_transfers(chunk)
        if chunk.device_bytes:
            self._release_device(chunk)
        if chunk.host is not None:
            self.host.give(chunk)
        chunk.memory.close()
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
        self._line.clear()
        self.copies.close()
        if self.disk is not None:
            self.disk.close()
        for chunk in list(self._in_flight):
            if chunk.coming is not None:
                chunk.coming = None
                self._release_device(chunk)
            if chunk.leaving is not None:
                chunk.leaving, chunk.disk_valid = None, False
                self.leaving_bytes -= chunk.nbytes
        self._in_flight.clear()

    # Access: the compute tier

    def bring(self, chunks: Sequence[Chunk]) -> None:
        """Have `chunks` on the device, all at once.

        One by one: what has come up makes room on the host for what has yet to leave.
        """
        self._check()
        missing = [chunk for chunk in chunks if not chunk.device_valid]
        later = sum(chunk.nbytes for chunk in missing if chunk.coming is None)
        for chunk in missing:
            if chunk.coming is not None:
                continue
            later -= chunk.nbytes
            self._overtake(chunk)
            self.make_room(chunk.nbytes, protect=chunks, later_bytes=later)
            self._fetch(chunk)
        for chunk in chunks:
            if chunk.coming is not None:
                self._arrive(chunk)
            elif chunk.leaving is not None:
                self._stay(chunk)
        self.make_room(0, protect=chunks)

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
        with self.stalled():
            chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
        chunk.device_valid = True
        self._count_fetch(chunk)
        if not self.keep_duplicates:
            self.host.give(chunk)

    def _begin_to_come(self, chunk: Chunk, urgent: bool) -> None:
        """Have a chunk on its way. See [Note: what is on its way]."""
        self._take_device(chunk)
        if chunk.host_valid:
            chunk.coming = self.copies.up(chunk)
        else:
            assert self.disk is not None and chunk.disk_valid, f"{chunk} is nowhere"
            chunk.coming = self.read_disk(chunk, 0, self._bytes_of(chunk), urgent)
        self._count_fetch(chunk)
        self._in_flight[chunk] = None

    def _count_fetch(self, chunk: Chunk) -> None:
        self.traffic.h2d_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes

    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0) -> None:
        """Evict until `nbytes` more fit into what the budget leaves for chunks.

        First the comfort limit is aimed at (in warm-up 80 % of the budget), by chunks of `param16` only; if the budget
        itself would be exceeded, any chunk that nobody uses may go. `later_bytes` are asked for next, and count in what
        an error says.
        """
        limit = min(self.comfort_bytes - self.non_model_bytes, self.chunkable_bytes)
        comfort = 0 if self.evict_everything else limit
        if self.device_used + self._line_bytes + nbytes > comfort:
            self._evict_until(nbytes, comfort, set(protect), later_bytes)
        if self.bank is not None:
            self.bank.trim(limit - self.device_used - nbytes)

    def _evict_until(self, nbytes: int, comfort: int, protected: set[Chunk], later_bytes: int) -> None:
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
            if self._staying_bytes + nbytes <= self.chunkable_bytes:
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
                    self._fail_host(chunk)
        elif not chunk.disk_valid or chunk.in_memory:
            self._settle_on_disk(chunk)

    def _read_to_host(self, chunk: Chunk) -> None:
        assert self.disk is not None
        if not self.free_host_room(chunk.nbytes):
            self._fail_host(chunk)
        target = self.host.take(chunk).view(torch.uint8)
        with self.stalled():
            self.wait_for(self.read_disk(chunk, 0, target, urgent=True))
        chunk.host_valid = True

    def _settle_on_disk(self, chunk: Chunk) -> None:
        assert self.disk is not None
        if not chunk.disk_valid:
            self.disk.place(chunk)
            source = chunk.current(chunk.whole).view(torch.uint8)
            with self.stalled():
                self.wait_for(self.write_disk(chunk, 0, source))
            chunk.disk_valid = True
        if chunk.device_bytes:
            self._release_device(chunk)
        if chunk.host is not None:
            self.host.give(chunk)

    # The disk

    def read_disk(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Begin to read whole pages of a chunk, from byte `start` on, into a flat tensor of bytes."""
        assert self.disk is not None
        self._check()
        self.traffic.disk_read_bytes += self.disk.written_bytes(chunk, start, target.numel())
        return self.disk.read(chunk, start, target, urgent)

    def write_disk(self, chunk: Chunk, start: int, source: torch.Tensor) -> Transfer:
        """Begin to write them."""
        assert self.disk is not None
        self._check()
        self.traffic.disk_write_bytes += source.numel()
        return self.disk.write(chunk, start, source)

    def pages_of(self, chunk: Chunk, first: int, numel: int, write: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """The pages of a chunk on disk that hold these elements, one after the other, written back if asked for.

        Each comes with the number of its first element, in memory that the next one takes over.
        """
        assert self.disk is not None and chunk.disk_valid, f"{chunk} is nowhere"
        self.settle_transfers(chunk)
        length = self.disk.page_bytes // chunk.dtype.itemsize
        for begin in range(first // length * length, first + numel, length):
            nbytes = min(length, chunk.numel - begin) * chunk.dtype.itemsize
            page = self.page[:nbytes]
            with self.stalled():
                self.wait_for(self.read_disk(chunk, begin * chunk.dtype.itemsize, page, urgent=True))
            yield begin, page.view(chunk.dtype)
            if write:
                chunk.disk_version += 1
                with self.stalled():
                    self.wait_for(self.write_disk(chunk, begin * chunk.dtype.itemsize, page))

    # Ahead of need

    def advance(self) -> None:
        """Let what is on its way land, and begin what shall come ahead of need."""
        for chunk in list(self._in_flight):
            transfer = chunk.coming or chunk.leaving
            assert transfer is not None
            if transfer.done:
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
            chunk.coming = None
            self._landed(chunk)
        else:
            self._land(chunk)

    def _land(self, chunk: Chunk) -> None:
        """A transfer has ended, or is waited for."""
        transfer = chunk.coming or chunk.leaving
        assert transfer is not None
        if not transfer.done:
            with self.stalled():
                self.wait_for(transfer)
        else:
            self.wait_for(transfer)
        if chunk.coming is not None:
            chunk.coming = None
            self._landed(chunk)
            return
        self._stay(chunk)
        self._release_device(chunk)

    def _landed(self, chunk: Chunk) -> None:
        del self._in_flight[chunk]
        chunk.device_valid = True
        self._moved.add(chunk)
        if not self.keep_duplicates and chunk.host is not None:
            self.host.give(chunk)

    def _stay(self, chunk: Chunk) -> None:
        """A chunk that is leaving is needed again: once it is written it has a copy on disk, and stays."""
        if chunk.leaving is None:
            return
        if not chunk.leaving.done:
            with self.stalled():
                self.wait_for(chunk.leaving)
        self.wait_for(chunk.leaving)
        chunk.leaving = None
        if chunk.leaving_to is Tier.HOST:
            chunk.host_valid = True
        else:
            chunk.disk_valid = True
        self.leaving_bytes -= chunk.nbytes
        del self._in_flight[chunk]

    def settle_transfers(self, chunk: Chunk) -> None:
        """Have a chunk be where it is going, or stay where it was leaving from."""
        if chunk.coming is not None:
            self._land(chunk)
        self._stay(chunk)
        for transfer in chunk.writing:
            with self.stalled():
                self.wait_for(transfer)

    def wait_for(self, transfer: Transfer) -> None:
        """Wait for a transfer. After an error of the disk, or of a thread, nothing moves any more."""
        try:
            transfer.wait()
        except (DiskError, MoveError) as error:
            self.failed = error
            self.close()
            raise

    def _check(self) -> None:
        if self.failed is not None:
            raise TrainingError(
                f"this engine has stopped, since bytes of its chunks were lost ({self.failed}); close it, and go on "
                f"from a saved state with a new one"
            ) from self.failed

    # Host memory

    def reserve_host(self, nbytes: int) -> Place:
        """Host memory that holds no chunk, such as offloaded activations; `release_host` gives it back."""
        nbytes = round_up(nbytes, ALIGN_BYTES)
        if not self.free_host_room(nbytes):
            short = self._host_short(nbytes)
            raise BudgetError(
                f"offloading activations needs {nbytes} more bytes on the host, where {self.host.account()}; "
                f"raise host_memory by at least {short} bytes ({format_size(short)})",
                short,
            )
        return self.host.borrow(nbytes)

    def free_host_room(self, nbytes: int) -> bool:
        """Have room for `nbytes` more on the host, if dropping copies of what the device has too makes it."""
        if self._host_short(nbytes) > 0:
            return False
        for chunk in self._host_spare():
            if self.host.free_bytes >= nbytes:
                break
            self.host.give(chunk)
        return True

    def _host_spare(self) -> list[Chunk]:
        """Chunks whose host memory can go, since the device has their bytes."""
        return [chunk for chunk in self.chunks.values() if chunk.host is not None and chunk.device_valid]

    def _host_short(self, nbytes: int) -> int:
        """By how much the host budget is too small for `nbytes` more, once all that can go has gone."""
        if self.host.free_bytes >= nbytes:
            return nbytes - self.host.free_bytes
        return nbytes - self.host.free_bytes - sum(chunk.nbytes for chunk in self._host_spare())

    def _lift(self, newcomer: Chunk) -> None:
        """Where the host has no room for `newcomer`, take chunks of `param16` up to where the device has."""
        for chunk in self.chunks.values():
            if self.free_host_room(newcomer.nbytes):
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
            if not self.free_host_room(chunk.nbytes):
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
            with self.stalled():
                chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))
            chunk.host_valid = True
            self._count_leave(chunk)
        self._stay(chunk)
        self._release_device(chunk)
        return True

    def _begin_to_leave(self, chunk: Chunk, tier: Tier) -> None:
        """Write a chunk to a tier below; it leaves when that has ended. See [Note: what is on its way]."""
        chunk.leaving_to = tier
        if tier is Tier.HOST:
            chunk.leaving = self.copies.down(chunk)
        else:
            assert self.disk is not None
            self.disk.place(chunk)
            chunk.leaving = self.write_disk(chunk, 0, self._bytes_of(chunk))
        self.leaving_bytes += chunk.nbytes
        self._count_leave(chunk)
        self._in_flight[chunk] = None

    def _bytes_of(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's device memory as bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(chunk.storage)[: chunk.nbytes]

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

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """What happens inside is time lost to movement."""
        start = time.perf_counter()
        yield
        self.traffic.stall_s += time.perf_counter() - start

    # What to say when it does not fit

    def _fail_host(self, chunk: Chunk) -> None:
        short = self._host_short(chunk.nbytes)
        raise BudgetError(
            f"chunk {chunk} needs {chunk.nbytes} bytes on the host, where {self.host.account()}; "
            f"raise host_memory by at least {short} bytes ({format_size(short)})",
            short,
        )

    def _fail_device(self, nbytes: int, protected: set[Chunk]) -> None:
        short = self.device_used + nbytes - self.chunkable_bytes
        pinned = [chunk for chunk in self.chunks.values() if chunk.pins]
        stuck = {chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins} - protected
        if self.non_model_bytes > self.device_budget_bytes:
            what = "activations alone exceed the device budget"
        elif stuck:
            what = f"{len(stuck)} chunks can't leave the device, since the host is full ({self.host.account()})"
        else:
            what = f"{nbytes} more bytes of chunks are needed at once on the device"
        raise BudgetError(
            f"{what}: the budget of {self.device_budget_bytes} bytes holds {self.non_model_bytes} bytes of non-model "
            f"data and {self.device_used} bytes of chunks (in use: {pinned}). Raise "
            f"{'host_memory or ' if stuck else ''}device_memory by at least {short} bytes ({format_size(short)}), use "
            f"activation checkpointing, or a smaller batch",
            short,
        )
