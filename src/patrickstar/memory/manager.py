"""The chunk manager: brings chunks to the compute tier and lets them go, within byte budgets (Algorithms 1 and 2)."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from patrickstar.errors import BudgetError
from patrickstar.layout.lists import PARAM16
from patrickstar.layout.sizes import format_size
from patrickstar.memory.chunk import Chunk
from patrickstar.schedule.eviction import EvictionPolicy, ListOrder


@dataclass
class Traffic:
    """What moved. Bytes are of chunks and of offloaded activations alike."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    evictions: int = 0
    stall_s: float = 0.0

    def since(self, earlier: "Traffic") -> "Traffic":
        """The difference to an earlier reading."""
        return Traffic(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> "Traffic":
        """A reading that will not change."""
        return replace(self)


class Manager:
    """Owns the chunks of one engine and the bytes they take on the two tiers."""

    def __init__(self, device: torch.device, device_budget_bytes: int, host_budget_bytes: int, poison: bool) -> None:
        self.device = device
        self.device_budget_bytes = device_budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self.poison = poison
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.policy: EvictionPolicy = ListOrder()
        self.evict_everything = False
        self.keep_duplicates = True
        """Whether a chunk's host copy outlives its fetch, so that it can be dropped from the device without a write."""
        self.now = 0
        self.non_model_bytes = 0
        self.host_non_model_bytes = 0
        self.comfort_bytes = device_budget_bytes
        self.device_used = 0
        self.host_used = 0
        self.device_peak = 0
        self.host_peak = 0
        self.host_non_model_peak = 0
        self.traffic = Traffic()
        self._moved: set[Chunk] = set()

    def __getitem__(self, key: tuple[str, int]) -> Chunk:
        return self.chunks[key]

    @property
    def total_used(self) -> int:
        """Chunk bytes on both tiers."""
        return self.device_used + self.host_used

    @property
    def chunkable_bytes(self) -> int:
        """What the device budget leaves for chunks at this moment."""
        return self.device_budget_bytes - self.non_model_bytes

    def create(self, chunk: Chunk, on_device: bool) -> Chunk:
        """Adopt a new chunk and take memory for it on one tier; its content is zeros, actually written.

        Memory that was never touched is not resident, and a meter of resident memory would miss it.
        """
        if on_device:
            self.make_room(chunk.nbytes, protect=())
            self._take_device(chunk)
            chunk.on_device(chunk.whole).zero_()
            chunk.device_valid = True
        else:
            self._lift(chunk)
            if not self.free_host_room(chunk.nbytes):
                self._fail_host(chunk)
            self._take_host(chunk).zero_()
            chunk.host_valid = True
        self.chunks[chunk.kind, chunk.index] = chunk
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk and give its memory back."""
        if chunk.device_bytes:
            self._release_device(chunk)
        if chunk.host is not None:
            self._release_host(chunk)
        del self.chunks[chunk.kind, chunk.index]

    def drain_moved(self) -> set[Chunk]:
        """The chunks that came to the device or left it since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    # Access: the compute tier

    def bring(self, chunks: Sequence[Chunk]) -> None:
        """Have `chunks` on the device, all at once.

        One by one: what has come up makes room on the host for what has yet to leave.
        """
        missing = [chunk for chunk in chunks if not chunk.device_valid]
        later = sum(chunk.nbytes for chunk in missing)
        for chunk in missing:
            later -= chunk.nbytes
            self.make_room(chunk.nbytes, protect=chunks, later_bytes=later)
            self._fetch(chunk)
        self.make_room(0, protect=chunks)

    def _fetch(self, chunk: Chunk) -> None:
        self._take_device(chunk)
        with self._stalled():
            chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
        chunk.device_valid = True
        self.traffic.h2d_bytes += chunk.nbytes
        chunk.moved_bytes += chunk.nbytes
        if not self.keep_duplicates:
            self._release_host(chunk)

    def make_room(self, nbytes: int, protect: Iterable[Chunk], later_bytes: int = 0) -> None:
        """Evict until `nbytes` more fit into what the budget leaves for chunks.

        First the comfort limit is aimed at (in warm-up 80 % of the budget), by chunks of `param16` only; if the budget
        itself would be exceeded, any chunk that nobody uses may go. `later_bytes` are asked for next, and count in what
        an error says.
        """
        comfort = min(self.comfort_bytes - self.non_model_bytes, self.chunkable_bytes)
        if self.evict_everything:
            comfort = 0
        if self.device_used + nbytes <= comfort:
            return
        protected = set(protect)
        movable = [
            chunk for chunk in self.chunks.values() if chunk.device_bytes and not chunk.pins and chunk not in protected
        ]
        by_index = {chunk.index: chunk for chunk in movable if chunk.kind == PARAM16}
        for index in self.policy.order(by_index, self.now):
            if self.device_used + nbytes <= comfort:
                break
            self._evict(by_index[index])
        for chunk in movable:
            if self.device_used + nbytes <= self.chunkable_bytes:
                break
            if chunk.kind != PARAM16:
                self._evict(chunk)
        if self.device_used + nbytes > self.chunkable_bytes:
            self._fail_device(nbytes + later_bytes, protected)

    def mark_written(self, chunk: Chunk, on_device: bool) -> None:
        """Say that one copy was written: it is the authoritative one, a copy on the other tier is stale."""
        chunk.device_valid = on_device
        chunk.host_valid = not on_device
        if not on_device and chunk.device_bytes:
            self._release_device(chunk)

    def settle(self, chunk: Chunk, on_device: bool) -> None:
        """Have the chunk on one tier alone, to be written there."""
        if on_device:
            if not chunk.device_valid:
                self.bring([chunk])
            if chunk.host is not None:
                self._release_host(chunk)
        elif chunk.device_bytes:
            if not chunk.host_bytes:
                self._lift(chunk)
            if not self._leave_device(chunk):
                self._fail_host(chunk)

    # Host memory

    def reserve_host(self, nbytes: int) -> None:
        """Account for host memory that holds offloaded activations; negative bytes give it back."""
        if nbytes > 0 and not self.free_host_room(nbytes):
            short = self._host_short(nbytes)
            raise BudgetError(
                f"offloading activations needs {nbytes} more bytes on the host, where {self._host_account()}; "
                f"raise host_memory by at least {short} bytes ({format_size(short)})",
                short,
            )
        self.host_non_model_bytes += nbytes
        self.host_non_model_peak = max(self.host_non_model_peak, self.host_non_model_bytes)

    def free_host_room(self, nbytes: int) -> bool:
        """Have room for `nbytes` more on the host, if dropping copies of what the device has too makes it."""
        if self._host_short(nbytes) > 0:
            return False
        for chunk in self._host_spare():
            if self.host_used + self.host_non_model_bytes + nbytes <= self.host_budget_bytes:
                break
            self._release_host(chunk)
        return True

    def _host_spare(self) -> list[Chunk]:
        """Chunks whose host memory can go, since the device has their bytes."""
        return [chunk for chunk in self.chunks.values() if chunk.host is not None and chunk.device_valid]

    def _host_short(self, nbytes: int) -> int:
        """By how much the host budget is too small for `nbytes` more, once all that can go has gone."""
        stays = self.host_used - sum(chunk.nbytes for chunk in self._host_spare())
        return stays + self.host_non_model_bytes + nbytes - self.host_budget_bytes

    def _lift(self, newcomer: Chunk) -> None:
        """Where the host has no room for `newcomer`, take chunks of `param16` up to where the device has."""
        for chunk in self.chunks.values():
            if self.free_host_room(newcomer.nbytes):
                return
            fits = self.device_used + chunk.nbytes <= self.chunkable_bytes
            movable = chunk.kind == PARAM16 and chunk is not newcomer and not chunk.pins
            if movable and not chunk.device_valid and fits:
                self._fetch(chunk)

    def _evict(self, chunk: Chunk) -> None:
        if self._leave_device(chunk):
            self.traffic.evictions += 1

    def _leave_device(self, chunk: Chunk) -> bool:
        """Leave the device, written back only if the host copy is not current. False if the host has no room."""
        if not chunk.host_valid:
            if chunk.host is None:
                if not self.free_host_room(chunk.nbytes):
                    return False
                self._take_host(chunk)
                # It had to be written without need, perhaps: from now on fetched chunks keep their host copy.
                self.keep_duplicates = True
            with self._stalled():
                chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))
            chunk.host_valid = True
            self.traffic.d2h_bytes += chunk.nbytes
            chunk.moved_bytes += chunk.nbytes
        self._release_device(chunk)
        return True

    def _take_device(self, chunk: Chunk) -> None:
        chunk.allocate_device()
        self._moved.add(chunk)
        self.device_used += chunk.nbytes
        self.device_peak = max(self.device_peak, self.device_used)

    def _release_device(self, chunk: Chunk) -> None:
        chunk.free_device(self.poison)
        self._moved.add(chunk)
        self.device_used -= chunk.nbytes

    def _take_host(self, chunk: Chunk) -> torch.Tensor:
        host = chunk.allocate_host()
        self.host_used += chunk.nbytes
        self.host_peak = max(self.host_peak, self.host_used)
        return host

    def _release_host(self, chunk: Chunk) -> None:
        chunk.free_host(self.poison)
        self.host_used -= chunk.nbytes

    def count_move(self, nbytes: int, *, to_device: bool) -> None:
        """Note bytes that crossed between the tiers outside whole chunks."""
        if to_device:
            self.traffic.h2d_bytes += nbytes
        else:
            self.traffic.d2h_bytes += nbytes

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.traffic.stall_s += time.perf_counter() - start

    # What to say when it does not fit

    def _host_account(self) -> str:
        return (
            f"chunks take {self.host_used} bytes and offloaded activations {self.host_non_model_bytes} "
            f"of a budget of {self.host_budget_bytes}"
        )

    def _fail_host(self, chunk: Chunk) -> None:
        short = self._host_short(chunk.nbytes)
        raise BudgetError(
            f"chunk {chunk} needs {chunk.nbytes} bytes on the host, where {self._host_account()}; "
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
            what = f"{len(stuck)} chunks can't leave the device, since the host is full ({self._host_account()})"
        else:
            what = f"{nbytes} more bytes of chunks are needed at once on the device"
        raise BudgetError(
            f"{what}: the budget of {self.device_budget_bytes} bytes holds {self.non_model_bytes} bytes of non-model "
            f"data and {self.device_used} bytes of chunks (in use: {pinned}). Raise "
            f"{'host_memory or ' if stuck else ''}device_memory by at least {short} bytes ({format_size(short)}), use "
            f"activation checkpointing, or a smaller batch",
            short,
        )
