"""Test the update on the host of a device parameter: gradients are copied down, parameters up, in pieces."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._memory.host_arena import HostArena
from patrickstar._memory.host_tier import HostTier
from patrickstar._step.streamed_update import PIECE_NUMEL, StreamedUpdates, buffer_bytes
from patrickstar.testing import assert_same_bits

RULE = AdamRule(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=True, step=2)


def span(numel, earlier):
    generator = torch.Generator().manual_seed(numel)
    param = torch.randn(numel, generator=generator).bfloat16()
    lists = [torch.rand(numel, generator=generator) for _ in range(3)]
    summed = torch.randn(numel, generator=generator) if earlier else None
    return Span(param, Gradient(param, summed), lists[0], tuple(lists[1:]), RULE)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device than it does."""

    device = torch.device("meta")
    __torch_function__ = torch._C._disabled_torch_function_impl


class ImmediateAccelerator:
    """Accelerator whose copies are done at once."""

    def new_stream(self) -> None:
        """Return no stream."""

    def enter_worker(self) -> None:
        """Do nothing."""

    def record(self) -> SimpleNamespace:
        """Return an event that has passed."""
        return SimpleNamespace(query=lambda: True)

    @contextmanager
    def use(self, stream: None, *, after_current: bool = True):
        yield

    def order(self, event: SimpleNamespace) -> None:
        """Do nothing."""

    wait = order


@pytest.mark.parametrize("native", [True, False], ids=["C++", "PyTorch's operators"])
@pytest.mark.parametrize("earlier", [False, True], ids=["one backward", "several"])
@pytest.mark.parametrize("numel", [0, 5, PIECE_NUMEL + 3, 2 * PIECE_NUMEL + 1])
def test_an_update_in_pieces_has_the_bits_of_an_update_in_place(numel, earlier, native):
    if numel > PIECE_NUMEL and not native:
        numel = PIECE_NUMEL + 3
    kernels = Kernels(CppBackend.find() if native else None)
    expected, found = span(numel, earlier), span(numel, earlier)
    kernels.update([expected], (0.5,))
    above = found.param.as_subclass(Elsewhere)
    in_pieces = Span(above, Gradient(above, found.grad.accumulated), found.master, found.states, RULE)
    nbytes = buffer_bytes(numel, above.itemsize, by_pages=True)
    streamed = StreamedUpdates(
        kernels, ImmediateAccelerator(), HostTier(1 << 26, 1 << 26, HostArena, poison=True), nbytes
    )
    streamed.submit([in_pieces], (0.5,), []).finish()
    streamed.close()
    for what in ("param", "master"):
        assert_same_bits([getattr(expected, what)], [getattr(found, what)], what)
    assert_same_bits(list(expected.states), list(found.states), "states")
