"""One CUDA device: the current device of a thread, page-locked host memory, and the state of PyTorch's allocator."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar.errors import BudgetError

LOCK_BYTES = 64 << 30
"""The most that one registration locks. One of 512 GiB or more fails with current drivers (open-gpu-kernel-modules
#1234), and large ones fail now and then from about 96 GiB on. A copy must not cross from one registration into the next
(sglang #36798), so a slab keeps its places within them."""
PORTABLE = 1
"""cudaHostRegisterPortable: memory that counts as locked for all devices of the process."""

FREE_PERCENT = 92
"""The most of a device's free memory that the default budget takes: the allocator holds more than it hands out."""
OUTSIDE_BYTES = 3 << 29
"""The least that the default budget leaves free, 1.5 GiB: kernels loaded on first use, handles of cuBLAS and cuDNN,
Triton's modules, and memory that the allocator holds in unusable pieces. None of it is counted by the allocator."""
NCCL_BYTES = 1 << 30
"""Left free on top where several processes train: NCCL's own buffers."""
LEAST_PERCENT = 60
"""The least that it takes of a small device's free memory, where `OUTSIDE_BYTES` would leave next to nothing."""

EXPANDABLE_SEGMENTS = "expandable_segments:True"
SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllocatorStats:
    """The state of the caching allocator, in bytes; all zero on a device that has none."""

    allocated_bytes: int = 0
    """Blocks handed out."""
    reserved_bytes: int = 0
    """Memory taken from the device, in use or not."""
    inactive_split_bytes: int = 0
    """Free parts of segments that are partly in use, which can't go back to the device."""
    retries: int = 0
    """How often the device had no memory left, and the allocator freed what it cached and tried again."""

    def __str__(self) -> str:
        return (
            f"the CUDA allocator holds {self.reserved_bytes} bytes ({format_size(self.reserved_bytes)}) of the device, "
            f"{self.allocated_bytes} of them in use and {self.inactive_split_bytes} in free parts of segments in use; "
            f"it has freed its cache and tried again {self.retries} times"
        )


def default_budget(free_bytes: int, several: bool = False) -> int:
    """Return the bytes of free device memory that an engine uses if the user names no budget.

    several: whether several processes train together.
    """
    outside_bytes = OUTSIDE_BYTES + (NCCL_BYTES if several else 0)
    budget = min(free_bytes * FREE_PERCENT // 100, free_bytes - outside_bytes)
    return max(budget, free_bytes * LEAST_PERCENT // 100)


class CudaDevice:
    """The calls to one CUDA device that are not about a single tensor.

    `device` may leave its index out; it is the current device then.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the allocator has no figures before; no context is created by it
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)

    def enter_thread(self) -> None:
        """Make the device current in the calling thread.

        A new thread's current device is the first one. Leaving a stream's context there creates a context on that
        device, which takes about 500 MiB of it.
        """
        torch.cuda.set_device(self.index)

    def use_expandable_segments(self) -> bool:
        """Let the allocator's segments grow, unless the user has configured it. Returns whether this call did.

        Chunks come and go in sizes that differ from those of activations. In segments of fixed size that leaves free
        parts which are too small for the next tensor; expandable ones have their pages moved elsewhere.
        """
        if torch.version.hip is not None or torch.cuda.get_allocator_backend() != "native" or allocator_settings():
            return False
        # The second one is deprecated from PyTorch 2.10 on, where there is the first.
        configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (configure or torch.cuda.memory._set_allocator_settings)(EXPANDABLE_SEGMENTS)
        _log.info("set the CUDA allocator to %s; PYTORCH_CUDA_ALLOC_CONF overrides it", EXPANDABLE_SEGMENTS)
        return True

    def lock(self, address: int, nbytes: int) -> list[int]:
        """Page-lock host memory. Returns the addresses of its registrations, each of at most `LOCK_BYTES`.

        Raises BudgetError, with nothing locked, if the driver refuses.
        """
        locked: list[int] = []
        with torch.cuda.device(self.index):
            cudart: Any = torch.cuda.cudart()
            for start in range(0, nbytes, LOCK_BYTES):
                status = cudart.cudaHostRegister(address + start, min(LOCK_BYTES, nbytes - start), PORTABLE)
                if int(status) == 0:
                    locked.append(address + start)
                    continue
                for piece in reversed(locked):
                    cudart.cudaHostUnregister(piece)
                self._clear_error()
                raise BudgetError(
                    f"the driver can't page-lock {nbytes} bytes ({format_size(nbytes)}) of host memory: CUDA error "
                    f"{int(status)} ({cudart.cudaGetErrorString(status)}) after {start} bytes ({format_size(start)}) "
                    f"were locked. Give a smaller host_memory, or free memory of the host; give a disk for what no "
                    f"longer fits"
                )
        return locked

    def unlock(self, locked: list[int]) -> None:
        """Unlock what `lock` has locked, when no copy uses it any more."""
        with torch.cuda.device(self.index):
            try:
                torch.cuda.synchronize()
            finally:
                cudart: Any = torch.cuda.cudart()
                statuses = [int(cudart.cudaHostUnregister(piece)) for piece in locked]
                if any(statuses):
                    _log.warning("cudaHostUnregister returned CUDA errors %s", statuses)
                    self._clear_error()

    def _clear_error(self) -> None:
        """Take the error of a failed call from this thread; the next kernel launch would raise it otherwise.

        CUDA keeps the last error until somebody asks for it. PyTorch asks after each launch, and has no call that only
        asks (`torch.cuda.cudart()` has no cudaGetLastError).
        """
        try:
            torch.ones(1, device=self.device).add_(1)
        except RuntimeError as error:
            _log.debug("cleared: %s", error)

    def _stats(self) -> dict[str, Any]:
        # `torch.cuda.memory_allocated` sorts and flattens all of them first, which takes ten times as long.
        return torch._C._cuda_memoryStats(self.index)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that the allocator has handed out."""
        return int(self._stats()["allocated_bytes"]["all"]["current"])

    @property
    def peak_allocated_bytes(self) -> int:
        """The most of them since the peak was last reset."""
        return int(self._stats()["allocated_bytes"]["all"]["peak"])

    def reset_peak(self) -> None:
        """Reset the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def allocator_stats(self) -> AllocatorStats:
        """Return the allocator's figures."""
        stats = self._stats()
        names = "allocated_bytes", "reserved_bytes", "inactive_split_bytes"
        current = {name: int(stats[name]["all"]["current"]) for name in names}
        return AllocatorStats(**current, retries=int(stats["num_alloc_retries"]))

    def free_bytes(self) -> int:
        """Return what the device has free, with what this process's allocator holds."""
        return int(torch.cuda.mem_get_info(self.index)[0]) + self.allocator_stats().reserved_bytes


def allocator_settings() -> str:
    """Return how the user, or the code before, has configured PyTorch's CUDA allocator; empty if not at all."""
    for name in SETTINGS_VARIABLES:
        if value := os.environ.get(name):
            return value
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return next((str(value) for name, value in settings.items() if name.endswith("ALLOC_CONF")), "")
