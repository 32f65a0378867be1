"""Updates on the host beside operators of the device: streamed, or by kernels that run beside them themselves."""

from collections.abc import Callable, Sequence

from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span
from patrickstar._step.streamed_update import StreamedUpdates
from patrickstar._step.update_queue import UpdateGroup
from patrickstar._tiers.chunk import Chunk


def copies_of(chunks: Sequence[Chunk]) -> list[Transfer]:
    """Return the copies that may still read or write the host copies of chunks."""
    return [copy for chunk in chunks for copy in (chunk.host.reader, chunk.host.writer) if copy is not None]


class HostUpdates:
    """Starts updates on the host beside operators of the device.

    Args:
        streamed: Worker thread and buffers; None if the kernels themselves run beside operators (simulated devices).
    """

    def __init__(self, kernels: Kernels, streamed: StreamedUpdates | None) -> None:
        self.streamed = streamed
        self._kernels = kernels

    @property
    def waits_for_copies(self) -> bool:
        """True if an update waits for the copies of its chunks itself."""
        return self.streamed is not None

    def start(
        self, spans: Sequence[Span], scales: Sequence[float], used: Sequence[Chunk], urgent: bool = False
    ) -> Transfer:
        """Start an update that uses these chunks; `urgent`: see `StreamedUpdates.submit`."""
        if self.streamed is not None:
            return self.streamed.submit(spans, scales, copies_of(used), urgent)
        running = UpdateGroup(self._kernels.start_after(copies_of(used), spans, scales))
        if urgent:
            running.prioritize()
        return running

    def start_when_ready(
        self, bind: Callable[[], Sequence[Span] | None], scales: Sequence[float], used: Sequence[Chunk]
    ) -> Transfer:
        """Start an update after all others, once its gradients are complete on the device; see `StreamedUpdates`."""
        if self.streamed is not None:
            return self.streamed.submit((), scales, copies_of(used), bind=bind)
        return UpdateGroup(self._kernels.start(bind() or (), scales))

    def close(self) -> None:
        """Finish all updates and end the thread."""
        if self.streamed is not None:
            self.streamed.close()
