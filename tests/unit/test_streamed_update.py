"""Test the update on the host of a device parameter: gradients are copied down, parameters up, in pieces."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar._step.streamed_update import BUFFERS, IN_KERNEL, StreamedUpdates, buffer_bytes
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.host_tier import HostTier
from patrickstar.testing import assert_same_bits

RULE = AdamRule(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=True, step=2)
PIECE_NUMEL = 1 << 14
"""Elements of a piece in place of 2^24, whose updates take seconds."""


def span(numel, earlier=False):
    generator = torch.Generator().manual_seed(numel)
    param = torch.randn(numel, generator=generator).bfloat16()
    lists = [torch.rand(numel, generator=generator) for _ in range(3)]
    summed = torch.randn(numel, generator=generator) if earlier else None
    return Span(param, Gradient(param, summed), lists[0], tuple(lists[1:]), RULE)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device than it does."""

    device = torch.device("meta")
    __torch_function__ = torch._C._disabled_torch_function_impl


def on_device(one):
    """Return a span whose parameter seems to lie on a device."""
    above = one.param.as_subclass(Elsewhere)
    return replace(one, param=above, grad=Gradient(above, one.grad.accumulated))


def immediate_accelerator() -> Mock:
    """Return an accelerator whose copies are done at once."""
    event = SimpleNamespace(query=lambda: True)
    methods = ["new_stream", "enter_worker", "record", "use", "order", "wait"]
    return Mock(methods, record=lambda: event, use=lambda stream, **_: nullcontext())


@pytest.fixture
def host_tier():
    return HostTier(1 << 20, 1 << 20, HostArena, poison=True)


@pytest.mark.parametrize("native", [True, False], ids=["C++", "PyTorch's operators"])
@pytest.mark.parametrize("earlier", [False, True], ids=["one backward", "several"])
@pytest.mark.parametrize("numel", [0, 5, PIECE_NUMEL + 3, 2 * PIECE_NUMEL + 1])
def test_an_update_in_pieces_has_the_bits_of_an_update_in_place(monkeypatch, host_tier, numel, earlier, native):
    monkeypatch.setattr("patrickstar._step.streamed_update.PIECE_NUMEL", PIECE_NUMEL)
    kernels = Kernels(CppBackend.find() if native else None)
    expected, found = span(numel, earlier), span(numel, earlier)
    kernels.update([expected], (0.5,))
    nbytes = buffer_bytes(numel, found.param.itemsize, by_pages=True)
    streamed = StreamedUpdates(kernels, immediate_accelerator(), host_tier, nbytes)
    streamed.submit([on_device(found)], (0.5,), []).wait()
    streamed.close()
    expected, found = ([one.param, one.master, *one.states] for one in (expected, found))
    assert_same_bits(expected, found, "parameter, master and states")


def test_neighbours_in_a_chunk_are_one_piece(monkeypatch, host_tier):
    """And what lies between two parameters is left alone, if it belongs to a third."""
    monkeypatch.setattr("patrickstar._step.streamed_update.PIECE_NUMEL", PIECE_NUMEL)
    kernels = NotedKernels()
    kernels.gate.set()
    parts = [slice(0, 100), slice(128, 384), slice(512, 520)]  # between the last two is one without a gradient
    expected, found = span(5 * ALIGN_NUMEL), span(5 * ALIGN_NUMEL)
    kernels.update([expected.page(part) for part in parts], ())
    streamed = StreamedUpdates(kernels, immediate_accelerator(), host_tier, BUFFERS * 2 * PIECE_NUMEL)
    streamed.submit([on_device(found.page(part)) for part in parts], (), []).wait()
    streamed.close()
    assert kernels.notes.count("start") == 2
    for part in (*parts, slice(384, 512)):
        one, other = expected.page(part), found.page(part)
        assert_same_bits([one.param, one.master, *one.states], [other.param, other.master, *other.states], str(part))


class NotedKernels(Kernels):
    """Kernels that note the begin and end of each update."""

    def __init__(self) -> None:
        super().__init__(CppBackend.find())
        self.notes: list[str] = []
        self.gate = threading.Event()

    def start(self, spans, scales):
        self.notes.append("start")
        running = super().start(spans, scales)
        return [SimpleNamespace(wait=partial(self._finish, running), cancel=lambda: None)]

    def _finish(self, running):
        assert self.gate.wait(20)
        for each in running:
            each.wait()
        self.notes.append("finish")


class NotedCopies(StreamedUpdates):
    """Updates that note the begin of each copy to the host."""

    def _download(self, number, span):
        self.kernels.notes.append("copy")
        return super()._download(number, span)


def test_the_kernel_has_its_next_piece_before_it_ends_one(monkeypatch, host_tier):
    """And the first pieces of the next update are copied while it updates the last ones."""
    monkeypatch.setattr("patrickstar._step.streamed_update.PIECE_NUMEL", 64)
    kernels, pieces = NotedKernels(), 9
    nbytes = buffer_bytes(64 * pieces, 2, by_pages=True)
    streamed = NotedCopies(kernels, immediate_accelerator(), host_tier, nbytes)
    updates = [streamed.submit([on_device(span(64 * pieces))], (), []) for _ in range(2)]
    until = time.monotonic() + 20
    while (begun := list(kernels.notes)).count("copy") < BUFFERS or begun.count("start") < IN_KERNEL:
        assert time.monotonic() < until, begun
        time.sleep(0.001)
    kernels.gate.set()
    for update in updates:
        update.wait()
    streamed.close()
    assert "finish" not in begun
    for number, note in enumerate(kernels.notes):
        if note == "finish":
            before = kernels.notes[:number]
            left = (pieces - before.count("finish") - 1) % pieces
            assert before.count("start") - before.count("finish") == min(IN_KERNEL, left + 1), (number, kernels.notes)
    assert kernels.notes.count("finish") == 2 * pieces


class Late:
    """Event of a device, or copy, that ends once a thread waits for it, or has asked for it a thousand times."""

    def __init__(self) -> None:
        self.asked, self.waited = 0, False

    def query(self) -> bool:
        self.asked += 1
        return self.waited or self.asked > 1000

    done = property(query)

    def wait(self) -> None:
        self.waited = True


def test_a_worker_thread_sleeps_until_what_it_needs_has_arrived(host_tier):
    """One that asked again and again would take a core, and the interpreter, from operators."""
    events, copy = [], Late()

    def record() -> Late:
        events.append(Late())
        return events[-1]

    accelerator = immediate_accelerator()
    accelerator.record, accelerator.wait = record, Late.wait
    streamed = StreamedUpdates(Kernels(CppBackend.find()), accelerator, host_tier, BUFFERS * 2 * PIECE_NUMEL)
    streamed.submit([on_device(span(PIECE_NUMEL)) for _ in range(3)], (), [copy]).wait()
    streamed.close()
    gradients, *pieces = events
    assert gradients.waited and copy.waited and len(pieces) == 2 * 3
    assert max(each.asked for each in (copy, *events)) < 100


def test_a_buffer_comes_back_after_an_error_once_its_kernel_has_ended(host_tier):
    kernels, free = Kernels(CppBackend.find()), []
    streamed = StreamedUpdates(kernels, immediate_accelerator(), host_tier, BUFFERS * 2 * PIECE_NUMEL)
    running = Mock(["cancel"], cancel=lambda: free.append(len(streamed._free)))
    kernels.start = Mock(side_effect=[[running], MemoryError("no memory for a piece")])
    with pytest.raises(MemoryError):
        streamed.submit([on_device(span(PIECE_NUMEL)) for _ in range(IN_KERNEL)], (), []).wait()
    streamed.close()
    assert free == [BUFFERS - IN_KERNEL] and len(streamed._free) == BUFFERS
