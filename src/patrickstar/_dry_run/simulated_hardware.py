"""Simulated hardware for dry runs: meta memory, and transfers timed by the rates of a machine spec."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._dry_run.lanes import Interval, Lane, clip
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulated_channels import (
    HOST,
    HostMemory,
    SimulatedChannel,
    SimulatedClock,
    SimulatedTransfer,
)
from patrickstar._dry_run.simulated_pages import SimulatedPagePool
from patrickstar._hardware.memory_meter import Meter
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import PagePool, can_move_pages
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._layout.packed_page import CODEC_RATE
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import CopyStreams
from patrickstar._tiers.disk_tier import READERS, WRITERS, DiskTier
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ArenaBlock, HostArena
from patrickstar._tiers.page_codec import PageCodec
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import DiskError

META = torch.device("meta")


class SimulatedArena(HostArena):
    """Arena blocks of meta memory."""

    def _reserve(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def _move(self, block: ArenaBlock, start: int) -> None:
        """Do nothing: meta memory has no content."""

    def _discard(self, start: int, nbytes: int) -> None:
        """Do nothing: there are no pages to free."""


class SimulatedCopyStreams(CopyStreams):
    """Copies between host and device on two simulated channels.

    `has_gpu`: parts of chunks are copied there, too.
    """

    def __init__(self, up: SimulatedChannel, down: SimulatedChannel, has_gpu: bool) -> None:
        super().__init__(None)
        self._up, self._down, self._has_gpu = up, down, has_gpu

    def up(self, chunk: Chunk, urgent: bool = False, after: Transfer | None = None) -> Transfer:
        assert after is None or isinstance(after, SimulatedTransfer), "copies of this hardware are simulated"
        return self._up.begin(chunk.nbytes, repr(chunk), urgent, after)

    def down(self, chunk: Chunk) -> Transfer:
        return self._down.begin(chunk.nbytes, repr(chunk))

    def part(self, target: torch.Tensor, source: torch.Tensor, label: str, *, to_device: bool) -> Transfer:
        if not self._has_gpu:
            return super().part(target, source, label, to_device=to_device)
        return (self._up if to_device else self._down).begin(source.nbytes, label)

    def up_now(self, chunk: Chunk) -> None:
        self._up.run(chunk.nbytes, repr(chunk))

    def down_now(self, chunk: Chunk) -> None:
        self._down.run(chunk.nbytes, repr(chunk))


class SimulatedSwapFile(SwapFile):
    """Swap file that only does the accounting."""

    def __init__(self, directory: Path, nbytes: int, free_bytes: int, capacity_bytes: int | None) -> None:
        self.free_bytes = free_bytes
        super().__init__(directory, nbytes, checksums=False, capacity_bytes=capacity_bytes)

    def _make(self) -> tuple[int, Path]:
        return os.open(os.devnull, os.O_RDWR), Path(self.directory)

    def _try_direct(self) -> bool:
        return True

    def _grow(self, nbytes: int, what: str) -> None:
        if nbytes > self.free_bytes:
            raise DiskError(f"{what} needs a swap file of {nbytes} bytes, but the disk has {self.free_bytes} free")
        self.nbytes = max(self.nbytes, nbytes)


class SimulatedDiskTier(DiskTier):
    """Disk tier whose reads and writes run on two simulated channels.

    Packed pages take at least the time in which their threads pack them. On a CPU the cores compute less meanwhile.
    """

    def __init__(self, file: SwapFile, page_bytes: int, hardware: "SimulatedHardware", codec: PageCodec | None) -> None:
        super().__init__(file, page_bytes, codec=codec)
        self._hardware = hardware

    def _submit(
        self,
        pool: WorkerPool,
        move: Callable[[torch.Tensor, Chunk, int, torch.Tensor, torch.Event | None], None],
        chunk: Chunk,
        start: int,
        memory: torch.Tensor,
        urgent: bool,
        spare: bool = False,
    ) -> Transfer:
        hardware, reads = self._hardware, pool is self.readers
        channel, threads = (hardware.read, READERS) if reads else (hardware.write, WRITERS)
        nbytes = (
            self.written_bytes(chunk, start, memory.numel()) if reads else self.planned_bytes(chunk, memory.numel())
        )
        seconds = nbytes / channel.rate
        if nbytes and self._codec_of(chunk) is not None:
            cores = hardware.machine.host.cores
            seconds = max(seconds, memory.numel() / (CODEC_RATE * min(threads, cores)))
            if not hardware.has_gpu:
                hardware.compute(memory.numel() / (CODEC_RATE * cores))
        if reads:
            self.file.read_bytes += nbytes
        else:
            self.file.written_bytes += nbytes
        return channel.begin(nbytes, repr(chunk), urgent, seconds=seconds)


class SimulatedHardware(Hardware):
    """Hardware of a described `Machine`; `meter` counts the bytes of its device tensors."""

    def __init__(self, machine: Machine, meter: Meter, library_bytes: int = 0) -> None:
        super().__init__(META)
        self.machine = machine
        self._library_bytes = library_bytes
        self.host_device = META
        self.has_gpu = machine.gpu is not None
        self.clock = SimulatedClock()
        h2d_rate, d2h_rate = machine.transfer_rates(1)
        self.up = SimulatedChannel("host to device", h2d_rate, self.clock)
        self.down = SimulatedChannel("device to host", d2h_rate, self.clock)
        read_rate, write_rate = (1.0, 1.0) if machine.disk is None else (machine.disk.read, machine.disk.write)
        self.read = SimulatedChannel("disk read", read_rate, self.clock, blocks_host=True)
        self.write = SimulatedChannel("disk write", write_rate, self.clock, blocks_host=True)
        update_rate = machine.host.update_bandwidth(1, machine.host.cores)
        self.update = SimulatedChannel("update on the host", update_rate, self.clock, blocks_host=True)
        if self.has_gpu:
            together = self.up, self.down, self.update
            HostMemory(machine.host.shared_bandwidth(1), together, drives=(self.read, self.write))
        self.collectives = SimulatedChannel("collectives", 1.0, self.clock)
        """Collectives with other processes, one after the other; each says what time it takes."""
        self.computed_s = 0.0
        """Compute seconds of the device since the step's start."""
        self.computed: list[Interval] = []
        """Computation since the step's start, labelled with its phase."""
        self.launched_s = 0.0
        """Seconds of the host beside a GPU since the step's start: Python and launches."""
        self.launched: list[Interval] = []
        """These seconds, labelled with their phase."""
        self.page_lock_s = 0.0
        """Seconds of page-locking host memory so far, in which a process does nothing else."""
        self._meter = meter
        self._host_storages: set[int] = set()

    def compute(self, seconds: float) -> None:
        """Advance the clock by `seconds` of device computation, once the host has launched it."""
        self.clock.wait_for_host()
        start_s = self.clock.now
        self.computed_s += seconds
        self.clock.now += seconds
        _append(self.computed, Interval(start_s, self.clock.now, self.clock.phase()))

    def launch(self, seconds: float) -> None:
        """Advance the host by `seconds` of Python and launches. See [Note: two clocks]."""
        if not self.has_gpu:
            self.compute(seconds)
            return
        start_s = self.clock.host
        self.launched_s += seconds
        self.clock.host += seconds
        _append(self.launched, Interval(start_s, self.clock.host, self.clock.phase()))

    def start_step(self) -> None:
        """Forget what computation and channels have done so far; the host waits for the device, as for its loss."""
        self.clock.wait_for_device()
        self.computed_s = self.launched_s = 0.0
        self.computed.clear()
        self.launched.clear()
        self.clock.waits.clear()
        for channel in self.channels:
            channel.start_step()

    def lanes(self, start_s: float) -> tuple[Lane, ...]:
        """Return what computation and each channel have done from `start_s`, the step's start, until now."""
        computed = Lane("compute", clip(self.computed, start_s, self.clock.now))
        launched = Lane(HOST, clip(self.launched, start_s, self.clock.now))
        channels = self.update, self.up, self.down, self.read, self.write, self.collectives
        return computed, launched, *(channel.lane(start_s) for channel in channels)

    @property
    def channels(self) -> tuple[SimulatedChannel, ...]:
        return self.up, self.down, self.read, self.write, self.update, self.collectives

    @property
    def left_s(self) -> float:
        """Seconds until the last channel has done what it was asked for."""
        return max(channel.left_s for channel in self.channels)

    def library_resident_bytes(self, chunk_bytes: int) -> int:
        return 0

    def seconds(self) -> float:
        return self.clock.now

    def meter(self) -> Meter:
        return self._meter

    def device_bytes(self, several: bool = False) -> int:
        return self.machine.device_memory

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        return self._library_bytes

    def host_bytes(self, given_bytes: int = 0) -> int:
        return max(0, self.machine.host.memory - given_bytes)

    def warn_beyond_ram(self, nbytes: int, budgets: str) -> None:
        """Do nothing: no memory is taken."""

    def page_pool(self) -> PagePool | None:
        return SimulatedPagePool() if not self.has_gpu and can_move_pages() else None

    def host_arena(self, nbytes: int) -> HostArena:
        if self.has_gpu and self.machine.host.page_lock is not None:
            self.page_lock_s += nbytes / self.machine.host.page_lock
        with _disable_current_modes():
            arena = SimulatedArena(nbytes)
        if isinstance(self._meter, TensorMeter):
            self._meter.track(arena.memory, 0)  # memory of the host
        self._host_storages.add(arena.memory.untyped_storage()._cdata)
        return arena

    def on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_storages

    def copies(self) -> CopyStreams:
        return SimulatedCopyStreams(self.up, self.down, self.has_gpu)

    def on_partial_copy(self, nbytes: int, *, to_device: bool) -> None:
        if self.has_gpu:
            (self.up if to_device else self.down).run(nbytes, "part of a chunk")

    def free_disk_bytes(self, directory: Path) -> int:
        return self.machine.disk.capacity if self.machine.disk is not None else 0

    def swap_file(
        self, directory: Path, nbytes: int, checksums: bool, capacity_bytes: int | None, durable: bool = False
    ) -> SwapFile:
        return SimulatedSwapFile(directory, nbytes, self.free_disk_bytes(directory), capacity_bytes)

    def disk(self, file: SwapFile, page_bytes: int, codec: PageCodec | None = None) -> DiskTier:
        return SimulatedDiskTier(file, page_bytes, self, codec)


def _append(intervals: list[Interval], interval: Interval) -> None:
    """Append an interval, in one with the last if they adjoin: one for all operators between two waits."""
    if intervals and intervals[-1].end_s == interval.start_s and intervals[-1].label == interval.label:
        interval = replace(interval, start_s=intervals.pop().start_s)
    intervals.append(interval)
