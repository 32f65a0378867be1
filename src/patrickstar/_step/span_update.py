"""Update of spans whose masters are on the host, with parameters on any device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from patrickstar._kernels.cpp_backend import Running
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span

PIECE_NUMEL = 1 << 22
"""Elements per D2H copy: four pages, enough for several threads; 8 MiB of 16-bit gradients."""


class SpanUpdate:
    """Runs updates on the host, and copies gradients and parameters of a device in pieces."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def run(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update spans whose masters are on the host and whose parameters are on any device."""
        together = [span for span in spans if span.param.device == span.master.device]
        self.kernels.update(together, scales)
        for span in spans:
            if span.param.device != span.master.device:
                self.in_pieces(span, scales)

    def in_pieces(self, span: Span, scales: Sequence[float]) -> None:
        """Update a device parameter on the host: copy gradients D2H and parameters H2D, a few pages at a time.

        Two buffers let the D2H copy of the next elements overlap with the update of the current ones.
        """
        device, page_locked = span.master.device, span.param.device.type == "cuda"
        length = span.numel if not span.rule.by_pages else min(span.numel, PIECE_NUMEL)
        buffers = [torch.empty(length, dtype=span.param.dtype, device=device, pin_memory=page_locked) for _ in range(2)]
        previous: tuple[list[Running], torch.Tensor, torch.Tensor] | None = None
        try:
            for number, first in enumerate(range(0, span.numel, max(1, length))):
                part = span.page(slice(first, first + length))
                buffer, grad = buffers[number % 2][: part.numel], part.grad
                if grad.latest.device != device:
                    grad = replace(grad, latest=buffer.copy_(grad.latest))
                running = self.kernels.start([replace(part, param=buffer, grad=grad)], scales)
                if previous is not None:
                    _copy_back(*previous)
                previous = running, buffer, part.param
        finally:
            if previous is not None:
                _copy_back(*previous)


def _copy_back(running: list[Running], buffer: torch.Tensor, param: torch.Tensor) -> None:
    """Wait for the update of a buffer, and copy it H2D into the parameter."""
    for update in running:
        update.finish()
    param.copy_(buffer)
