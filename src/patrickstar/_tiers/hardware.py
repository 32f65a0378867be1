"""Factory of the resources behind the tiers: memory, copy streams, disk, clock. A dry run simulates them."""

import time
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from patrickstar._hardware.accelerator import AllocatorStats, TorchDevice
from patrickstar._hardware.cuda_accelerator import CudaAccelerator
from patrickstar._hardware.direct_io import free_bytes
from patrickstar._hardware.memory_meter import DeviceMeter, Meter, host_meter, library_resident_bytes
from patrickstar._hardware.ram import Ram, measure_ram
from patrickstar._hardware.vm_pool import PagePool, can_move_pages
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.margins import device_budget
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION
from patrickstar._tiers.copy_streams import CopyStreams
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.page_codec import PageCodec
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import DiskError


class Hardware:
    """The real machine."""

    seconds: Callable[[], float] = staticmethod(time.perf_counter)
    """Clock of what is recorded, and of the time that the host waits."""

    def __init__(self, device: torch.device) -> None:
        self.accelerator = self.new_accelerator(device)
        self.device = device if self.accelerator is None else self.accelerator.device  # with its index
        self.host_device = torch.device("cpu")
        self.has_gpu = self.accelerator is not None
        """True if copies and host updates can overlap with device compute."""

    @staticmethod
    def new_accelerator(device: torch.device) -> TorchDevice | None:
        """Return the accelerator of a device; None for the CPU, whose tensors are in host memory."""
        if device.type in ("cpu", "meta"):
            return None
        return CudaAccelerator(device) if device.type == "cuda" else TorchDevice(device)

    def start(self) -> None:
        """Prepare the device for an engine of the calling thread; call it before any allocation on the device."""
        if self.accelerator is not None:
            self.accelerator.start()

    def enter_thread(self) -> None:
        """Make the device current in the calling thread; every thread that uses the device calls this first."""
        if self.accelerator is not None:
            self.accelerator.enter_thread()

    def enter_worker(self) -> None:
        """Do the same in a worker thread, which may wait for the device."""
        if self.accelerator is not None:
            self.accelerator.enter_worker()

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        """Return the device bytes that its libraries keep after the first matrix products in `dtype`.

        Args:
            in_updates: Whether updates on the host run products on the device.
        """
        return 0 if self.accelerator is None else self.accelerator.library_bytes(dtype, in_updates)

    def outside_plan_bytes(self, dtype: torch.dtype, in_updates: bool, budget_bytes: int) -> int:
        """Return the part of a device budget that libraries and fragmentation use."""
        fragmentation = NO_FRAGMENTATION if self.accelerator is None else self.accelerator.fragmentation
        return self.library_bytes(dtype, in_updates) + fragmentation.unplanned_bytes(budget_bytes)

    def allocator_stats(self) -> AllocatorStats:
        return AllocatorStats() if self.accelerator is None else self.accelerator.allocator_stats()

    def allocator_report(self) -> str:
        """Return the device allocator's statistics as a sentence for an error message; empty on a CPU."""
        return "" if self.accelerator is None else str(self.allocator_stats())

    def library_resident_bytes(self, chunk_bytes: int) -> int:
        """Return the process's resident memory beside tensors and chunks, which no budget counts."""
        return library_resident_bytes(chunk_bytes)

    def meter(self) -> Meter:
        return host_meter() if self.accelerator is None else DeviceMeter(self.accelerator)

    def device_bytes(self, several: bool = False) -> int:
        """Return the default device budget. `several`: several processes train, which uses GPU memory beside it."""
        return self.host_bytes() if self.accelerator is None else device_budget(self.free_device_bytes(), several)

    def free_device_bytes(self) -> int:
        """Return the bytes that tensors could use on the device."""
        return measure_ram().available_bytes if self.accelerator is None else self.accelerator.free_bytes()

    @cached_property
    def ram(self) -> Ram:
        """Memory of this machine when it was first asked for: before an engine has taken any."""
        return measure_ram()

    def host_bytes(self, given_bytes: int = 0) -> int:
        """Return the default of all budgets in the RAM, beside budgets of `given_bytes`. [Note: default budgets]."""
        return self.ram.default_bytes(given_bytes)

    def warn_beyond_ram(self, nbytes: int, budgets: str) -> None:
        """Warn if budgets exceed the available memory: the system would end the process where a budget is kept."""
        if nbytes > (ram := self.ram.available_bytes):
            warnings.warn(
                f"{budgets} may take {nbytes} bytes ({format_size(nbytes)}), and {ram} bytes ({format_size(ram)}) of "
                f"memory are available here: if training needs more, the system ends the process. Lower the budgets, "
                f"or add a disk",
                stacklevel=6,
            )

    def page_pool(self) -> PagePool | None:
        """Return a page pool if the device's chunks are backed by remapped pages."""
        return PagePool() if self.device.type == "cpu" and can_move_pages() else None

    def host_arena(self, nbytes: int) -> HostArena:
        return HostArena(nbytes, self.accelerator)

    def copies(self) -> CopyStreams:
        return CopyStreams(self.accelerator)

    def on_partial_copy(self, nbytes: int, *, to_device: bool) -> None:
        """Hook for copies of less than a chunk, which the caller runs. A dry run adds their time."""

    def release_cached_memory(self) -> None:
        if self.accelerator is not None:
            self.accelerator.release_cached_memory()

    def free_disk_bytes(self, directory: Path) -> int:
        """Return the free bytes of a directory's file system. Raises DiskError if it cannot be used."""
        try:
            return free_bytes(directory)
        except OSError as error:
            raise DiskError(
                f"the disk tier's directory {directory} can't be used: {error.strerror}; create it, or use another"
            ) from error

    def swap_file(
        self, directory: Path, nbytes: int, checksums: bool, capacity_bytes: int | None, durable: bool = False
    ) -> SwapFile:
        return SwapFile(directory, nbytes, checksums=checksums, capacity_bytes=capacity_bytes, durable=durable)

    def disk(self, file: SwapFile, page_bytes: int, codec: PageCodec | None = None) -> DiskTier:
        return DiskTier(file, page_bytes, self.accelerator, codec)
