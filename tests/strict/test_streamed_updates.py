"""Updates on the host of parameters on the strict device, piece by piece."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import strict_device
import torch

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._step.streamed_update import BUFFERS, StreamedUpdate, StreamedUpdates
from patrickstar._tiers.host_arena import ALIGN_BYTES

DEVICE = torch.device("strict", 0)
PIECE_NUMEL = 64
NUMEL = 4 * BUFFERS * PIECE_NUMEL + 1

pytestmark = pytest.mark.parametrize("seed", range(10))


@pytest.fixture
def updates(seed) -> Iterator[StreamedUpdates]:
    strict_device.configure(seed=seed)
    manager = ChunkManager(DEVICE, ALIGN_BYTES, BUFFERS * ALIGN_BYTES, poison=True)
    accelerator = manager.hardware.accelerator
    assert accelerator is not None
    updates = StreamedUpdates(Kernels.best(DEVICE), accelerator, manager.host_tier, BUFFERS * PIECE_NUMEL * 2)
    yield updates
    updates.close()
    manager.close()


def new_span(grad_on_host: bool) -> Span:
    """Return a span whose parameter is on the device, and its master on the host."""
    generator = torch.Generator().manual_seed(0)
    master, gradient = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    param = master.bfloat16().to(DEVICE)
    latest = gradient if grad_on_host else gradient.bfloat16().to(DEVICE)
    optimizer = ps.AdamW(lr=0.1)
    states = tuple(torch.zeros(NUMEL) for _ in optimizer.states)
    rule = optimizer.rule(optimizer.defaults(), 1, {})
    return Span(param, Gradient(latest, None, torch.float32), master, states, rule)


def updated_param(span: Span) -> torch.Tensor:
    """Return the parameter after the update, computed on the host at once."""
    param, latest = span.param.cpu(), span.grad.latest.cpu()
    states = tuple(state.clone() for state in span.states)
    copy = replace(span, param=param, grad=replace(span.grad, latest=latest), master=span.master.clone(), states=states)
    Kernels.best(torch.device("cpu")).update([copy], ())
    return param


def started(updates: StreamedUpdates, span: Span) -> StreamedUpdate:
    return updates.submit([span], (), ())


@pytest.mark.parametrize("not_ready", [False, True])
@pytest.mark.parametrize("grad_on_host", [True, False])
def test_every_piece_arrives_after_earlier_uses(updates, grad_on_host, not_ready):
    """`not_ready`: a thread begins the update before it is ready, since another one has begun the update that was."""
    span = new_span(grad_on_host)
    before, expected = span.param.cpu(), updated_param(span)
    read = span.param.clone()
    if not_ready:
        update = StreamedUpdate(updates.accelerator, [span], (), updates.accelerator.record())
        updates._run(update)
        update._order()
    else:
        started(updates, span).wait()
    assert torch.equal(read.cpu(), before)
    assert torch.equal(span.param.cpu(), expected)


def test_work_after_a_cancelled_update_sees_what_it_has_done(updates):
    span = new_span(grad_on_host=True)
    expected = updated_param(span)
    update = started(updates, span)
    assert update.job is not None
    update.job.wait()
    update.cancel()
    assert torch.equal(span.param.clone().cpu(), expected)


class Refusing:
    """Kernels that fail at a piece."""

    def __init__(self, kernels: Kernels, piece: int) -> None:
        self._kernels, self._left = kernels, piece

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def start(self, spans, scales):
        self._left -= 1
        if self._left < 0:
            raise MemoryError("no memory for a piece")
        return self._kernels.start(spans, scales)


def test_buffers_come_back_after_an_error(updates, seed):
    kernels = updates.kernels
    for number in range(2 * BUFFERS):
        updates.kernels = Refusing(kernels, (seed + number) % BUFFERS)
        with pytest.raises(MemoryError):
            started(updates, new_span(grad_on_host=number % 2 == 0)).wait()
    updates.kernels = kernels
    span = new_span(grad_on_host=False)
    expected = updated_param(span)
    started(updates, span).wait()
    assert torch.equal(span.param.cpu(), expected)


def test_updates_share_the_buffers(updates):
    """Two worker threads have pieces of their updates at any time."""
    spans = [new_span(grad_on_host=number % 3 == 0) for number in range(6)]
    expected = updated_param(spans[0]), updated_param(spans[1])
    for update in [started(updates, span) for span in spans]:
        update.wait()
    for number, span in enumerate(spans):
        assert torch.equal(span.param.cpu(), expected[number % 3 != 0])
