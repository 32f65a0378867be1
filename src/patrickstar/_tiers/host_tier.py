"""Host tier: its budget, and the arena blocks of chunks and other data."""

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.byte_size import format_size
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk, fill_poison
from patrickstar._tiers.host_arena import ALIGN_BYTES, ArenaBlock, HostArena
from patrickstar._tiers.spare_memory import SpareMemory, SpareUse
from patrickstar._tiers.timeline import Timeline
from patrickstar.errors import BudgetError


class HostTier:
    """Host memory of chunks, offloaded activations and staging pages, in one arena and under one budget."""

    def __init__(
        self,
        budget_bytes: int,
        arena_bytes: int,
        new_arena: Callable[[int], HostArena],
        poison: bool,
        moved: set[Chunk] | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.new_arena = new_arena
        self.arenas = [new_arena(min(budget_bytes, arena_bytes))]
        """One; on a GPU more are added for spare blocks, and if unplanned data (unfrozen parameters, activations)
        needs them."""
        self._spare_arenas: list[HostArena] = []
        """Those that were added for spare blocks."""
        self.poison = poison
        self.used = 0
        """Bytes allocated to chunks."""
        self.other_bytes = 0
        """Bytes allocated to everything else."""
        self.outside_bytes = 0
        """Part of `other_bytes` that is outside of the arenas."""
        self.spare_bytes = 0
        """Bytes allocated to spare blocks. See [Note: spare blocks]."""
        self.spare_peak = 0
        self.set_aside_bytes = 0
        """Part of the budget for a shard of `param16` that is read from disk, or about to be overwritten."""
        self.spare_use_bytes = 0
        """The most bytes that spare blocks can be used for; whoever uses them says how many."""
        self.spare = SpareMemory()
        self.give_back: Callable[[], bool] = lambda: False
        """Frees a chunk whose content has been used. Returns False if there is none."""
        self._needed_peak = 0
        """Peak of `used` and `other_bytes` together since the last reset."""
        self._last_needed_peak = 0
        self.peak = 0
        self.other_peak = 0
        self.moved: set[Chunk] = set() if moved is None else moved
        """Where chunks are added whose memory has moved: the set of the device tier, if there is one."""
        self._owners: dict[ArenaBlock, Chunk] = {}
        self._block_copies: dict[ArenaBlock, Transfer] = {}
        """Last copy that reads or writes a block that is no chunk."""
        self._released: list[tuple[ArenaBlock, Transfer]] = []
        """Released blocks whose copy had not ended."""
        self.timeline: Timeline | None = None
        """Recorder of the step, if it is recorded."""

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used - self.other_bytes - self.spare_bytes - self.set_aside_bytes

    def _note_peaks(self) -> None:
        self.peak = max(self.peak, self.used)
        self.other_peak = max(self.other_peak, self.other_bytes)
        self.spare_peak = max(self.spare_peak, self.spare_bytes)
        self._needed_peak = max(self._needed_peak, self.used + self.other_bytes)
        self.note_other()

    def note_other(self) -> None:
        """Note in the record of the step, if there is one, the bytes beside chunks."""
        if self.timeline is not None:
            self.timeline.host_bytes(self.other_bytes + self.spare_bytes)

    def _own(self, block: ArenaBlock, chunk: Chunk) -> None:
        """Make a block the host copy of a chunk."""
        self._owners[block] = chunk
        chunk.host.place(block, self.view(block, chunk.dtype))
        self.used += chunk.nbytes
        if self.timeline is not None:
            self.timeline.allocated(chunk, Tier.HOST)

    def allocate(self, chunk: Chunk) -> torch.Tensor:
        """Allocate a block for a chunk; the caller has made room in the budget. Its content is undefined."""
        self._own(self._new_block(chunk.nbytes, repr(chunk)), chunk)
        self._note_peaks()
        assert chunk.host.memory is not None
        return chunk.host.memory

    def free(self, chunk: Chunk, *, for_good: bool = False, in_order: bool = False) -> None:
        """Free a chunk's block; `for_good` also returns the memory to the system.

        `in_order`: without a wait for copies of the device, which the memory is used again after.
        """
        if in_order:
            last = chunk.host.writer or chunk.host.reader
            for use in (chunk.host.save, chunk.host.reader):
                if use is not None and use is not last:
                    use.wait()
            self._free_block(self._detach(chunk), last)
            chunk.host.save = chunk.host.reader = chunk.host.writer = None
            return
        chunk.host.settle(move=True)
        assert chunk.host.memory is not None
        if self.poison:
            fill_poison(chunk.host.memory)
        block = self._detach(chunk)
        block.arena.free(block, for_good=for_good)

    def has_room(self, nbytes: int) -> bool:
        """Return True if `nbytes` more fit, after freeing spare blocks and duplicate copies of chunks as needed."""
        while self._short_bytes(nbytes) > 0:
            if not self.give_back():
                return False
        while self.free_bytes < nbytes and self.spare_bytes and self._reclaim():
            pass
        for chunk in sorted(self._droppable(), key=lambda chunk: chunk.host.update is not None):  # these wait for it
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
        """Return the chunks whose host copy is, or will be after an update, a duplicate of the device copy."""
        return [chunk for chunk in self._owners.values() if chunk.device.present and chunk.device.reader is None]

    def _short_bytes(self, nbytes: int) -> int:
        """Return the bytes by which `nbytes` more exceed the budget, with all duplicates and spare blocks freed."""
        short = nbytes - self.free_bytes - self.spare_bytes
        return short if short <= 0 else short - sum(chunk.nbytes for chunk in self._droppable())

    def allocate_block(self, nbytes: int, description: str = "a page in flight") -> ArenaBlock:
        """Allocate a block that is no chunk. Access it with `view`, free it with `release_block`."""
        nbytes = round_up(nbytes, ALIGN_BYTES)
        self.make_room(nbytes, description)
        block = self._new_block(nbytes, description)
        self.other_bytes += nbytes
        self._note_peaks()
        return block

    def copy_issued(self, block: ArenaBlock, copy: Transfer) -> None:
        """Keep a block where it is until a copy, the last one that reads or writes it, has ended."""
        self._block_copies[block] = copy

    def release_block(self, block: ArenaBlock) -> None:
        """Release a block. Its memory is used again once the last copy has ended."""
        self._free_block(block, self._block_copies.pop(block, None))
        self.other_bytes -= block.nbytes
        self.note_other()

    # Spare blocks

    @property
    def spare_limit_bytes(self) -> int:
        """Bytes that spare blocks may take: what the last step, and this one so far, have left of the budget."""
        needed = max(self._last_needed_peak, self._needed_peak)
        return max(0, min(self.spare_use_bytes, self.budget_bytes - needed))

    def allocate_spare(self, sizes: Sequence[int]) -> bool:
        """Allocate spare blocks of these bytes. Return False if they would exceed the limit."""
        nbytes = sum(sizes)
        if self.spare_bytes + nbytes > self.spare_limit_bytes:
            return False
        self._free_released(wait=False)
        blocks = self._fit_all(sizes)
        if blocks is None and self._grow_for_spare(nbytes):
            blocks = self._fit_all(sizes)
        if blocks is not None:
            self.spare.add(blocks)
            self.spare_bytes += nbytes
            self._note_peaks()
        return blocks is not None

    def _fit_all(self, sizes: Sequence[int]) -> list[ArenaBlock] | None:
        """Allocate blocks in the gaps that there are; None if one does not fit. Closing gaps would wait for copies.

        Blocks of several sizes change places in each step, in the same memory.
        """
        blocks: list[ArenaBlock] = []
        for size in sizes:
            block = self._best_fit(size)
            if block is None:
                for allocated in blocks:
                    allocated.arena.free(allocated)
                return None
            blocks.append(block)
        return blocks

    def _grow_for_spare(self, nbytes: int) -> bool:
        """Add an arena for spare blocks of these bytes, or more: see [Note: spare blocks].

        Free bytes of other arenas may be in gaps too small for a chunk, or in use by copies in flight.
        """
        added = sum(arena.nbytes for arena in self._spare_arenas)
        most = min(self.spare_limit_bytes - added, self.budget_bytes - self.arena_bytes)
        if most < nbytes:
            return False
        self._spare_arenas.append(self.new_arena(min(most, max(nbytes, added))))
        self.arenas.append(self._spare_arenas[-1])
        return True

    def release_spare(self, use: SpareUse | None = None) -> bool:
        """Release the blocks of an update that has ended or was cancelled, or free ones. Return False without any."""
        blocks = self.spare.give_back(use)
        for block in blocks or ():
            self.spare_bytes -= block.nbytes
            self._free_block(block)
            self.note_other()
        return blocks is not None

    def _reclaim(self) -> bool:
        """Release spare blocks that no update has taken, else those of the oldest. Return False if there are none."""
        if self.release_spare():
            return True
        for use in self.spare.uses[:1]:
            assert use.running is not None, "an update takes blocks when it begins"
            use.running.cancel()
            self.release_spare(use)
            return True
        return False

    def replace_block(self, chunk: Chunk, block: ArenaBlock) -> None:
        """Make a spare block, which holds a chunk's new bytes, its host copy, and release the old one.

        The old memory is used again once copies in flight that the device makes have ended; the host does not wait.
        """
        if chunk.host.present:
            self.free(chunk, in_order=True)
        self.spare_bytes -= chunk.nbytes
        self._own(block, chunk)
        self._note_peaks()
        self.moved.add(chunk)

    def exchange_blocks(self, first: Chunk, second: Chunk) -> None:
        """Exchange the host copies of two chunks of the same size, with what uses them."""
        assert first.host.block is not None and second.host.block is not None, f"{first} or {second} has no host copy"
        assert first.nbytes == second.nbytes, f"{first} and {second} differ in size"
        self._owners[first.host.block], self._owners[second.host.block] = second, first
        first.host, second.host = second.host, first.host
        self.moved.update((first, second))

    def _detach(self, chunk: Chunk) -> ArenaBlock:
        """Return a chunk's block, which is no longer its host copy."""
        block = chunk.host.block
        assert block is not None, f"{chunk} has no host copy"
        del self._owners[block]
        chunk.host.place(None, None)
        chunk.host.valid = False
        self.used -= chunk.nbytes
        if self.timeline is not None:
            self.timeline.freed(chunk, Tier.HOST)
        return block

    def _free_block(self, block: ArenaBlock, copy: Transfer | None = None) -> None:
        """Free a block now, or once the last copy that uses it has ended."""
        if copy is not None and not copy.done:
            self._released.append((block, copy))
            return
        if self.poison:
            fill_poison(self.view(block, torch.uint8))
        block.arena.free(block)

    def _free_released(self, wait: bool) -> None:
        """Free the released blocks whose copy has ended; `wait`: wait for all copies."""
        released, self._released = self._released, []
        for block, copy in released:
            if wait:
                copy.wait()
            self._free_block(block, copy)

    def reserve(self, nbytes: int, description: str) -> None:
        """Count memory outside of the arenas, which the caller writes now, until `release_reservation`."""
        self.make_room(nbytes, description)
        self.other_bytes += nbytes
        self.outside_bytes += nbytes
        self._note_peaks()

    def release_reservation(self, nbytes: int) -> None:
        self.other_bytes -= nbytes
        self.outside_bytes -= nbytes
        self.note_other()

    @property
    def arena_bytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def touched_bytes(self) -> int:
        return sum([arena.touched_bytes for arena in self.arenas]) + self.outside_bytes

    @staticmethod
    def view(block: ArenaBlock, dtype: torch.dtype) -> torch.Tensor:
        """Return a block as a flat tensor, valid until the block is moved by compaction."""
        return block.arena.view(block, dtype)

    def _first_fit(self, nbytes: int) -> ArenaBlock | None:
        blocks = (arena.allocate(nbytes) for arena in self.arenas)
        return next((block for block in blocks if block is not None), None)

    def _best_fit(self, nbytes: int) -> ArenaBlock | None:
        """Allocate the smallest gap that is large enough: one that a block of the same size has left, if possible."""
        gaps = ((gap_bytes, start, arena) for arena in self.arenas for start, gap_bytes in arena.gaps(nbytes))
        _, start, arena = min(gaps, key=itemgetter(0), default=(0, 0, None))
        return None if arena is None else arena.allocate_at(start, nbytes)

    def _new_block(self, nbytes: int, description: str) -> ArenaBlock:
        if self._released:
            self._free_released(wait=False)
        block = self._first_fit(nbytes)
        if block is None and self._released:
            self._free_released(wait=True)
            block = self._first_fit(nbytes)
        if block is None and self.spare_bytes and self._grow_for_spare(nbytes):  # they are where this would have been
            block = self._first_fit(nbytes)
        if block is None:
            self._close_gaps()
            block = self._first_fit(nbytes)
        if block is None:
            self._close_spare_arenas()
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

    def _close_gaps(self) -> None:
        """Move blocks towards the start of their arena, then from later arenas into earlier ones; close empty arenas.

        It waits for the copies of all blocks. Views of moved blocks that are no chunks become invalid.
        """
        while self.spare_bytes and self._reclaim():
            pass
        for copy in self._block_copies.values():
            if not copy.done:
                copy.wait()
        for chunk in list(self._owners.values()):
            chunk.finish_update()
        for chunk in list(self._owners.values()):  # others than before: an update that ends may exchange blocks
            chunk.host.settle(move=True)
        self._free_released(wait=True)
        for arena in self.arenas:
            arena.compact()
        for number, arena in reversed(list(enumerate(self.arenas))):
            for block in arena.blocks:
                any(earlier.take_over(block) for earlier in self.arenas[:number])
            if number and not arena.blocks and arena not in self._spare_arenas:  # these would be locked anew
                self.arenas.remove(arena)
                arena.unlock()
        for block, chunk in self._owners.items():
            chunk.host.place(block, self.view(block, chunk.dtype))
            self.moved.add(chunk)

    def _close_spare_arenas(self) -> None:
        """Close arenas of spare blocks that are empty: other data needs memory."""
        for arena in [each for each in self._spare_arenas if not each.blocks]:
            self._spare_arenas.remove(arena)
            self.arenas.remove(arena)
            arena.unlock()

    def reset_peaks(self) -> None:
        self._last_needed_peak, self._needed_peak = self._needed_peak, self.used + self.other_bytes
        self.peak, self.other_peak, self.spare_peak = self.used, self.other_bytes, self.spare_bytes

    def usage_summary(self) -> str:
        """Return the use of the budget as a clause for an error message."""
        return (
            f"chunks use {self.used} bytes and offloaded activations and pages in flight {self.other_bytes} bytes "
            f"of a budget of {self.budget_bytes} bytes"
        )

    def unlock(self) -> None:
        """Unlock all memory, once no copy of an accelerator uses it any more."""
        for arena in self.arenas:
            arena.unlock()
