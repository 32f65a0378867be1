"""CUDA accelerator: what PyTorch offers for CUDA and ROCm only, or faster than for every type of device."""

import logging
import os
import warnings
from typing import Any

import torch

from patrickstar._hardware.accelerator import AllocatorStats, TorchDevice
from patrickstar._hardware.reserved_limits import ReservedLimits
from patrickstar._hardware.vm_pool import fault_in
from patrickstar._hardware.workspaces import library_bytes, workspace_bytes
from patrickstar._layout.byte_size import format_size
from patrickstar._schedule.fragmentation import Fragmentation

LOCK_BYTES = 64 << 30
"""Largest registration. One of 512 GiB or more fails with current drivers (open-gpu-kernel-modules #1234), and large
ones fail occasionally from about 96 GiB on. A copy must not cross a registration boundary (sglang #36798), so a host
arena keeps each block within one registration."""
PORTABLE = 1
"""cudaHostRegisterPortable: the memory is page-locked for all devices of the process."""

EXPANDABLE_SEGMENTS = "expandable_segments:True"
SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_log = logging.getLogger(__name__)

_reserved_limits: dict[int, ReservedLimits] = {}
"""Limits by device: the allocator belongs to the process."""


class CudaAccelerator(TorchDevice):
    """One CUDA or ROCm device."""

    max_lock_bytes = LOCK_BYTES

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the allocator has no statistics before; this creates no context
        super().__init__(device)

    def start(self) -> None:
        super().start()
        self.use_expandable_segments()

    def use_expandable_segments(self) -> bool:
        """Enable expandable segments, unless the user has configured the allocator. Return True if enabled here.

        Chunks and activations differ in size. In segments of fixed size this leaves free parts that are too small for
        the next tensor; expandable segments can remap their pages.
        """
        if torch.version.hip is not None or torch.cuda.get_allocator_backend() != "native" or allocator_settings():
            return False
        # The latter is deprecated from PyTorch 2.10 on, which has the former.
        configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (configure or torch.cuda.memory._set_allocator_settings)(EXPANDABLE_SEGMENTS)
        _log.info("set the CUDA allocator to %s; PYTORCH_CUDA_ALLOC_CONF overrides it", EXPANDABLE_SEGMENTS)
        return True

    def page_lock(self, address: int, nbytes: int) -> list[int] | None:
        locked: list[int] = []
        fault_in(address, nbytes)  # the driver faults pages in on one thread, at a tenth of the rate
        with torch.cuda.device(self.index):
            cudart: Any = torch.cuda.cudart()
            for start in range(0, nbytes, self.max_lock_bytes):
                status = cudart.cudaHostRegister(address + start, min(self.max_lock_bytes, nbytes - start), PORTABLE)
                if int(status) == 0:
                    locked.append(address + start)
                    continue
                for registered in reversed(locked):
                    cudart.cudaHostUnregister(registered)
                self._clear_error()
                warnings.warn(
                    f"the driver can't page-lock {nbytes} bytes ({format_size(nbytes)}) of host memory: CUDA error "
                    f"{int(status)} ({cudart.cudaGetErrorString(status)}) after {start} bytes ({format_size(start)}) "
                    f"were locked. Training goes on, but copies between this memory and {self.device} make the host "
                    f"wait. Give a smaller host_memory and a disk tier for the rest, or free host memory",
                    stacklevel=2,
                )
                return None
        return locked

    def page_unlock(self, locked: list[int]) -> None:
        """Unlock the registrations of `page_lock`, after all work of the device has ended."""
        with torch.cuda.device(self.index):
            try:
                torch.cuda.synchronize()
            finally:
                cudart: Any = torch.cuda.cudart()
                statuses = [int(cudart.cudaHostUnregister(registered)) for registered in locked]
                if any(statuses):
                    _log.warning("cudaHostUnregister returned CUDA errors %s", statuses)
                    self._clear_error()

    def _clear_error(self) -> None:
        """Clear this thread's CUDA error; otherwise the next kernel launch would raise it.

        CUDA keeps the last error until it is read. PyTorch reads it after each launch, and offers no call that only
        reads it (`torch.cuda.cudart()` has no cudaGetLastError).
        """
        try:
            torch.ones(1, device=self.device).add_(1)
        except RuntimeError as error:
            _log.debug("cleared: %s", error)

    def _stats(self) -> dict[str, Any]:
        # `torch.cuda.memory_allocated` first sorts and flattens all statistics, which takes ten times as long.
        return torch._C._cuda_memoryStats(self.index)

    @property
    def allocated_bytes(self) -> int:
        return int(self._stats()["allocated_bytes"]["all"]["current"])

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of `allocated_bytes` since the last reset."""
        return int(self._stats()["allocated_bytes"]["all"]["peak"])

    def allocator_stats(self) -> AllocatorStats:
        stats = self._stats()
        names = "allocated_bytes", "reserved_bytes", "inactive_split_bytes"
        current = {name: int(stats[name]["all"]["current"]) for name in names}
        return AllocatorStats(**current, retries=int(stats["num_alloc_retries"]))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def _device_free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.index)[0])

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    @property
    def fragmentation(self) -> Fragmentation:
        return Fragmentation()

    def limit_reserved(self, owner: object, nbytes: int) -> None:
        """Limit the allocator of this process; see `ReservedLimits`. It reserves whole pages beyond its own limit."""
        self._reserved_limits().add(owner, nbytes - self.fragmentation.overshoot_bytes)
        if self.allocator_stats().reserved_bytes > nbytes:
            self.release_cached_memory()

    def unlimit_reserved(self, owner: object) -> None:
        self._reserved_limits().remove(owner)

    def _reserved_limits(self) -> ReservedLimits:
        if self.index not in _reserved_limits:
            index, total_bytes = self.index, torch.cuda.get_device_properties(self.index).total_memory
            _reserved_limits[index] = ReservedLimits(
                lambda: int(torch.cuda.get_per_process_memory_fraction(index) * total_bytes),
                lambda nbytes: torch.cuda.set_per_process_memory_fraction(
                    min(1.0, max(0, nbytes) / total_bytes), index
                ),
            )
        return _reserved_limits[self.index]

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        with torch.cuda.device(self.index):
            return library_bytes(self, dtype, in_updates, self.workspace_bytes)

    def workspace_bytes(self) -> int:
        """Return the bytes of the workspaces of one thread by PyTorch's rule."""
        major, _ = torch.cuda.get_device_capability(self.index)
        return workspace_bytes(major)


def allocator_settings() -> str:
    """Return the existing configuration of PyTorch's CUDA allocator; empty if there is none."""
    for name in SETTINGS_VARIABLES:
        if value := os.environ.get(name):
            return value
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return next((str(value) for name, value in settings.items() if name.endswith("ALLOC_CONF")), "")
