"""Meters of non-model data: measured usage minus chunk bytes (PatrickStar §8.1)."""

import ctypes
import os
import warnings
from pathlib import Path
from typing import Protocol

import psutil

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.cpu_allocator import CpuAllocator, cpu_allocator
from patrickstar._hardware.vm_pool import SYSTEM_PAGE, can_move_pages
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"
_STATM = Path("/proc/self/statm")


class Meter(Protocol):
    """Meter of the bytes on the device outside chunks; `chunk_bytes` is the caller's count of chunk bytes."""

    source: str
    """Description of the measured quantity."""
    counts_freed: bool
    """True if freed memory that is cached for reuse counts as used until `reclaim`."""

    def calibrate(self, chunk_bytes: int) -> None:
        """Leave out what is used beyond chunks by now, which belongs to libraries and to the user, from now on."""

    def now(self, chunk_bytes: int) -> int:
        """Return the current non-model bytes."""

    def peak(self, chunk_bytes: int) -> int:
        """Return the peak non-model bytes since `restart`; no chunk may be allocated or freed in between."""

    def restart(self) -> None:
        """Reset the peak."""

    def reclaim(self) -> None:
        """Return cached freed memory to the system, if it counts as used."""

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        """Count the part of a device budget that is left to fragmentation as used from now on.

        Returns:
            The fragmentation of the device's allocator.
        """

    def limit(self, nbytes: int) -> None:
        """Keep tensors and freed memory that the allocator caches within `nbytes`, if it can, until `close`."""

    def close(self) -> None:
        """Withdraw the limit."""


class DeviceMeter:
    """Meter that reads the statistics of an accelerator's caching allocator."""

    source = "bytes allocated by the device's caching allocator"
    counts_freed = False

    def __init__(self, accelerator: TorchDevice) -> None:
        self._accelerator = accelerator
        self._unplanned_bytes = 0
        """Part of the budget that is left to fragmentation. See [Note: reserved memory]."""
        self._limit_bytes: int | None = None

    def calibrate(self, chunk_bytes: int) -> None:
        """Do nothing: the allocator counts tensors and workspaces only."""

    def now(self, chunk_bytes: int) -> int:
        return self._unplanned_bytes + max(0, self._accelerator.allocated_bytes - chunk_bytes)

    def peak(self, chunk_bytes: int) -> int:
        return self._unplanned_bytes + max(0, self._accelerator.peak_allocated_bytes - chunk_bytes)

    def restart(self) -> None:
        self._accelerator.reset_peak()

    def reclaim(self) -> None:
        """Do nothing: cached blocks are not counted, and the allocator frees them before it fails."""

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        fragmentation = self._accelerator.fragmentation
        self._unplanned_bytes = fragmentation.unplanned_bytes(budget_bytes)
        if fragmentation.small_bytes:
            self._limit_bytes = fragmentation.reserved_limit_bytes(budget_bytes)
        return fragmentation

    def limit(self, nbytes: int) -> None:
        """Limit what the allocator reserves for chunks and tensors together, once: `nbytes` changes with chunks."""
        if self._limit_bytes is not None:
            self._accelerator.limit_reserved(self, self._limit_bytes)
            self._limit_bytes = None

    def close(self) -> None:
        self._accelerator.unlimit_reserved(self)


def _trim_heap() -> None:
    """Return the C library's freed memory to the system, if it supports that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class AllocatorMeter:
    """Meter that reads the counters of the allocator of CPU tensors. Chunks are not allocated there."""

    source = "bytes of tensors, counted by the allocator"
    counts_freed = False

    def __init__(self, allocator: CpuAllocator) -> None:
        self._allocator = allocator
        self._tensors = allocator.counter()

    def calibrate(self, chunk_bytes: int) -> None:
        self._tensors = self._allocator.counter()

    def now(self, chunk_bytes: int) -> int:
        return self._tensors.live_bytes

    def peak(self, chunk_bytes: int) -> int:
        return self._tensors.peak_bytes

    def restart(self) -> None:
        self._tensors.reset_peak()

    def reclaim(self) -> None:
        """Do nothing: freed memory is not counted."""

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        return NO_FRAGMENTATION

    def limit(self, nbytes: int) -> None:
        self._tensors.set_limit(nbytes)

    def close(self) -> None:
        self._tensors.set_limit(None)
        _trim_heap()


class _ProcessMeter:
    """Meter of the process's memory, which includes freed memory in its heap."""

    counts_freed = True

    def reclaim(self) -> None:
        _trim_heap()

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        return NO_FRAGMENTATION

    def limit(self, nbytes: int) -> None:
        """Do nothing: the heap has no limit."""

    def close(self) -> None:
        """Do nothing."""


class ResidentMeter(_ProcessMeter):
    """Meter of resident memory above the baseline, including peaks, by the kernel's counters."""

    source = "resident memory of the process minus mapped files, peaks by the kernel's high-water mark"

    def __init__(self) -> None:
        self.baseline_bytes = 0
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = os.open(_CLEAR_REFS, os.O_WRONLY)

    def __del__(self) -> None:
        for name in ("_status", "_clear"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def _above_baseline(self, key: bytes, chunk_bytes: int) -> int:
        text = os.pread(self._status, 1 << 14, 0)
        # Library pages are loaded when their code first runs, and the system may reclaim them at any time.
        anonymous = _kib(text, key) - _kib(text, b"RssFile:")
        return max(0, anonymous * 1024 - self.baseline_bytes - chunk_bytes)

    def calibrate(self, chunk_bytes: int) -> None:
        self.baseline_bytes = 0
        self.baseline_bytes = self._above_baseline(b"VmRSS:", chunk_bytes)

    def now(self, chunk_bytes: int) -> int:
        return self._above_baseline(b"VmRSS:", chunk_bytes)

    def peak(self, chunk_bytes: int) -> int:
        return self._above_baseline(b"VmHWM:", chunk_bytes)

    def restart(self) -> None:
        os.pwrite(self._clear, _RESET_PEAK, 0)


def _kib(status: bytes, key: bytes) -> int:
    start = status.index(key) + len(key)
    return int(status[start : status.index(b"kB", start)])


class SampledMeter(_ProcessMeter):
    """Meter of resident memory sampled at operator boundaries, for kernels without a resettable peak."""

    source = "resident memory of the process, sampled at operator boundaries (peaks inside operators are missed)"

    def __init__(self) -> None:
        self.baseline_bytes = 0
        self._process = psutil.Process()

    def calibrate(self, chunk_bytes: int) -> None:
        self.baseline_bytes = self._process.memory_info().rss - chunk_bytes

    def now(self, chunk_bytes: int) -> int:
        return max(0, self._process.memory_info().rss - self.baseline_bytes - chunk_bytes)

    peak = now

    def restart(self) -> None:
        """Do nothing: a sample has no peak."""


def library_resident_bytes(chunk_bytes: int) -> int:
    """Return the process's resident memory beside CPU tensors and chunks; 0 if tensors are not counted.

    It holds the code and data of libraries, their caches (such as oneDNN's primitives for each shape), Python objects
    and what the heap keeps of freed memory. It belongs to the machine's memory, and to no budget.
    """
    if not cpu_allocator.cache_info().currsize or (allocator := cpu_allocator()) is None:
        return 0
    resident_pages = int(_STATM.read_bytes().split()[1])
    return max(0, resident_pages * SYSTEM_PAGE - allocator.live_bytes - allocator.cached_bytes - chunk_bytes)


def host_meter() -> Meter:
    """Return the best meter of the host's memory that this system offers."""
    if can_move_pages() and (allocator := cpu_allocator()) is not None:
        return AllocatorMeter(allocator)
    if os.access(_CLEAR_REFS, os.W_OK):
        return ResidentMeter()
    warnings.warn(f"{_CLEAR_REFS} is not writable here: {SampledMeter.source}", stacklevel=2)
    return SampledMeter()
