"""Dispatch of copies and page I/O that run beside the training thread; their stall time and errors."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import Transfer
from patrickstar._schedule.step_timeline import Channel
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import StreamTransfer
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.timeline import Timeline
from patrickstar._tiers.transfer_counters import TransferCounters
from patrickstar.errors import DiskError, MoveError, TrainingError


class PeerTransfers(Protocol):
    """Transfers of sharded chunks between the processes of the group."""

    counters: TransferCounters

    @property
    def serving(self) -> bool:
        """True while this process serves requests of other ranks, and so must not wait for them."""

    def gather(self, chunk: Chunk) -> Transfer:
        """Start to all-gather a chunk into its device memory."""

    def request_reduction(self, chunk: Chunk) -> Transfer:
        """Request to reduce-scatter the gradients in a chunk."""


class IODispatch:
    """Starts transfers and waits for them. After an error of a disk or worker thread it starts no more."""

    def __init__(
        self, hardware: Hardware, disk: DiskTier | None, page: torch.Tensor, comm: PeerTransfers | None
    ) -> None:
        self.hardware = hardware
        self.disk = disk
        self.copies = hardware.copies()
        self.counters = TransferCounters() if comm is None else comm.counters
        self.failed: BaseException | None = None
        """First disk or worker error: chunk contents are unreliable from then on."""
        self.comm = comm
        """Transfers to other processes, if several share chunks."""
        self.salvaging = False
        """True while the engine closes and reads the data that is still readable."""
        self._page = page
        self.timeline: Timeline | None = None
        """Recorder of the step, if it is recorded."""

    def start_fetch(self, chunk: Chunk, urgent: bool) -> Transfer:
        """Start to fill a chunk's device memory from the host, the disk or the shards."""
        if chunk.sharded:
            assert self.comm is not None and chunk.shards_valid, f"{chunk} has no valid copy"
            self.check()
            with self.stalled(chunk):
                return self._requested(Channel.COLLECTIVES, chunk, chunk.nbytes, self.comm.gather(chunk), urgent)
        if chunk.host.valid:
            return self.up(chunk, urgent)
        assert chunk.disk.valid, f"{chunk} has no valid copy"
        chunk.disk.settle(wait=self.wait)
        return self.read(chunk, 0, chunk.device_bytes_view(), urgent)

    def request_reduction(self, chunk: Chunk) -> Transfer:
        assert self.comm is not None, f"{chunk} is not shared with other processes"
        self.check()
        with self.stalled(chunk):
            return self._requested(Channel.COLLECTIVES, chunk, chunk.nbytes, self.comm.request_reduction(chunk))

    def up(self, chunk: Chunk, urgent: bool = False, after: Transfer | None = None) -> Transfer:
        """Start to copy a chunk to the device; see `CopyStreams.up`."""
        return self._requested(Channel.TO_DEVICE, chunk, chunk.nbytes, self.copies.up(chunk, urgent, after), urgent)

    def down(self, chunk: Chunk) -> Transfer:
        """Start to copy a chunk to the host; see `CopyStreams.down`."""
        return self._requested(Channel.TO_HOST, chunk, chunk.nbytes, self.copies.down(chunk))

    def up_now(self, chunk: Chunk) -> None:
        """Copy a chunk to the device in the calling thread."""
        with self._busy(Channel.TO_DEVICE, chunk):
            self.copies.up_now(chunk)

    def down_now(self, chunk: Chunk) -> None:
        """Copy a chunk to the host in the calling thread."""
        with self._busy(Channel.TO_HOST, chunk):
            self.copies.down_now(chunk)

    def copy_part(self, target: torch.Tensor, source: torch.Tensor, label: str, *, to_device: bool) -> Transfer:
        """Start to copy what is no chunk between host and device; see `CopyStreams.part`."""
        nbytes = source.nbytes
        if to_device:
            self.counters.h2d_bytes += nbytes
        else:
            self.counters.d2h_bytes += nbytes
        channel = Channel.TO_DEVICE if to_device else Channel.TO_HOST
        if not self.hardware.has_gpu:
            with self.stalled(label):
                return self.copies.part(target, source, label, to_device=to_device)
        return self._requested(channel, label, nbytes, self.copies.part(target, source, label, to_device=to_device))

    def order(self, copy: Transfer) -> None:
        """Order later work of the device after a copy; without an accelerator's streams wait for it."""
        if isinstance(copy, StreamTransfer):
            with self.ordered(copy.label):
                copy.order()
        else:
            self.wait(copy)

    def _busy(self, channel: Channel, chunk: Chunk) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.busy(channel, repr(chunk), chunk.nbytes)

    def ordered(self, subject: object) -> AbstractContextManager[None]:
        """Return a context in which the device is ordered after a copy of a subject, and may have to wait for it."""
        return nullcontext() if self.timeline is None else self.timeline.device_wait(str(subject))

    def _requested(
        self, channel: Channel, subject: object, nbytes: int, transfer: Transfer, urgent: bool = False
    ) -> Transfer:
        if self.timeline is not None:
            self.timeline.requested(channel, str(subject), nbytes, transfer, urgent=urgent)
        return transfer

    def read(self, chunk: Chunk, start: int, target: torch.Tensor, urgent: bool = False) -> Transfer:
        """Start to read whole pages of a chunk, from byte offset `start`, into a flat tensor of bytes."""
        assert self.disk is not None, f"cannot read {chunk} from disk: there is no disk tier"
        self.check()
        nbytes = self.disk.written_bytes(chunk, start, target.numel())
        self.counters.disk_read_bytes += nbytes
        transfer = self.disk.read(chunk, start, target, urgent)
        return self._requested(Channel.DISK_READ, chunk, nbytes, transfer, urgent)

    def write(self, chunk: Chunk, start: int, source: torch.Tensor, *, spare: bool = False) -> Transfer:
        """Start to write a flat tensor of bytes over whole pages of a chunk, or its `spare` ones, from byte `start`."""
        assert self.disk is not None, f"cannot write {chunk} to disk: there is no disk tier"
        self.check()
        self.disk.reserve(chunk)
        nbytes = self.disk.planned_bytes(chunk, source.numel())
        self.counters.disk_write_bytes += nbytes + self.disk.pop_unplanned_bytes()
        transfer = self.disk.write(chunk, start, source, spare=spare)
        return self._requested(Channel.DISK_WRITE, chunk, nbytes, transfer)

    def pages_of(self, chunk: Chunk, first: int, numel: int, write: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over the disk pages of a chunk that hold these elements; `write`: write each back afterwards.

        Yields the index of the page's first element, and the page in memory that the next page reuses.
        """
        assert self.disk is not None and chunk.disk.valid, f"{chunk} has no valid copy on disk"
        itemsize = chunk.dtype.itemsize
        page_numel = self.disk.page_bytes_of(chunk) // itemsize
        for offset in range(first // page_numel * page_numel, first + numel, page_numel):
            page = self._page[: min(page_numel, chunk.numel - offset) * itemsize]
            self.wait(self.read(chunk, offset * itemsize, page, urgent=True))
            yield offset, page.view(chunk.dtype)
            if write:
                chunk.version += 1
                self.wait(self.write(chunk, offset * itemsize, page))

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer and raise its error; after a disk or worker error no transfer can start."""
        try:
            if transfer.done:
                transfer.wait()
                return
            transfer.prioritize()
            with profiler_range("wait", transfer.label), self.stalled(transfer.label):
                transfer.wait()
        except (DiskError, MoveError) as error:
            self.failed = error
            raise

    @contextmanager
    def stalled(self, subject: object) -> Iterator[None]:
        """Count the time spent in this context as stall time; `subject`: what is waited for."""
        start = self.hardware.seconds()
        yield
        end = self.hardware.seconds()
        self.counters.stall_s += end - start
        if self.timeline is not None:
            self.timeline.stalled(start, end, str(subject))

    def check(self) -> None:
        """Raise TrainingError if chunk data was lost earlier."""
        if self.failed is not None and not self.salvaging:
            raise TrainingError(
                f"this engine has stopped because chunk data was lost ({self.failed}). Close it, and resume from a "
                f"checkpoint with a new engine"
            ) from self.failed

    def close(self) -> None:
        """Stop all worker threads and free the swap file; transfers in flight complete or are cancelled."""
        self.copies.close()
        if self.disk is not None:
            self.disk.close()
