"""Copies between host and device that run beside what computes."""

import ctypes
from collections.abc import Callable

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.disk_tier import pages
from patrickstar._memory.worker_pool import Transfer, WorkerPool


class StreamTransfer(Transfer):
    """A copy on a stream of the GPU. Who computes waits for it on the GPU, by `order`; `wait` has the caller wait."""

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
        """A stream keeps its order."""

    def cancel(self) -> None:
        """What a stream has begun it ends."""
        self.event.synchronize()

    def order(self) -> None:
        """What is launched on the current stream from now on comes after the copy."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CopyStreams:
    """Two streams beside a GPU's own, one each way; on a CPU a thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up_stream = self.down_stream = None
        if device.type == "cuda":
            self.up_stream, self.down_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.thread = WorkerPool(1, "copy")

    def up(self, chunk: Chunk) -> Transfer:
        """Begin to copy a chunk to device memory that it has taken."""
        assert chunk.host is not None
        return self._start(chunk.on_device(chunk.whole), chunk.host, self.up_stream, repr(chunk))

    def down(self, chunk: Chunk) -> Transfer:
        """Begin to copy a chunk to its place on the host."""
        assert chunk.host is not None
        return self._start(chunk.host, chunk.on_device(chunk.whole), self.down_stream, repr(chunk))

    def up_now(self, chunk: Chunk) -> None:
        """Copy a chunk to device memory that it has taken, by whoever calls."""
        chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))

    def down_now(self, chunk: Chunk) -> None:
        """The same to its place on the host."""
        chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))

    def _start(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None, what: str
    ) -> Transfer:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                return StreamTransfer(stream.record_event(), self.device, what)
        to, come = target.data_ptr(), source.data_ptr()

        def job(start: int, nbytes: int) -> Callable[[torch.Tensor], None]:
            def run(stage: torch.Tensor) -> None:
                ctypes.memmove(to + start, come + start, nbytes)

            return run

        return self.thread.submit([job(*page) for page in pages(source.nbytes)], what)

    def close(self) -> None:
        """Stop the thread."""
        self.thread.close()
