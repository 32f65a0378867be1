"""What tiers are made of: memory, copies, a disk and a clock. A rehearsal has others than a run."""

import os
import time
from pathlib import Path

import torch

from patrickstar._memory.copy_streams import CopyStreams
from patrickstar._memory.cuda_device import AllocatorStats, CudaDevice, default_budget
from patrickstar._memory.disk_tier import DiskTier
from patrickstar._memory.host_arena import HostArena
from patrickstar._memory.memory_meter import Meter, default_meter, installed_bytes
from patrickstar._memory.swap_file import SwapFile
from patrickstar._memory.vm_pool import PagePool, can_move_pages
from patrickstar._memory.workspaces import library_bytes
from patrickstar.errors import DiskError


class Hardware:
    """The machine itself."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = CudaDevice(device) if device.type == "cuda" else None
        self.device = self.cuda.device if self.cuda is not None else device  # with its index
        self.host_device = torch.device("cpu")
        self.has_gpu = device.type != "cpu"
        """Whether copies between host and device, and updates on the host, run beside what the device computes."""

    def start(self) -> None:
        """Prepare the device for an engine that the calling thread makes, before anything is allocated on it."""
        self.enter_thread()
        if self.cuda is not None:
            self.cuda.use_expandable_segments()

    def enter_thread(self) -> None:
        """Make the device current in the calling thread; the first act of every thread that uses it."""
        if self.cuda is not None:
            self.cuda.enter_thread()

    def library_bytes(self, dtype: torch.dtype) -> int:
        """Return what the device's libraries keep of it once matrices of `dtype` were multiplied."""
        return library_bytes(self.cuda, dtype) if self.cuda is not None else 0

    def allocator_stats(self) -> AllocatorStats:
        """Return the figures of the device's allocator; zeros where it has none."""
        return self.cuda.allocator_stats() if self.cuda is not None else AllocatorStats()

    def allocator_report(self) -> str:
        """Return what the device's allocator holds, as a sentence for an error; empty where it has none."""
        return str(self.allocator_stats()) if self.cuda is not None else ""

    def seconds(self) -> float:
        """A clock."""
        return time.perf_counter()

    def meter(self) -> Meter:
        """What measures non-model data on the device."""
        return default_meter(self.device)

    def device_bytes(self, several: bool = False) -> int:
        """Return the device budget of an engine whose user names none.

        several: whether several processes train together, which takes memory of a GPU that no budget counts.
        """
        if self.cuda is not None:
            return default_budget(self.cuda.free_bytes(), several)
        return installed_bytes(self.device)

    def host_bytes(self) -> int:
        """What the host has to give."""
        return installed_bytes(self.host_device)

    def page_pool(self) -> PagePool | None:
        """Where pages of a device's memory wait, if that is how chunks get theirs."""
        return PagePool() if self.device.type == "cpu" and can_move_pages() else None

    def host_arena(self, nbytes: int) -> HostArena:
        """Memory of the host; page-locked where a GPU copies from it."""
        return HostArena(nbytes, self.cuda)

    def copies(self) -> CopyStreams:
        """What copies chunks between host and device."""
        return CopyStreams(self.device)

    def crossed(self, nbytes: int, *, to_device: bool) -> None:
        """Bytes that are no whole chunk cross between host and device; whoever says so copies them."""

    def release_cached_memory(self) -> None:
        """Return memory that the allocator caches to the device."""
        if self.cuda is not None:
            torch.cuda.empty_cache()

    def free_disk_bytes(self, directory: Path) -> int:
        """What a directory's disk has free. Raises DiskError if it can't be used."""
        try:
            space = os.statvfs(directory)
        except OSError as error:
            raise DiskError(
                f"the disk tier's directory {directory} can't be used: {error.strerror}; create it, or use another"
            ) from error
        return space.f_bavail * space.f_frsize

    def disk(
        self, directory: Path, nbytes: int, page_bytes: int, *, checksums: bool, capacity_bytes: int | None
    ) -> DiskTier:
        """A tier over a scratch file of so many bytes."""
        file = SwapFile(directory, nbytes, checksums=checksums, capacity_bytes=capacity_bytes)
        return DiskTier(file, page_bytes, begin=self.enter_thread)
