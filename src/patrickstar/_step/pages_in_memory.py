"""Lock-free updates of pages whose states are in memory."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._step.gradient_buffer import BufferedPage, GradientBuffer


class PagesInMemory:
    """Updates pages with the gradients in the buffer, on the tier of their states."""

    def __init__(self, data: LocalShards, kernels: Kernels, buffer: GradientBuffer) -> None:
        self.data = data
        self.buffer = buffer
        self._kernels = kernels

    @defer_sigint
    def update(self, index: int, pages: Sequence[BufferedPage]) -> None:
        """Update pages of a chunk, and wait."""
        for span in self.spans(index, pages):
            self._run(span)
        self.mark_written(index)
        for page in pages:
            self.buffer.note_update(index, page.first)

    def _run(self, span: Span) -> None:
        """Run one update on the tier of its states."""
        if span.master.device == span.param.device:
            self._kernels.update([span], ())
            return
        grad = replace(span.grad, latest=span.grad.latest.to(span.master.device))
        param = torch.empty_like(span.param, device=span.master.device)
        self._kernels.update([replace(span, grad=grad, param=param)], ())
        span.param.copy_(param)
        self.data.manager.count_transfer(span.grad.latest.nbytes, to_device=True)
        self.data.manager.count_transfer(param.nbytes, to_device=False)

    def spans(self, index: int, pages: Sequence[BufferedPage]) -> list[Span]:
        """Return what the update of pages reads and writes."""
        chunks = self.data.state_chunks(index)
        spans = []
        for page in pages:
            states = {chunk.kind: chunk.flat(page.first, page.numel) for chunk in chunks}
            spans += self.buffer.spans(page, {}, states)
        return spans

    def mark_written(self, index: int) -> None:
        """Mark what an update of a chunk's pages writes."""
        for chunk in (*self.data.state_chunks(index), self.buffer.chunks(index)[0]):
            self.data.manager.mark_written(chunk, on_device=chunk.device.valid)
