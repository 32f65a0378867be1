"""The host tier: its budget, and who has which place in its slab."""

from collections.abc import Callable

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar._memory.chunk import Chunk, fill_poison
from patrickstar._memory.host_arena import ALIGN_BYTES, ArenaBlock, HostArena
from patrickstar._memory.vm_pool import round_up
from patrickstar.errors import BudgetError


class HostTier:
    """Chunks, offloaded activations and the update's pages, in one slab and under one budget."""

    def __init__(self, budget_bytes: int, slab_bytes: int, new_slab: Callable[[int], HostArena], poison: bool) -> None:
        self.budget_bytes = budget_bytes
        self.new_arena = new_slab
        self.arenas = [new_slab(min(budget_bytes, slab_bytes))]
        """One, unless what nobody foresaw (unfrozen parameters, activations) asks for more beside a GPU."""
        self.poison = poison
        self.used = 0
        """Bytes of chunks."""
        self.other_bytes = 0
        """Bytes of everything else."""
        self.outside_bytes = 0
        """Those of it that lie outside of the slabs."""
        self.peak = 0
        self.other_peak = 0
        self.busy = 0
        """Updates at work on chunks here, whose places must not change meanwhile."""
        self.moved: set[Chunk] = set()
        """Chunks whose place has changed since the manager last looked."""
        self._owners: dict[ArenaBlock, Chunk] = {}

    @property
    def free_bytes(self) -> int:
        """What the budget leaves."""
        return self.budget_bytes - self.used - self.other_bytes

    def allocate(self, chunk: Chunk) -> torch.Tensor:
        """Have a place for a chunk, for which the budget has room; its content is undefined."""
        place = self._place(chunk.nbytes)
        self._owners[place] = chunk
        chunk.host_block, chunk.host = place, self.view(place, chunk.dtype)
        self.used += chunk.nbytes
        self.peak = max(self.peak, self.used)
        return chunk.host

    def free(self, chunk: Chunk, *, for_good: bool = False) -> None:
        """Take a chunk's place back; `for_good` its memory goes back to the system."""
        assert chunk.host is not None and chunk.host_block is not None
        _wait_for_transfers(chunk)
        if self.poison:
            fill_poison(chunk.host)
        del self._owners[chunk.host_block]
        chunk.host_block.slab.free(chunk.host_block, for_good=for_good)
        chunk.host, chunk.host_block, chunk.host_valid = None, None, False
        self.used -= chunk.nbytes

    def has_room(self, nbytes: int) -> bool:
        """Have room for `nbytes` more, if dropping copies of what the device has too makes it."""
        if self._short_bytes(nbytes) > 0:
            return False
        for chunk in self._droppable():
            if self.free_bytes >= nbytes:
                break
            self.free(chunk)
        return True

    def make_room(self, nbytes: int, what: str) -> None:
        """The same. Raises BudgetError, saying for what, if there is none."""
        if not self.has_room(nbytes):
            short = self._short_bytes(nbytes)
            raise BudgetError(
                f"{what} needs {nbytes} bytes on the host, where {self.usage_summary()}; raise host_memory by at least "
                f"{short} bytes ({format_size(short)})",
                short,
            )

    def _droppable(self) -> list[Chunk]:
        """Chunks whose memory can go, since the device has their bytes."""
        return [chunk for chunk in self._owners.values() if chunk.device_resident and chunk.eviction_transfer is None]

    def _short_bytes(self, nbytes: int) -> int:
        """By how much the budget is too small for `nbytes` more, once all that can go has gone."""
        short = nbytes - self.free_bytes
        return short if short <= 0 else short - sum(chunk.nbytes for chunk in self._droppable())

    def allocate_block(self, nbytes: int, what: str = "a page on its way") -> ArenaBlock:
        """Bytes for something that is no chunk. Look at them by `view`, give them back by `release_block`."""
        nbytes = round_up(nbytes, ALIGN_BYTES)
        self.make_room(nbytes, what)
        place = self._place(nbytes)
        self.other_bytes += nbytes
        self.other_peak = max(self.other_peak, self.other_bytes)
        return place

    def release_block(self, place: ArenaBlock) -> None:
        """They are not needed any more."""
        place.slab.free(place)
        self.other_bytes -= place.nbytes

    def reserve(self, nbytes: int, what: str) -> None:
        """Count bytes that lie elsewhere, and are written to at once, until they are given up by
        `release_reservation`."""
        self.make_room(nbytes, what)
        self.other_bytes += nbytes
        self.outside_bytes += nbytes
        self.other_peak = max(self.other_peak, self.other_bytes)

    def release_reservation(self, nbytes: int) -> None:
        """They are not there any more."""
        self.other_bytes -= nbytes
        self.outside_bytes -= nbytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.arenas)

    @property
    def touched_bytes(self) -> int:
        """What the tier takes of the machine's memory."""
        return sum(slab.touched_bytes for slab in self.arenas) + self.outside_bytes

    @staticmethod
    def view(place: ArenaBlock, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a place as a flat tensor; a place may move, so don't keep it."""
        return place.slab.view(place, dtype)

    def _first_place(self, nbytes: int) -> ArenaBlock | None:
        locations = (slab.allocate(nbytes) for slab in self.arenas)
        return next((place for place in locations if place is not None), None)

    def _place(self, nbytes: int) -> ArenaBlock:
        place = self._first_place(nbytes)
        if place is None and not self.busy:
            for chunk in self._owners.values():
                _wait_for_transfers(chunk)
            for slab in self.arenas:
                slab.compact()
            for moved, chunk in self._owners.items():
                chunk.host = self.view(moved, chunk.dtype)
                self.moved.add(chunk)
            place = self._first_place(nbytes)
        if place is None and nbytes <= self.budget_bytes - self.arena_bytes:
            self.arenas.append(self.new_arena(nbytes))
            place = self._first_place(nbytes)
        if place is None:
            raise BudgetError(
                f"the host's slab of {self.arena_bytes} bytes has no {nbytes} in a row; raise host_memory by as many",
                nbytes,
            )
        return place

    def reset_peaks(self) -> None:
        """Begin to look for the most that is used."""
        self.peak, self.other_peak = self.used, self.other_bytes

    def usage_summary(self) -> str:
        """What takes how much, for an error."""
        return (
            f"chunks take {self.used} bytes and offloaded activations and pages on their way {self.other_bytes} "
            f"of a budget of {self.budget_bytes}"
        )

    def close(self) -> None:
        """Unlock the memory."""
        for slab in self.arenas:
            slab.close()


def _wait_for_transfers(chunk: Chunk) -> None:
    """Nothing reads or writes a chunk's place when this returns."""
    for transfer in (chunk.fetch_transfer, chunk.eviction_transfer, chunk.h2d_transfer):
        if transfer is not None:
            transfer.wait()
    chunk.h2d_transfer = None
    chunk.wait_for_save()
