"""Simulated hardware for dry runs: meta memory, and transfers timed by the rates of a machine spec."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._dry_run.lanes import Interval, Lane, Wait, clip
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.copy_streams import CopyStreams
from patrickstar._memory.disk_tier import DiskTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import ArenaBlock, HostArena
from patrickstar._memory.memory_meter import Meter
from patrickstar._memory.swap_file import SwapFile
from patrickstar._memory.transfer import Transfer
from patrickstar._memory.vm_pool import PagePool
from patrickstar._memory.worker_pool import WorkerPool
from patrickstar._perf_model.machine_spec import Machine
from patrickstar.errors import DiskError

META = torch.device("meta")


class SimulatedClock:
    """Clock of a dry run, in seconds since its start. It records who waits, in the same time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[Wait] = []
        """Waits since the step's start."""
        self.phase: Callable[[], str] = str
        """Returns the part of the step that runs; nothing before the first step."""

    def record_wait(self, start_s: float, channel: str, label: str) -> None:
        """Record a wait from `start_s` until now, if it took time."""
        if start_s < self.now:
            self.waits.append(Wait(start_s, self.now - start_s, channel, label, self.phase()))


class SimulatedTransfer(Transfer):
    """Transfer on a simulated channel; waiting for it advances the clock.

    Args:
        after: Transfer that this one follows page by page: it neither begins nor ends before that.
    """

    def __init__(
        self, channel: "SimulatedChannel", nbytes: int, label: str, after: "SimulatedTransfer | None" = None
    ) -> None:
        self.channel = channel
        self.nbytes = nbytes
        self.label = label
        self.after = after
        self.requested_at = channel.clock.now
        self.ends_at: float | None = None

    def __repr__(self) -> str:
        return f"SimulatedTransfer({self.label!r}, {self.nbytes} bytes on {self.channel.name})"

    @property
    def done(self) -> bool:
        self.channel.catch_up()
        return self.ends_at is not None and self.ends_at <= self.channel.clock.now

    @property
    def may_begin(self) -> bool:
        """True unless it would have to wait for pages of the transfer that it follows."""
        if self.after is None:
            return True
        self.after.channel.catch_up()
        ends_at = self.after.ends_at
        return ends_at is not None and ends_at - self.nbytes / self.channel.rate <= self.channel.clock.now

    def wait(self) -> None:
        if self.after is not None:
            self.after.wait()
        start_s = self.channel.clock.now
        while not self.done:
            self.channel.clock.now = self.channel.free_at
        self.channel.clock.record_wait(start_s, self.channel.name, self.label)

    def prioritize(self) -> None:
        self.channel.catch_up()
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
            self.channel.waiting.appendleft(self)

    def cancel(self) -> None:
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
        self.ends_at = self.channel.clock.now


class SimulatedUpdate:
    """Update on the host whose copies in both directions overlap with the kernel, page by page."""

    def __init__(self, *transfers: SimulatedTransfer) -> None:
        self.transfers = transfers

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self.transfers)

    def prioritize(self) -> None:
        for transfer in self.transfers:
            transfer.prioritize()

    def withdraw(self) -> bool:
        if any(transfer not in transfer.channel.waiting for transfer in self.transfers if transfer.nbytes):
            return False
        self.cancel()
        return True

    def cancel(self) -> None:
        for transfer in self.transfers:
            transfer.cancel()

    def finish(self) -> None:
        for transfer in self.transfers:
            transfer.wait()


class SimulatedChannel:
    """Channel that runs one transfer at a time, in request order, urgent transfers first."""

    def __init__(self, name: str, rate: float, clock: SimulatedClock) -> None:
        self.name = name
        self.rate = rate
        """Bytes per second."""
        self.clock = clock
        self.waiting: deque[SimulatedTransfer] = deque()
        self.free_at = 0.0
        """End time of the last transfer that has begun."""
        self.busy_s = 0.0
        self.nbytes = 0
        self.begun: list[Interval] = []
        """Transfers that have begun, except those that ended before the step."""

    def begin(
        self, nbytes: int, label: str, urgent: bool = False, after: SimulatedTransfer | None = None
    ) -> SimulatedTransfer:
        self.catch_up()
        transfer = SimulatedTransfer(self, nbytes, label, after)
        if urgent:
            self.waiting.appendleft(transfer)
        else:
            self.waiting.append(transfer)
        self.catch_up()
        return transfer

    def run(self, nbytes: int, label: str) -> None:
        """Run an urgent transfer of `nbytes` and wait for it."""
        self.begin(nbytes, label, urgent=True).wait()

    def catch_up(self) -> None:
        """Start the queued transfers whose turn has come by the current time."""
        while self.free_at <= self.clock.now:
            transfer = next((waiting for waiting in self.waiting if waiting.may_begin), None)
            if transfer is None:
                return
            self.waiting.remove(transfer)
            seconds = transfer.nbytes / self.rate
            begins_at, ends_at = self._times(transfer, self.free_at)
            transfer.ends_at = self.free_at = ends_at
            self.begun.append(Interval(begins_at, self.free_at, transfer.label))
            self.busy_s += seconds
            self.nbytes += transfer.nbytes

    def _times(self, transfer: SimulatedTransfer, free_at: float) -> tuple[float, float]:
        """Return begin and end of a transfer on the channel that is free from `free_at` on."""
        seconds = transfer.nbytes / self.rate
        begins_at = max(free_at, transfer.requested_at)
        if transfer.after is not None and transfer.after.ends_at is not None:
            begins_at = max(begins_at, transfer.after.ends_at - seconds)
        return begins_at, begins_at + seconds

    def start_step(self) -> None:
        """Forget the transfers that have ended."""
        self.begun = [interval for interval in self.begun if interval.end_s > self.clock.now]

    def lane(self, start_s: float) -> Lane:
        """Return the transfers from `start_s` until now, relative to `start_s`."""
        begun, free_at = list(self.begun), self.free_at
        # Queued transfers begin when somebody asks next, at times that may have passed. `catch_up` would change what
        # can still be cancelled.
        for transfer in self.waiting:
            if not transfer.may_begin:
                continue
            begins_at, free_at = self._times(transfer, free_at)
            begun.append(Interval(begins_at, free_at, transfer.label))
        return Lane(self.name, clip(begun, start_s, self.clock.now))


class SimulatedArena(HostArena):
    """Arena blocks of meta memory."""

    def _reserve(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def _move(self, block: ArenaBlock, start: int) -> None:
        """Do nothing: meta memory has no content."""

    def _discard(self, start: int, nbytes: int) -> None:
        """Do nothing: there are no pages to free."""


class SimulatedCopyStreams(CopyStreams):
    """Copies between host and device on two simulated channels."""

    def __init__(self, up: SimulatedChannel, down: SimulatedChannel) -> None:
        super().__init__(None)
        self._up, self._down = up, down

    def up(self, chunk: Chunk, urgent: bool = False, after: Transfer | None = None) -> Transfer:
        assert after is None or isinstance(after, SimulatedTransfer), "copies of this hardware are simulated"
        return self._up.begin(chunk.nbytes, repr(chunk), urgent, after)

    def down(self, chunk: Chunk) -> Transfer:
        return self._down.begin(chunk.nbytes, repr(chunk))

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
    """Disk tier whose reads and writes run on two simulated channels."""

    def __init__(
        self, file: SimulatedSwapFile, page_bytes: int, read: SimulatedChannel, write: SimulatedChannel
    ) -> None:
        super().__init__(file, page_bytes)
        self._read, self._write = read, write

    def _submit(
        self,
        pool: WorkerPool,
        move: Callable[[torch.Tensor, str, int, torch.Tensor, torch.Event | None], None],
        chunk: Chunk,
        start: int,
        memory: torch.Tensor,
        urgent: bool,
        spare: bool = False,
    ) -> Transfer:
        if pool is self.readers:
            nbytes = self.written_bytes(chunk, start, memory.numel())
            self.file.read_bytes += nbytes
            return self._read.begin(nbytes, repr(chunk), urgent)
        self.file.written_bytes += memory.numel()
        return self._write.begin(memory.numel(), repr(chunk))


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
        self.read = SimulatedChannel("disk read", machine.disk.read if machine.disk is not None else 1.0, self.clock)
        self.write = SimulatedChannel("disk write", machine.disk.write if machine.disk is not None else 1.0, self.clock)
        self.update = SimulatedChannel(
            "update on the host", machine.host.update_bandwidth(1, machine.host.cores), self.clock
        )
        self.computed_s = 0.0
        """Compute seconds of the device since the step's start."""
        self.computed: list[Interval] = []
        """Computation since the step's start, labelled with its phase."""
        self._meter = meter
        self._host_storages: set[int] = set()

    def compute(self, seconds: float) -> None:
        """Advance the clock by `seconds` of device computation."""
        start_s, phase = self.clock.now, self.clock.phase()
        self.computed_s += seconds
        self.clock.now += seconds
        # One interval for all operators between two waits.
        if self.computed and self.computed[-1].end_s == start_s and self.computed[-1].label == phase:
            start_s = self.computed.pop().start_s
        self.computed.append(Interval(start_s, self.clock.now, phase))

    def start_step(self) -> None:
        """Forget what computation and channels have done so far."""
        self.computed_s = 0.0
        self.computed.clear()
        self.clock.waits.clear()
        for channel in self.channels:
            channel.start_step()

    def lanes(self, start_s: float) -> tuple[Lane, ...]:
        """Return what computation and each channel have done from `start_s`, the step's start, until now."""
        computed = Lane("compute", clip(self.computed, start_s, self.clock.now))
        channels = self.update, self.up, self.down, self.read, self.write
        return computed, *(channel.lane(start_s) for channel in channels)

    @property
    def channels(self) -> tuple[SimulatedChannel, ...]:
        return self.up, self.down, self.read, self.write, self.update

    def library_resident_bytes(self, chunk_bytes: int) -> int:
        return 0

    def seconds(self) -> float:
        return self.clock.now

    def meter(self) -> Meter:
        return self._meter

    def device_bytes(self, several: bool = False) -> int:
        return self.machine.device_memory

    def library_bytes(self, dtype: torch.dtype) -> int:
        return self._library_bytes

    def host_bytes(self) -> int:
        return self.machine.host.memory

    def warn_beyond_ram(self, nbytes: int, ram: int, budgets: str) -> None:
        """Do nothing: no memory is taken."""

    def page_pool(self) -> PagePool | None:
        return None

    def host_arena(self, nbytes: int) -> HostArena:
        with _disable_current_modes():
            arena = SimulatedArena(nbytes)
        if isinstance(self._meter, TensorMeter):
            self._meter.track(arena.memory, 0)  # memory of the host
        self._host_storages.add(arena.memory.untyped_storage()._cdata)
        return arena

    def on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_storages

    def copies(self) -> CopyStreams:
        return SimulatedCopyStreams(self.up, self.down)

    def on_partial_copy(self, nbytes: int, *, to_device: bool) -> None:
        if self.has_gpu:
            (self.up if to_device else self.down).run(nbytes, "part of a chunk")

    def free_disk_bytes(self, directory: Path) -> int:
        return self.machine.disk.capacity if self.machine.disk is not None else 0

    def disk(
        self, directory: Path, nbytes: int, page_bytes: int, *, checksums: bool, capacity_bytes: int | None
    ) -> DiskTier:
        file = SimulatedSwapFile(directory, nbytes, self.free_disk_bytes(directory), capacity_bytes)
        return SimulatedDiskTier(file, page_bytes, self.read, self.write)
