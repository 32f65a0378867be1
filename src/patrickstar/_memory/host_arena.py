"""The host tier: one slab of memory, cut into places."""

import ctypes
import mmap
import os
import weakref
from bisect import insort
from dataclasses import dataclass

import numpy as np
import torch

from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar._memory.cuda_device import LOCK_BYTES, CudaDevice
from patrickstar._memory.vm_pool import advise_huge, discard, private_memory, round_up
from patrickstar.errors import BudgetError

ALIGN_BYTES = ALIGN_NUMEL
"""Places begin at multiples of this. It is the alignment in one-byte elements, which every chunk's size is a multiple
of, so a place takes no more of the slab than of the budget. Chunks of 16 bits and more have twice this alignment, and
among themselves begin at multiples of 256 bytes. See [Note: alignment]."""


@dataclass(eq=False)
class ArenaBlock:
    """Bytes of the slab: where they begin, how many."""

    start: int
    nbytes: int
    slab: "HostArena"

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + round_up(self.nbytes, ALIGN_BYTES)


def _start(place: ArenaBlock) -> int:
    return place.start


def _unlock(process: int, cuda: CudaDevice, locked: list[int], memory: torch.Tensor) -> None:
    if os.getpid() == process:  # a child made by fork() has neither the memory nor CUDA
        cuda.unlock(locked)


class HostArena:
    """Memory of a fixed size, which places are taken from and given back to without asking the system.

    Pages are taken from the system when they are first written, and stay until they are given back for good. Where the
    device is a GPU the slab is page-locked as a whole: PyTorch's own pinned allocator would round requests up to powers
    of two.
    Places that can move close gaps when there is room enough, but not in a row (`compact`).
    """

    def __init__(self, nbytes: int, cuda: CudaDevice | None = None) -> None:
        self.nbytes = nbytes
        self._resident = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=bool)  # which of its pages the system has given
        self.touched_bytes = 0
        """What the slab takes of the machine's memory: pages that were in a place, and were not given back since."""
        self._blocks: list[ArenaBlock] = []
        self.memory = self._reserve(nbytes)
        self._unlock: weakref.finalize[[int, CudaDevice, list[int], torch.Tensor], HostArena] | None = None
        if cuda is not None and nbytes:
            locked = cuda.lock(self.memory.data_ptr(), nbytes)
            # A slab that nobody closes is unlocked before its memory is unmapped: the finalizer holds the memory. When
            # the process ends, the driver unlocks it.
            self._unlock = weakref.finalize(self, _unlock, os.getpid(), cuda, locked, self.memory)
            self._unlock.atexit = False

    @property
    def pinned(self) -> bool:
        """Return whether the memory is page-locked."""
        return self._unlock is not None and self._unlock.alive

    def _reserve(self, nbytes: int) -> torch.Tensor:
        try:
            memory = torch.frombuffer(private_memory(max(nbytes, 1)), dtype=torch.uint8)
        except OSError as error:
            raise BudgetError(
                f"the system reserves no {nbytes} bytes of addresses for host_memory ({error.strerror}): give a "
                f"smaller one, or raise its limit (ulimit -v, vm.overcommit_memory)"
            ) from error
        advise_huge(memory.data_ptr(), nbytes)
        return memory

    def allocate(self, nbytes: int) -> ArenaBlock | None:
        """The first place of that size; None if there is none in a row."""
        start = 0
        for place in self._full():
            if place.start - self._within(start, nbytes) >= nbytes:
                break
            start = place.end
        start = self._within(start, nbytes)
        if start + nbytes > self.nbytes:
            return None
        taken = ArenaBlock(start, nbytes, self)
        insort(self._blocks, taken, key=_start)
        if nbytes:
            self._touch(taken)
        return taken

    def _within(self, start: int, nbytes: int) -> int:
        """Return where so many bytes fit from `start` on without crossing from one registration into the next."""
        end = round_up(start + 1, LOCK_BYTES)
        return end if self.pinned and start + nbytes > end and nbytes <= LOCK_BYTES else start

    def _full(self) -> list[ArenaBlock]:
        """Places in their order; those of no bytes lie anywhere, and in nobody's way."""
        return [place for place in self._blocks if place.nbytes]

    def free(self, place: ArenaBlock, *, for_good: bool = False) -> None:
        """Give a place back; `for_good` its memory too, since nobody will want so much again soon."""
        self._blocks.remove(place)
        begin, end = -(-place.start // mmap.PAGESIZE), (place.start + place.nbytes) // mmap.PAGESIZE
        if for_good and begin < end and not self.pinned:
            self._discard(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)
            self.touched_bytes -= int(np.count_nonzero(self._resident[begin:end])) * mmap.PAGESIZE
            self._resident[begin:end] = False

    def _touch(self, place: ArenaBlock) -> None:
        pages = self._resident[place.start // mmap.PAGESIZE : -(-(place.start + place.nbytes) // mmap.PAGESIZE)]
        self.touched_bytes += int(np.count_nonzero(~pages)) * mmap.PAGESIZE
        pages[:] = True

    def _discard(self, start: int, nbytes: int) -> None:
        discard(self.memory.data_ptr() + start, nbytes)

    def view(self, place: ArenaBlock, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a place as a flat tensor."""
        return self.memory[place.start : place.start + place.nbytes].view(dtype)

    def compact(self) -> None:
        """Close all gaps: places move towards the start, their bytes with them. Views of them must be taken anew."""
        start = 0
        for place in self._full():
            start = self._within(start, place.nbytes)
            if place.start != start:
                self._move(place, start)
                place.start = start
                self._touch(place)
            start = place.end
        self._blocks.sort(key=_start)

    def _move(self, place: ArenaBlock, start: int) -> None:
        base = self.memory.data_ptr()
        ctypes.memmove(base + start, base + place.start, place.nbytes)

    def close(self) -> None:
        """Unlock the memory; it goes with the last tensor over it."""
        if self._unlock is not None:
            self._unlock()
