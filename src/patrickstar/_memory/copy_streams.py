"""Copies between host and device that overlap with compute."""

import ctypes
from collections.abc import Callable

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.disk_tier import pages
from patrickstar._memory.transfer import Transfer
from patrickstar._memory.worker_pool import WorkerPool


class StreamTransfer(Transfer):
    """Copy on a GPU stream. `order` makes the current stream wait for it; `wait` blocks the calling thread."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, what: str) -> None:
        self.label = what
        self.event = event
        self.device = device

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def prioritize(self) -> None:
        """Do nothing: a stream runs in order."""

    def cancel(self) -> None:
        """Wait for the copy: a stream cannot cancel it."""
        self.event.synchronize()

    def order(self) -> None:
        """Order later kernels of the current stream after the copy."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CopyStreams:
    """One copy stream for each direction on a GPU, one worker thread on a CPU. `_now`: copy in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up_stream = self.down_stream = None
        if device.type == "cuda":
            self.up_stream, self.down_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.thread = WorkerPool(1, "copy")

    def up(self, chunk: Chunk) -> Transfer:
        assert chunk.host is not None
        return self._start(chunk.on_device(chunk.whole), chunk.host, self.up_stream, repr(chunk))

    def down(self, chunk: Chunk) -> Transfer:
        assert chunk.host is not None
        return self._start(chunk.host, chunk.on_device(chunk.whole), self.down_stream, repr(chunk))

    def up_now(self, chunk: Chunk) -> None:
        chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))

    def down_now(self, chunk: Chunk) -> None:
        chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))

    def _start(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None, what: str
    ) -> Transfer:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                return StreamTransfer(stream.record_event(), self.device, what)
        target_address, source_address = target.data_ptr(), source.data_ptr()

        def job(start: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            def run(staging: torch.Tensor) -> None:
                ctypes.memmove(target_address + start, source_address + start, nbytes)

            return run

        return self.thread.submit([job(*page) for page in pages(source.nbytes)], what)

    def close(self) -> None:
        self.thread.close()
