"""Measuring non-model data: real usage less chunk bytes (PatrickStar §8.1)."""

import os
import warnings
from pathlib import Path
from typing import Protocol

import psutil
import torch

from patrickstar._memory.cuda_device import CudaDevice
from patrickstar._memory.malloc_tuning import process_heap

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"


class Meter(Protocol):
    """Tells how many bytes on the device are not in chunks. `chunk_bytes` is what the caller knows to be chunks."""

    source: str
    """What is measured, in words."""
    counts_freed: bool
    """Whether memory that was freed, but is kept for reuse, counts as used until `reclaim`."""

    @property
    def caching(self) -> bool:
        """Whether there may be such memory, as `set_caching` has it."""
        ...

    def calibrate(self, chunk_bytes: int) -> None:
        """Take what is used now, beyond chunks, as nobody's: the libraries themselves."""
        ...

    def now(self, chunk_bytes: int) -> int:
        """Non-model bytes at this moment."""
        ...

    def peak(self, chunk_bytes: int) -> int:
        """The most non-model bytes since the last call of `restart`; no chunk may have come or gone in between."""
        ...

    def restart(self) -> None:
        """Forget the peak."""
        ...

    def reclaim(self) -> None:
        """Have memory that was freed, but is kept for reuse, given back to the system where it counts as used."""
        ...

    def set_caching(self, allowed: bool) -> None:
        """Whether memory that is freed from now on may be kept for reuse, where that counts as used."""
        ...


class CudaMeter:
    """The CUDA caching allocator's own figures."""

    source = "bytes allocated by the CUDA caching allocator"
    counts_freed = False
    caching = False

    def __init__(self, device: torch.device) -> None:
        self._cuda = CudaDevice(device)

    def calibrate(self, chunk_bytes: int) -> None:
        """Nothing to calibrate: the allocator counts tensors and workspaces only, whoever made them."""

    def now(self, chunk_bytes: int) -> int:
        return max(0, self._cuda.allocated_bytes - chunk_bytes)

    def peak(self, chunk_bytes: int) -> int:
        return max(0, self._cuda.peak_allocated_bytes - chunk_bytes)

    def restart(self) -> None:
        self._cuda.reset_peak()

    def reclaim(self) -> None:
        """Cached blocks are not counted, and the allocator frees them by itself before it fails."""

    def set_caching(self, allowed: bool) -> None:
        """Nor does it matter what is cached from now on."""


class _HeapMeter:
    """Sees what the process's heap keeps of freed memory, and has it given back."""

    counts_freed = True

    @property
    def caching(self) -> bool:
        return process_heap().caching

    def reclaim(self) -> None:
        process_heap().trim()

    def set_caching(self, allowed: bool) -> None:
        process_heap().set_caching(allowed, self)


class ResidentMeter(_HeapMeter):
    """Resident memory of the process as the kernel counts it, peaks included, above what it was at calibration."""

    source = "resident memory of the process less mapped files, peaks by the kernel's high-water mark"

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
        # Pages of libraries come in as their code is first run, and the system may take them back at any time.
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


class SampledMeter(_HeapMeter):
    """Resident memory sampled at operator boundaries: what is left where the kernel keeps no resettable peak."""

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
        """A sample has no past."""


def default_meter(device: torch.device) -> Meter:
    """The best meter this machine has for `device`."""
    if device.type == "cuda":
        return CudaMeter(device)
    if os.access(_CLEAR_REFS, os.W_OK):
        return ResidentMeter()
    warnings.warn(f"{_CLEAR_REFS} is not writable here: {SampledMeter.source}", stacklevel=2)
    return SampledMeter()


def installed_bytes(device: torch.device) -> int:
    """What the machine has to give now: free memory of the GPU, or memory available to this process on a CPU."""
    if device.type == "cuda":
        return CudaDevice(device).free_bytes()
    available = psutil.virtual_memory().available
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            available = min(available, int(text))
    return int(available)
