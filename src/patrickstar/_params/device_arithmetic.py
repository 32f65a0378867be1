"""Arithmetic of an accelerator on lists whose memory is on the host.

[Note: lists on the host beside an accelerator]
Gradient accumulation adds gradients on the device to sums on the host, and restores the parameters below them from
masters on the host. Were the host to compute these, it would wait for the gradient of every parameter, and the device
for the host. So the device computes them: pages of the list are copied to it, and sums are copied back, in the order of
its other work and without a wait of the host. Additions and roundings have the same bits on every device.

This moves 4 bytes up and 4 down per element of a sum, and 4 up per element of a master; an addition on the host would
move 2 down and 2 up, but take about 16 bytes of the host's memory traffic and a thread beside them.
"""

from collections.abc import Iterator

import torch

from patrickstar._kernels.rounding import round_into

PAGE_NUMEL = 1 << 20
"""Elements that are on the device at a time."""


def _pages(numel: int) -> Iterator[slice]:
    for first in range(0, numel, PAGE_NUMEL):
        yield slice(first, min(first + PAGE_NUMEL, numel))


def add_gradient(total: torch.Tensor, grad: torch.Tensor, *, first: bool) -> None:
    """Add a gradient on the device to a sum on the host, or copy it there if it is the first.

    The host may read the sum once the current stream's work so far has ended.

    Args:
        total: 1-D sum, in the master dtype.
        grad: 1-D gradient of as many elements, in the compute dtype.
    """
    for page in _pages(total.numel()):
        if first:
            total[page].copy_(grad[page].to(total.dtype), non_blocking=True)
            continue
        earlier = total[page].to(grad.device, non_blocking=True)
        total[page].copy_(earlier.add_(grad[page]), non_blocking=True)


def round_to_device(payload: torch.Tensor, master: torch.Tensor) -> None:
    """Round a master on the host into a parameter on the device, with the same bits as an update.

    The master must not change before the current stream's work so far has ended.
    """
    for page in _pages(master.numel()):
        round_into(payload[page], master[page].to(payload.device, non_blocking=True))
