"""Memory that stays mapped: pages move between address ranges instead of being given back and zeroed anew."""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch

from patrickstar.errors import BudgetError

# [Note: pages that move]
# On a CPU a chunk must leave its memory and come back to the same address (see [Note: one storage for life]). Giving
# pages back to the system and faulting them in anew costs the system a zeroed page each time: measured on a virtual
# machine with 2 cores, a copy into memory that is faulted in ran at 0.6 GB/s, into mapped memory at 23 GB/s. So a chunk
# owns a range of addresses, not pages. When it leaves, its pages stay behind, unreadable, until another range needs
# some: then the kernel moves them there by `mremap`, at 0.4 ms per 64 MiB. Pages that nobody needs count as used, and
# go back to the system when the budget wants them (`PagePool.trim`).

# [Note: memory that children do not get]
# fork(), as DataLoader workers begin, shares private memory with the child, and gives whoever writes first a copy of
# the page. Kernels from 5.10 on copy every page-locked page for the child at once, whole host tiers of it. Older ones
# share them, and after a write the GPU goes on with the old page: stale bytes, both ways. On a CPU every page that
# the engine writes while workers live is there twice. So all memory mapped here is kept from children
# (MADV_DONTFORK). In a child nothing is mapped at these addresses, or something of its own, so nobody may unmap them
# there, as a finalizer would.

SYSTEM_PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 * 1024**2
"""Ranges begin at multiples of this, so that the system can back them with huge pages, and move these whole."""

# Python knows the last of these from 3.13 on. Without it a system that counts promises refuses what is only reserved.
RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
_MAP_FIXED = 0x10
# The old addresses stay mapped, without pages. Else there would be a hole until they are reserved again, and another
# thread's memory could be mapped there meanwhile.
_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_NOTHING, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _function(name: str, result: object, *arguments: object) -> Callable[..., Any]:
    function: Any = getattr(_libc, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


_mmap = _function("mmap", _ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_long)
_munmap = _function("munmap", _INT, _ADDRESS, _SIZE)
_mprotect = _function("mprotect", _INT, _ADDRESS, _SIZE, _INT)
_madvise = _function("madvise", _INT, _ADDRESS, _SIZE, _INT)
if sys.platform == "linux":
    _mremap = _function("mremap", _ADDRESS, _ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS)
_FAILED = ctypes.c_void_p(-1).value


def _fail(what: str, nbytes: int) -> NoReturn:
    number = ctypes.get_errno()
    raise BudgetError(
        f"the system refused to {what} {nbytes} bytes of memory: {os.strerror(number)}; give a smaller device_memory, "
        f"or raise its limits (ulimit -v, vm.max_map_count, vm.overcommit_memory)"
    )


def round_up(nbytes: int, unit: int = SYSTEM_PAGE) -> int:
    """The next multiple of a unit, by default of the system's pages."""
    return -(-nbytes // unit) * unit


def _map(address: int | None, nbytes: int, protection: int) -> int:
    try:
        return _try_to_map(address, nbytes, protection)
    except OSError:
        _fail("map", nbytes)


def _try_to_map(address: int | None, nbytes: int, protection: int) -> int:
    fixed = _MAP_FIXED if address is not None else 0
    found = _mmap(address, nbytes, protection, RESERVE | fixed, -1, 0)
    # Pages that `mremap` moves keep this at their new addresses. See [Note: memory that children do not get].
    if found == _FAILED or _madvise(found, nbytes, mmap.MADV_DONTFORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _unmap(process: int, address: int, nbytes: int) -> None:
    """Unmap addresses, in the process that mapped them. See [Note: memory that children do not get]."""
    if os.getpid() == process:
        _munmap(address, nbytes)


def private_memory(nbytes: int) -> Any:
    """Map zeros, as an object with a buffer that children made by fork() do not get.

    The pages are unmapped once nothing refers to the object. Raises OSError if the system refuses.
    """
    if sys.platform != "linux":  # where nothing is page-locked
        return mmap.mmap(-1, nbytes, flags=RESERVE)
    size = round_up(nbytes)
    address = _try_to_map(None, size, _READ_WRITE)
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, os.getpid(), address, size).atexit = False
    return memory


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages; a system that has none says so, and small ones do."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def discard(address: int, nbytes: int) -> None:
    """Give whole pages back to the system; they read as zeros when they are next used."""
    if _madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail("take back", nbytes)


@cache
def can_move_pages() -> bool:
    """Whether this system moves pages between ranges and leaves the addresses mapped: Linux from 5.7 on."""
    if sys.platform != "linux":
        return False
    here, there = (_map(None, SYSTEM_PAGE, _READ_WRITE) for _ in range(2))
    moved = _mremap(here, SYSTEM_PAGE, SYSTEM_PAGE, _MAYMOVE_FIXED_DONTUNMAP, there) != _FAILED
    for address in (here, there):
        _munmap(address, SYSTEM_PAGE)
    return bool(moved)


class VMRange:
    """Addresses for life. Their pages come with `PagePool.commit` and may go after `PagePool.park`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes)
        whole = self.nbytes + HUGE_PAGE
        start = _map(None, whole, _NOTHING)
        self.address = round_up(start, HUGE_PAGE)
        self.pieces: list[PageRun] = []
        self.memory = (ctypes.c_char * nbytes).from_address(self.address)
        # Tensors over the memory hold it, and may outlive the range.
        weakref.finalize(self.memory, _unmap, os.getpid(), start, whole).atexit = False

    def storage(self) -> torch.UntypedStorage:
        """A storage over these addresses, to be read only while pages are there."""
        return torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()


@dataclass
class PageRun:
    """Pages in a row that were mapped, or moved, at once."""

    address: int
    nbytes: int


@dataclass
class PagePool:
    """Hands pages from ranges that don't need them to ranges that do. See [Note: pages that move]."""

    mapped_bytes: int = 0
    """Bytes of pages in all ranges, parked ones included."""
    parked_bytes: int = 0
    _parked: "dict[VMRange, None]" = field(default_factory=dict)

    def commit(self, target: VMRange) -> None:
        """Have pages in a range: its own if they are still there, then parked ones, then new ones."""
        own = sum(piece.nbytes for piece in target.pieces)
        if target in self._parked:
            del self._parked[target]
            self.parked_bytes -= own
        missing = target.nbytes - own
        for source in self._sources(missing):
            while missing and source.pieces:
                missing -= self._move(source, target, missing)
            if not source.pieces:
                self._parked.pop(source, None)
            if not missing:
                break
        if missing:
            address = target.address + target.nbytes - missing
            _map(address, missing, _READ_WRITE)
            advise_huge(address, missing)
            target.pieces.append(PageRun(address, missing))
            self.mapped_bytes += missing
        if _mprotect(target.address, target.nbytes, _READ_WRITE):
            _fail("open", target.nbytes)

    def decommit(self, source: VMRange) -> None:
        """A range does not need its pages now; who reads it all the same is stopped by the system."""
        if _mprotect(source.address, source.nbytes, _NOTHING):
            _fail("close", source.nbytes)
        self._parked[source] = None
        self.parked_bytes += source.nbytes

    def trim(self, keep_bytes: int) -> None:
        """Give parked pages back to the system until no more than this are left."""
        while self.parked_bytes > max(0, keep_bytes):
            source = next(iter(self._parked))
            if not source.pieces:
                del self._parked[source]
                continue
            piece = source.pieces[-1]
            excess = min(piece.nbytes, round_up(self.parked_bytes - max(0, keep_bytes)))
            # First the pages, then the books: where Ctrl-C strikes in between, addresses without pages get new ones.
            self._leave(piece.address + piece.nbytes - excess, excess)
            source.pieces.pop()
            if excess < piece.nbytes:
                source.pieces.append(PageRun(piece.address, piece.nbytes - excess))
            self.mapped_bytes -= excess
            self.parked_bytes -= excess

    def _sources(self, nbytes: int) -> list[VMRange]:
        """Parked ranges to take pages from: one whose pages are as many as asked for, else the largest first."""
        if not nbytes:
            return []
        held = {source: sum(piece.nbytes for piece in source.pieces) for source in self._parked}
        return sorted(held, key=lambda source: (held[source] != nbytes, -held[source]))

    def _move(self, source: VMRange, target: VMRange, wanted: int) -> int:
        """Move the last piece of `source`, or as much of it as is wanted, behind the pages of `target`."""
        piece = source.pieces[-1]
        nbytes = min(piece.nbytes, wanted)
        at = piece.address + piece.nbytes - nbytes
        to = target.address + sum(piece.nbytes for piece in target.pieces)
        if _mremap(at, nbytes, nbytes, _MAYMOVE_FIXED_DONTUNMAP, to) == _FAILED:
            _fail("move", nbytes)
        source.pieces.pop()
        if nbytes < piece.nbytes:
            source.pieces.append(PageRun(piece.address, piece.nbytes - nbytes))
        self._leave(at, nbytes)
        target.pieces.append(PageRun(to, nbytes))
        self.parked_bytes -= nbytes
        return nbytes

    @staticmethod
    def _leave(address: int, nbytes: int) -> None:
        """Addresses without pages stay reserved, or something else would be mapped there."""
        _map(address, nbytes, _NOTHING)

    def forget(self, source: VMRange) -> None:
        """The range's owner is gone: its pages go back to the system, its addresses with the last tensor over them."""
        held = sum(piece.nbytes for piece in source.pieces)
        if source in self._parked:
            del self._parked[source]
            self.parked_bytes -= held
        for piece in source.pieces:
            self._leave(piece.address, piece.nbytes)
        source.pieces.clear()
        self.mapped_bytes -= held
