"""One CUDA device: the current device of a thread, page-locked host memory, and the state of PyTorch's allocator."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar.errors import BudgetError

LOCK_BYTES = 64 << 30
"""Largest registration. One of 512 GiB or more fails with current drivers (open-gpu-kernel-modules #1234), and large
ones fail occasionally from about 96 GiB on. A copy must not cross a registration boundary (sglang #36798), so a host
arena keeps each block within one registration."""
PORTABLE = 1
"""cudaHostRegisterPortable: the memory is page-locked for all devices of the process."""

FREE_PERCENT = 92
"""Limit of the default budget in percent of free device memory: the allocator reserves more than it allocates."""
OUTSIDE_BYTES = 3 << 29
"""Minimum that the default budget leaves free, 1.5 GiB: kernels loaded on first use, handles of cuBLAS and cuDNN,
Triton's modules, and fragmented memory of the allocator. The allocator counts none of it."""
NCCL_BYTES = 1 << 30
"""Left free in addition if several processes train: NCCL's buffers."""
MIN_PERCENT = 60
"""Lower limit of the default budget on small devices, where `OUTSIDE_BYTES` would leave almost nothing."""

EXPANDABLE_SEGMENTS = "expandable_segments:True"
SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllocatorStats:
    """State of the caching allocator, in bytes; all zero on a device without one."""

    allocated_bytes: int = 0
    """Allocated blocks."""
    reserved_bytes: int = 0
    """Memory reserved on the device, in use or not."""
    inactive_split_bytes: int = 0
    """Free parts of segments that are partly in use; they cannot be released to the device."""
    retries: int = 0
    """Number of times the device was out of memory and the allocator freed its cache and retried."""

    def __str__(self) -> str:
        return (
            f"the CUDA allocator has reserved {self.reserved_bytes} bytes ({format_size(self.reserved_bytes)}) of the "
            f"device, {self.allocated_bytes} of them in use and {self.inactive_split_bytes} in free parts of segments "
            f"in use; it has freed its cache and retried {self.retries} times"
        )


def default_budget(free_bytes: int, several: bool = False) -> int:
    """Return the default device budget in bytes; `several` if several processes train together."""
    outside_bytes = OUTSIDE_BYTES + (NCCL_BYTES if several else 0)
    budget = min(free_bytes * FREE_PERCENT // 100, free_bytes - outside_bytes)
    return max(budget, free_bytes * MIN_PERCENT // 100)


class CudaDevice:
    """Device-wide calls to one CUDA device, by default the current one."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the allocator has no statistics before; this creates no context
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)

    def enter_thread(self) -> None:
        """Make the device current in the calling thread.

        A new thread's current device is the first one. Leaving a stream context in such a thread creates a CUDA context
        on the first device, which takes about 500 MiB of its memory.
        """
        torch.cuda.set_device(self.index)

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

    def page_lock(self, address: int, nbytes: int) -> list[int]:
        """Page-lock host memory in registrations of at most `LOCK_BYTES`; return their addresses.

        Raises BudgetError if the driver refuses; nothing is locked then.
        """
        locked: list[int] = []
        with torch.cuda.device(self.index):
            cudart: Any = torch.cuda.cudart()
            for start in range(0, nbytes, LOCK_BYTES):
                status = cudart.cudaHostRegister(address + start, min(LOCK_BYTES, nbytes - start), PORTABLE)
                if int(status) == 0:
                    locked.append(address + start)
                    continue
                for registered in reversed(locked):
                    cudart.cudaHostUnregister(registered)
                self._clear_error()
                raise BudgetError(
                    f"the driver can't page-lock {nbytes} bytes ({format_size(nbytes)}) of host memory: CUDA error "
                    f"{int(status)} ({cudart.cudaGetErrorString(status)}) after {start} bytes ({format_size(start)}) "
                    f"were locked. Give a smaller host_memory and a disk tier for the rest, or free host memory"
                )
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

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def allocator_stats(self) -> AllocatorStats:
        stats = self._stats()
        names = "allocated_bytes", "reserved_bytes", "inactive_split_bytes"
        current = {name: int(stats[name]["all"]["current"]) for name in names}
        return AllocatorStats(**current, retries=int(stats["num_alloc_retries"]))

    def free_bytes(self) -> int:
        """Return the free device memory plus the memory reserved by this process's allocator, in bytes."""
        return int(torch.cuda.mem_get_info(self.index)[0]) + self.allocator_stats().reserved_bytes


def allocator_settings() -> str:
    """Return the existing configuration of PyTorch's CUDA allocator; empty if there is none."""
    for name in SETTINGS_VARIABLES:
        if value := os.environ.get(name):
            return value
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return next((str(value) for name, value in settings.items() if name.endswith("ALLOC_CONF")), "")
