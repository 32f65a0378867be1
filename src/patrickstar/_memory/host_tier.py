"""Host tier: its budget, and the arena blocks of chunks and other data."""

from collections.abc import Callable

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar._memory.chunk import Chunk, fill_poison
from patrickstar._memory.host_arena import ALIGN_BYTES, ArenaBlock, HostArena
from patrickstar._memory.transfer import Transfer
from patrickstar._memory.vm_pool import round_up
from patrickstar.errors import BudgetError


class HostTier:
    """Host memory of chunks, offloaded activations and staging pages, in one arena and under one budget."""

    def __init__(
        self, budget_bytes: int, arena_bytes: int, new_arena: Callable[[int], HostArena], poison: bool
    ) -> None:
        self.budget_bytes = budget_bytes
        self.new_arena = new_arena
        self.arenas = [new_arena(min(budget_bytes, arena_bytes))]
        """One; on a GPU more are added if unplanned data (unfrozen parameters, activations) needs them."""
        self.poison = poison
        self.used = 0
        """Bytes allocated to chunks."""
        self.other_bytes = 0
        """Bytes allocated to everything else."""
        self.outside_bytes = 0
        """Part of `other_bytes` that is outside of the arenas."""
        self.peak = 0
        self.other_peak = 0
        self.moved: set[Chunk] = set()
        """Chunks that compaction has moved since `ChunkManager.drain_moved`."""
        self._owners: dict[ArenaBlock, Chunk] = {}
        self._block_copies: dict[ArenaBlock, Transfer] = {}
        """Last copy that reads or writes a block that is no chunk."""
        self._released: list[tuple[ArenaBlock, Transfer]] = []
        """Released blocks whose copy had not ended."""

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used - self.other_bytes

    def allocate(self, chunk: Chunk) -> torch.Tensor:
        """Allocate a block for a chunk; the caller has made room in the budget. Its content is undefined."""
        block = self._new_block(chunk.nbytes, repr(chunk))
        self._owners[block] = chunk
        chunk.host_block, chunk.host = block, self.view(block, chunk.dtype)
        self.used += chunk.nbytes
        self.peak = max(self.peak, self.used)
        return chunk.host

    def free(self, chunk: Chunk, *, for_good: bool = False) -> None:
        """Free a chunk's block; `for_good` also returns the memory to the system."""
        assert chunk.host is not None and chunk.host_block is not None
        _wait_for_transfers(chunk)
        if self.poison:
            fill_poison(chunk.host)
        del self._owners[chunk.host_block]
        chunk.host_block.arena.free(chunk.host_block, for_good=for_good)
        chunk.host, chunk.host_block, chunk.host_valid = None, None, False
        self.used -= chunk.nbytes

    def has_room(self, nbytes: int) -> bool:
        """Return True if `nbytes` more fit, after freeing duplicate copies of chunks on the device as needed."""
        if self._short_bytes(nbytes) > 0:
            return False
        for chunk in self._droppable():
            if self.free_bytes >= nbytes:
                break
            self.free(chunk)
        return True

    def make_room(self, nbytes: int, description: str) -> None:
        """Make room for `nbytes`, used by `description`. Raises BudgetError."""
        if not self.has_room(nbytes):
            short = self._short_bytes(nbytes)
            raise BudgetError(
                f"{description} needs {nbytes} bytes on the host, where {self.usage_summary()}",
                short,
                f"Raise host_memory by at least {short} bytes ({format_size(short)})",
            )

    def _droppable(self) -> list[Chunk]:
        """Return the chunks whose host copy is a duplicate of the device copy."""
        return [chunk for chunk in self._owners.values() if chunk.device_resident and chunk.eviction_transfer is None]

    def _short_bytes(self, nbytes: int) -> int:
        """Return the bytes by which `nbytes` more exceed the budget, with all duplicate copies freed."""
        short = nbytes - self.free_bytes
        return short if short <= 0 else short - sum(chunk.nbytes for chunk in self._droppable())

    def allocate_block(self, nbytes: int, description: str = "a page in flight") -> ArenaBlock:
        """Allocate a block that is no chunk. Access it with `view`, free it with `release_block`."""
        nbytes = round_up(nbytes, ALIGN_BYTES)
        self.make_room(nbytes, description)
        block = self._new_block(nbytes, description)
        self.other_bytes += nbytes
        self.other_peak = max(self.other_peak, self.other_bytes)
        return block

    def copy_issued(self, block: ArenaBlock, copy: Transfer) -> None:
        """Keep a block where it is until a copy, the last one that reads or writes it, has ended."""
        self._block_copies[block] = copy

    def release_block(self, block: ArenaBlock) -> None:
        """Release a block. Its memory is used again once the last copy has ended."""
        copy = self._block_copies.pop(block, None)
        if copy is None or copy.done:
            block.arena.free(block)
        else:
            self._released.append((block, copy))
        self.other_bytes -= block.nbytes

    def _free_released(self, wait: bool) -> None:
        """Free the released blocks whose copy has ended; `wait`: wait for all copies."""
        released, self._released = self._released, []
        for block, copy in released:
            if wait:
                copy.wait()
            if wait or copy.done:
                block.arena.free(block)
            else:
                self._released.append((block, copy))

    def reserve(self, nbytes: int, description: str) -> None:
        """Count memory outside of the arenas, which the caller writes now, until `release_reservation`."""
        self.make_room(nbytes, description)
        self.other_bytes += nbytes
        self.outside_bytes += nbytes
        self.other_peak = max(self.other_peak, self.other_bytes)

    def release_reservation(self, nbytes: int) -> None:
        self.other_bytes -= nbytes
        self.outside_bytes -= nbytes

    @property
    def arena_bytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def touched_bytes(self) -> int:
        return sum(arena.touched_bytes for arena in self.arenas) + self.outside_bytes

    @staticmethod
    def view(block: ArenaBlock, dtype: torch.dtype) -> torch.Tensor:
        """Return a block as a flat tensor, valid until the block is moved by compaction."""
        return block.arena.view(block, dtype)

    def _first_fit(self, nbytes: int) -> ArenaBlock | None:
        blocks = (arena.allocate(nbytes) for arena in self.arenas)
        return next((block for block in blocks if block is not None), None)

    def _new_block(self, nbytes: int, description: str) -> ArenaBlock:
        if self._released:
            self._free_released(wait=False)
        block = self._first_fit(nbytes)
        if block is None and self._released:
            self._free_released(wait=True)
            block = self._first_fit(nbytes)
        if block is None:
            for copy in self._block_copies.values():
                copy.wait()
            for chunk in self._owners.values():
                _wait_for_transfers(chunk)
            for arena in self.arenas:
                arena.compact()
            for moved, chunk in self._owners.items():
                chunk.host = self.view(moved, chunk.dtype)
                self.moved.add(chunk)
            block = self._first_fit(nbytes)
        if block is None and nbytes <= self.budget_bytes - self.arena_bytes:
            self.arenas.append(self.new_arena(nbytes))
            block = self._first_fit(nbytes)
        if block is None:
            raise BudgetError(
                f"{description} needs {nbytes} contiguous bytes, which the host arena of {self.arena_bytes} bytes does "
                f"not have; raise host_memory by as many bytes",
                nbytes,
            )
        return block

    def reset_peaks(self) -> None:
        self.peak, self.other_peak = self.used, self.other_bytes

    def usage_summary(self) -> str:
        """Return the use of the budget as a clause for an error message."""
        return (
            f"chunks use {self.used} bytes and offloaded activations and pages in flight {self.other_bytes} bytes "
            f"of a budget of {self.budget_bytes} bytes"
        )

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def _wait_for_transfers(chunk: Chunk) -> None:
    """Wait until no update, transfer or checkpoint writer uses a chunk's host block."""
    if not chunk.device_valid:
        chunk.wait_for_update()
    for transfer in (chunk.fetch_transfer, chunk.eviction_transfer, chunk.h2d_transfer):
        if transfer is not None:
            transfer.wait()
    chunk.h2d_transfer = None
    chunk.wait_for_d2h()
    chunk.wait_for_save()
