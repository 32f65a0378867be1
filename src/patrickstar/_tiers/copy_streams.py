"""Copies between host and device that overlap with compute."""

import ctypes
from collections.abc import Callable

import torch

from patrickstar._hardware.accelerator import DeviceClock, TorchDevice
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import pages


class StreamTransfer(Transfer):
    """Copy on a stream of an accelerator.

    `order` makes the current stream wait for it; `wait` blocks the calling thread.
    """

    def __init__(
        self, accelerator: TorchDevice, event: torch.Event, label: str, began: torch.Event | None = None
    ) -> None:
        self.label = label
        self.accelerator = accelerator
        self.event = event
        self.began = began
        """Event before the copy, if it is timed."""

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def interval(self, clock: DeviceClock | None) -> tuple[float, float] | None:
        """Return begin and end of a timed copy that has ended."""
        if clock is None or self.began is None or not self.done:
            return None
        return clock.seconds(self.began), clock.seconds(self.event)

    def wait(self) -> None:
        self.accelerator.wait(self.event)

    def prioritize(self) -> None:
        """Do nothing: a stream runs in order."""

    def cancel(self) -> None:
        """Wait for the copy: a stream cannot cancel it."""
        self.accelerator.wait(self.event)

    def order(self) -> None:
        """Order later kernels of the current stream after the copy."""
        self.accelerator.order(self.event)


class CopyStreams:
    """Copy streams beside an accelerator, one worker thread on a CPU.

    An urgent copy to the device has a stream of its own: it does not wait for those that were started before it.
    `_now`: copy in the calling thread.
    """

    def __init__(self, accelerator: TorchDevice | None) -> None:
        self.accelerator = accelerator
        self.up_stream = None if accelerator is None else accelerator.new_stream()
        self.urgent_stream = None if accelerator is None else accelerator.new_stream()
        self.down_stream = None if accelerator is None else accelerator.new_stream()
        self.thread = WorkerPool(1, "copy")
        self.timed = False
        """True to record begin and end of each copy of the accelerator."""

    def up(self, chunk: Chunk, urgent: bool = False, after: Transfer | None = None) -> Transfer:
        """Start to copy a chunk to the device; beside an accelerator `after` a copy from there has ended."""
        assert chunk.host.memory is not None
        stream = self.urgent_stream if urgent else self.up_stream
        if self.accelerator is not None and stream is not None and isinstance(after, StreamTransfer):
            with self.accelerator.use(stream):
                after.order()
        return self._start(chunk.on_device(chunk.whole), chunk.host.memory, stream, repr(chunk))

    def down(self, chunk: Chunk) -> Transfer:
        assert chunk.host.memory is not None
        return self._start(chunk.host.memory, chunk.on_device(chunk.whole), self.down_stream, repr(chunk))

    def up_now(self, chunk: Chunk) -> None:
        chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))

    def down_now(self, chunk: Chunk) -> None:
        chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))

    def issued(self, label: str) -> Transfer | None:
        """Return a transfer that ends with the current stream's work so far; None on a CPU, where it has ended."""
        accelerator = self.accelerator
        return None if accelerator is None else StreamTransfer(accelerator, accelerator.record(), label)

    def part(self, target: torch.Tensor, source: torch.Tensor, label: str, *, to_device: bool) -> Transfer:
        """Start to copy what is no chunk, after the current stream's work so far; on a CPU in the calling thread."""
        if self.accelerator is not None:
            return self._start(target, source, self.up_stream if to_device else self.down_stream, label)
        target.copy_(source)
        return CompletedTransfer(label)

    def _start(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None, label: str) -> Transfer:
        if self.accelerator is not None and stream is not None:
            with self.accelerator.use(stream):
                began = self.accelerator.record(timed=True) if self.timed else None
                target.copy_(source, non_blocking=True)
                return StreamTransfer(self.accelerator, self.accelerator.record(timed=self.timed), label, began)
        target_address, source_address = target.data_ptr(), source.data_ptr()

        def job(start: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            def run(staging: torch.Tensor) -> None:
                ctypes.memmove(target_address + start, source_address + start, nbytes)

            return run

        return self.thread.submit([job(*page) for page in pages(source.nbytes)], label)

    def close(self) -> None:
        self.thread.close()
