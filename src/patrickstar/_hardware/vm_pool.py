"""Virtual memory pool: pages move between address ranges instead of being returned to the system and zeroed again."""

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

# [Note: movable pages]
# On a CPU a chunk must free its memory and later return to the same address (see [Note: one storage for life]). If
# pages went back to the system and were faulted in again, the system would zero a page each time: measured on a virtual
# machine with 2 cores, a copy into memory that is faulted in ran at 0.6 GB/s, into mapped memory at 23 GB/s. So a chunk
# owns a range of addresses, not pages. When it is evicted, its pages are parked, unreadable, until another range needs
# some: then the kernel moves them by `mremap`, at 0.4 ms per 64 MiB. Parked pages count as used, and are returned to
# the system when the budget needs them (`PagePool.trim`).

# [Note: memory excluded from fork]
# fork(), which starts DataLoader workers, shares private memory with the child, and copies a page for the first process
# that writes it. Kernels from 5.10 on copy every page-locked page for the child at once, whole host tiers.
# Older ones share them, and after a write the GPU uses the old page: stale bytes in both directions. On a CPU every
# page that the engine writes while workers live exists twice. So all memory mapped here is excluded from children
# (MADV_DONTFORK). In a child these addresses are unmapped or hold the child's own memory, so a finalizer must not unmap
# them there.

SYSTEM_PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 * 1024**2
"""Alignment of ranges, so that the system can use huge pages and move them whole."""

# 0x4000 is MAP_NORESERVE (in `mmap` from Python 3.13 on); without it strict overcommit refuses large reservations.
RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
_MAP_FIXED = 0x10
# The old addresses stay mapped, without pages. Otherwise another thread's memory could be mapped there before they are
# reserved again.
_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

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


def _fail(operation: str, nbytes: int) -> NoReturn:
    number = ctypes.get_errno()
    raise BudgetError(
        f"the system refused to {operation} {nbytes} bytes of memory: {os.strerror(number)}; give a smaller "
        f"device_memory, or raise the system's limits (ulimit -v, vm.max_map_count, vm.overcommit_memory)"
    )


def round_up(nbytes: int, unit: int = SYSTEM_PAGE) -> int:
    """Return the next multiple of a unit, by default the system's page size."""
    return -(-nbytes // unit) * unit


def fault_in(address: int, nbytes: int) -> None:
    """Back a range with pages on all threads, and keep its content: one thread zeroes a new page at a time."""
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    memory[::SYSTEM_PAGE].add_(0)  # writes one byte of each page


def _map(address: int | None, nbytes: int, protection: int) -> int:
    try:
        return _try_to_map(address, nbytes, protection)
    except OSError:
        _fail("map", nbytes)


def _try_to_map(address: int | None, nbytes: int, protection: int) -> int:
    fixed = _MAP_FIXED if address is not None else 0
    mapped = _mmap(address, nbytes, protection, RESERVE | fixed, -1, 0)
    # Pages keep this advice when `mremap` moves them. See [Note: memory excluded from fork].
    if mapped == _FAILED or _madvise(mapped, nbytes, mmap.MADV_DONTFORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)


def _reserve(address: int, nbytes: int) -> None:
    """Free the pages and keep the addresses reserved, so that nothing else is mapped there."""
    _map(address, nbytes, _NO_ACCESS)


def _unmap(process: int, address: int, nbytes: int) -> None:
    """Unmap addresses, only in the process that mapped them. See [Note: memory excluded from fork]."""
    if os.getpid() == process:
        _munmap(address, nbytes)


def private_memory(nbytes: int) -> Any:
    """Map zeroed memory that forked children do not inherit; return an object with the buffer protocol.

    The memory is unmapped once nothing refers to the object. Raises OSError if the system refuses.
    """
    if sys.platform != "linux":  # nothing is page-locked there
        return mmap.mmap(-1, nbytes, flags=RESERVE)
    size = round_up(nbytes)
    address = _try_to_map(None, size, _READ_WRITE)
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, os.getpid(), address, size).atexit = False
    return memory


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages, and ignore a refusal."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def discard(address: int, nbytes: int) -> None:
    """Return whole pages to the system; they read as zeros at the next use."""
    if _madvise(address, nbytes, mmap.MADV_DONTNEED):
        _fail("take back", nbytes)


@cache
def can_move_pages() -> bool:
    """Return True if pages can move between ranges and leave their addresses mapped: Linux 5.7 or later."""
    if sys.platform != "linux":
        return False
    source, target = (_map(None, SYSTEM_PAGE, _READ_WRITE) for _ in range(2))
    moved = _mremap(source, SYSTEM_PAGE, SYSTEM_PAGE, _MAYMOVE_FIXED_DONTUNMAP, target) != _FAILED
    for address in (source, target):
        _munmap(address, SYSTEM_PAGE)
    return bool(moved)


class VMRange:
    """Permanent address range. `PagePool.commit` gives it pages, `PagePool.decommit` parks them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes)
        reserved_bytes = self.nbytes + HUGE_PAGE
        start = _map(None, reserved_bytes, _NO_ACCESS)
        self.address = round_up(start, HUGE_PAGE)
        self.runs: list[PageRun] = []
        self.backed_bytes = 0
        """Bytes of the pages in `runs`."""
        self.memory = (ctypes.c_char * nbytes).from_address(self.address)
        # Tensors over the memory keep it mapped, and may outlive the range.
        weakref.finalize(self.memory, _unmap, os.getpid(), start, reserved_bytes).atexit = False

    def storage(self) -> torch.UntypedStorage:
        """Return a storage over these addresses; it is readable only while the range has pages."""
        return torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()


@dataclass
class PageRun:
    """Consecutive pages that were mapped or moved in one call."""

    address: int
    nbytes: int


@dataclass
class PagePool:
    """Pool that moves pages from ranges that do not need them to ranges that do. See [Note: movable pages]."""

    mapped_bytes: int = 0
    """Bytes of pages in all ranges, parked ones included."""
    parked_bytes: int = 0
    _parked: "dict[VMRange, None]" = field(default_factory=dict)

    def new_range(self, nbytes: int) -> VMRange:
        """Return a range without pages."""
        return VMRange(nbytes)

    def commit(self, target: VMRange) -> None:
        """Provide a range with pages: its own parked ones first, then other parked ones, then new ones."""
        if target in self._parked:
            del self._parked[target]
            self.parked_bytes -= target.backed_bytes
        missing = target.nbytes - target.backed_bytes
        for source in self._sources(missing) if missing else ():
            while missing and source.runs:
                missing -= self._move(source, target, missing)
            if not source.runs:
                self._parked.pop(source, None)
            if not missing:
                break
        if missing:
            address = target.address + target.nbytes - missing
            _map(address, missing, _READ_WRITE)
            advise_huge(address, missing)
            target.runs.append(PageRun(address, missing))
            target.backed_bytes += missing
            self.mapped_bytes += missing
        if _mprotect(target.address, target.nbytes, _READ_WRITE):
            _fail("unprotect", target.nbytes)

    def decommit(self, source: VMRange) -> None:
        """Park a range's pages; an access to them is a segmentation fault until the next `commit`."""
        if _mprotect(source.address, source.nbytes, _NO_ACCESS):
            _fail("protect", source.nbytes)
        self._parked[source] = None
        self.parked_bytes += source.nbytes

    def trim(self, keep_bytes: int) -> None:
        """Return parked pages to the system until at most `keep_bytes` are left."""
        while self.parked_bytes > max(0, keep_bytes):
            source = next(iter(self._parked))
            if not source.runs:
                del self._parked[source]
                continue
            run = source.runs[-1]
            excess = min(run.nbytes, round_up(self.parked_bytes - max(0, keep_bytes)))
            # Pages first, then the accounts: if Ctrl-C strikes in between, addresses without pages get new ones.
            _reserve(run.address + run.nbytes - excess, excess)
            source.runs.pop()
            if excess < run.nbytes:
                source.runs.append(PageRun(run.address, run.nbytes - excess))
            source.backed_bytes -= excess
            self.mapped_bytes -= excess
            self.parked_bytes -= excess

    def _sources(self, nbytes: int) -> list[VMRange]:
        """Return parked ranges to take pages from: an exact fit first, then the largest."""
        return sorted(self._parked, key=lambda source: (source.backed_bytes != nbytes, -source.backed_bytes))

    def _move(self, source: VMRange, target: VMRange, wanted: int) -> int:
        """Move up to `wanted` bytes of the last run of `source` behind the pages of `target`; return their number."""
        run = source.runs[-1]
        nbytes = min(run.nbytes, wanted)
        source_address = run.address + run.nbytes - nbytes
        target_address = target.address + target.backed_bytes
        if _mremap(source_address, nbytes, nbytes, _MAYMOVE_FIXED_DONTUNMAP, target_address) == _FAILED:
            _fail("move", nbytes)
        source.runs.pop()
        if nbytes < run.nbytes:
            source.runs.append(PageRun(run.address, run.nbytes - nbytes))
        _reserve(source_address, nbytes)
        target.runs.append(PageRun(target_address, nbytes))
        source.backed_bytes -= nbytes
        target.backed_bytes += nbytes
        self.parked_bytes -= nbytes
        return nbytes

    def release(self, source: VMRange) -> None:
        """Return a range's pages to the system; its addresses are unmapped with the last tensor over them."""
        if source in self._parked:
            del self._parked[source]
            self.parked_bytes -= source.backed_bytes
        for run in source.runs:
            _reserve(run.address, run.nbytes)
        source.runs.clear()
        self.mapped_bytes -= source.backed_bytes
        source.backed_bytes = 0
