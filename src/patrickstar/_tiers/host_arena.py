"""Host arena: preallocated host memory, divided into blocks."""

import ctypes
import mmap
import os
import weakref
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.vm_pool import advise_huge, discard, private_memory, round_up
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar.errors import BudgetError

ALIGN_BYTES = ALIGN_NUMEL
"""Alignment of arena blocks. Every chunk's size is a multiple of ALIGN_NUMEL elements of at least one byte, so a block
uses no more of the arena than of the budget. Blocks of 16-bit and wider chunks alone begin at multiples of 256 bytes.
See [Note: alignment]."""


@dataclass(eq=False)
class ArenaBlock:
    """Allocated byte range of an arena."""

    start: int
    nbytes: int
    arena: "HostArena"

    @property
    def end(self) -> int:
        """Offset of the first aligned byte after the block."""
        return self.start + round_up(self.nbytes, ALIGN_BYTES)


def _page_unlock(process: int, accelerator: TorchDevice, locked: list[int], memory: torch.Tensor) -> None:
    if os.getpid() == process:  # a child made by fork() has neither the memory nor the device
        accelerator.page_unlock(locked)


class HostArena:
    """Fixed-size memory from which blocks are allocated, first fit, without system calls.

    A page becomes resident when it is first written and stays so until it is freed for good. For an accelerator the
    arena is page-locked as a whole, because PyTorch's own page-locked memory is rounded up to powers of two. `compact`
    moves blocks to close gaps.
    """

    def __init__(self, nbytes: int, accelerator: TorchDevice | None = None) -> None:
        self.nbytes = nbytes
        self._resident = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=bool)  # per page
        self.touched_bytes = 0
        """Bytes of machine memory in use: pages that were part of a block and were not freed for good since."""
        self._blocks: list[ArenaBlock] = []
        self.memory = self._reserve(nbytes)
        self._page_unlock: weakref.finalize[[int, TorchDevice, list[int], torch.Tensor], HostArena] | None = None
        self._lock_bytes = 0
        if accelerator is not None and nbytes:
            self._page_lock(accelerator)

    def _page_lock(self, accelerator: TorchDevice) -> None:
        locked = accelerator.page_lock(self.memory.data_ptr(), self.nbytes)
        if locked is None:
            self._discard(0, round_up(self.nbytes))  # pages that were faulted in for it
        else:
            # One that nobody unlocks is unlocked before its memory is unmapped: the finalizer holds the memory.
            # At process exit the driver unlocks it.
            self._page_unlock = weakref.finalize(self, _page_unlock, os.getpid(), accelerator, locked, self.memory)
            self._page_unlock.atexit = False
            self._lock_bytes = accelerator.max_lock_bytes

    @property
    def page_locked(self) -> bool:
        return self._page_unlock is not None and self._page_unlock.alive

    def _reserve(self, nbytes: int) -> torch.Tensor:
        try:
            memory = torch.frombuffer(private_memory(max(nbytes, 1)), dtype=torch.uint8)
        except OSError as error:
            raise BudgetError(
                f"the system cannot reserve {nbytes} bytes of addresses for host_memory ({error.strerror}); lower "
                f"host_memory, or raise the system's limit (ulimit -v, vm.overcommit_memory)"
            ) from error
        advise_huge(memory.data_ptr(), nbytes)
        return memory

    def allocate(self, nbytes: int) -> ArenaBlock | None:
        """Allocate the first gap that is large enough; return None if there is no such gap."""
        gap = next(self.gaps(nbytes), None)
        return None if gap is None else self.allocate_at(gap[0], nbytes)

    def gaps(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the gaps that are large enough: where a block would start, and the bytes that it could have."""
        start = 0
        for block in self._nonempty_blocks():
            fit = self._fit_start(start, nbytes)
            if block.start - fit >= nbytes:
                yield fit, block.start - fit
            start = block.end
        fit = self._fit_start(start, nbytes)
        if self.nbytes - fit >= nbytes:
            yield fit, self.nbytes - fit

    def allocate_at(self, start: int, nbytes: int) -> ArenaBlock:
        """Allocate a block at the start of one of the `gaps`."""
        new_block = ArenaBlock(start, nbytes, self)
        insort(self._blocks, new_block, key=attrgetter("start"))
        if nbytes:
            self._touch(new_block)
        return new_block

    def _fit_start(self, start: int, nbytes: int) -> int:
        """Return the first offset from `start` at which a block does not cross a page-lock registration boundary."""
        if not self.page_locked:
            return start
        end = round_up(start + 1, self._lock_bytes)
        return end if start + nbytes > end and nbytes <= self._lock_bytes else start

    @property
    def blocks(self) -> list[ArenaBlock]:
        """The allocated blocks, by offset."""
        return list(self._blocks)

    def take_over(self, block: ArenaBlock) -> bool:
        """Move another arena's block into this one. Return False if it does not fit. Its views become invalid."""
        target = self.allocate(block.nbytes)
        if target is None:
            return False
        self.view(target, torch.uint8).copy_(block.arena.view(block, torch.uint8))
        block.arena.free(block)
        self._blocks[self._blocks.index(target)] = block
        block.start, block.arena = target.start, self
        return True

    def _nonempty_blocks(self) -> list[ArenaBlock]:
        """Return the blocks by offset, without empty ones, which occupy no memory."""
        return [block for block in self._blocks if block.nbytes]

    def free(self, block: ArenaBlock, *, for_good: bool = False) -> None:
        """Free a block; `for_good` also returns its whole pages to the system, unless the arena is page-locked."""
        self._blocks.remove(block)
        begin, end = -(-block.start // mmap.PAGESIZE), (block.start + block.nbytes) // mmap.PAGESIZE
        if for_good and begin < end and not self.page_locked:
            self._discard(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)
            self.touched_bytes -= int(np.count_nonzero(self._resident[begin:end])) * mmap.PAGESIZE
            self._resident[begin:end] = False

    def _touch(self, block: ArenaBlock) -> None:
        pages = self._resident[block.start // mmap.PAGESIZE : -(-(block.start + block.nbytes) // mmap.PAGESIZE)]
        self.touched_bytes += int(np.count_nonzero(~pages)) * mmap.PAGESIZE
        pages[:] = True

    def _discard(self, start: int, nbytes: int) -> None:
        discard(self.memory.data_ptr() + start, nbytes)

    def part(self, block: ArenaBlock, begin: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a block from its byte `begin` on."""
        return self.memory[block.start + begin : block.start + begin + nbytes]

    def view(self, block: ArenaBlock, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[block.start : block.start + block.nbytes].view(dtype)

    def compact(self) -> None:
        """Move blocks towards the start to close all gaps. Existing views of moved blocks become invalid."""
        start = 0
        for block in self._nonempty_blocks():
            start = self._fit_start(start, block.nbytes)
            if block.start != start:
                self._move(block, start)
                block.start = start
                self._touch(block)
            start = block.end
        self._blocks.sort(key=attrgetter("start"))

    def _move(self, block: ArenaBlock, start: int) -> None:
        base = self.memory.data_ptr()
        ctypes.memmove(base + start, base + block.start, block.nbytes)

    def unlock(self) -> None:
        """Unlock the memory; it is unmapped with the last tensor that views it."""
        if self._page_unlock is not None:
            self._page_unlock()
