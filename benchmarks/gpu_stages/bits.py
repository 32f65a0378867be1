"""Bits that a CPU can't show: late copies, kernels chosen by alignment, Triton's arithmetic."""

import argparse
import os

import torch
from torch.nn import functional as F

from gpu_stages import tiny
from gpu_stages.record import Record
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.copy_streams import CopyStreams
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.worker_pool import Transfer

DELAY_CYCLES = 2_000_000
"""About a millisecond: many times what the tiny model computes between two copies."""

ALIGNMENTS = (64, 128, 256)
"""In bytes; compared with 512, which is what PyTorch's allocator gives."""


def run(record: Record, options: argparse.Namespace) -> None:
    """Compare all of them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device(options.device)
    late_copies(record, device)
    alignment(record, device, *((3, 16) if options.small else (50, 500)))
    updates(record, device, 100_000 if options.small else 100_000_000)


class DelayedCopies(CopyStreams):
    """Copies whose streams are kept busy before each of them, so that a missing wait is seen."""

    def up(self, chunk: Chunk) -> Transfer:
        self._delay(self.up_stream)
        return super().up(chunk)

    def down(self, chunk: Chunk) -> Transfer:
        self._delay(self.down_stream)
        return super().down(chunk)

    def _delay(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(DELAY_CYCLES)


class DelayedHardware(Hardware):
    """The machine itself, but for its copies."""

    def copies(self) -> CopyStreams:
        return DelayedCopies(self.device)


def late_copies(record: Record, device: torch.device) -> None:
    """Train the tiny model with each copy delayed."""
    try:
        tiny.compare(str(device), DelayedHardware(device))
        record.check("exact with every copy delayed by a millisecond", True)
    except AssertionError as error:
        record.check("exact with every copy delayed by a millisecond", False, str(error)[:300])


def alignment(record: Record, device: torch.device, shapes: int, largest: int) -> None:
    """Count the linear layers whose output has other bits where the weight is aligned to fewer bytes."""
    generator = torch.Generator().manual_seed(0)
    differ = dict.fromkeys(ALIGNMENTS, 0)
    for _ in range(shapes):
        rows, width, out = (8 * int(torch.randint(1, largest, (), generator=generator)) for _ in range(3))
        x = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
        weight = torch.randn(out, width, generator=generator).to(device, torch.bfloat16)
        bias = torch.randn(out, generator=generator).to(device, torch.bfloat16)
        expected = F.linear(x, _at(weight, 512), _at(bias, 512))
        for nbytes in ALIGNMENTS:
            differ[nbytes] += not torch.equal(expected, F.linear(x, _at(weight, nbytes), _at(bias, nbytes)))
    for nbytes, count in differ.items():
        record.figure(
            f"linear layers with other bits at {nbytes} bytes", count, f"of {shapes}", note="the engine aligns to 256"
        )
    record.check("no linear layer has other bits at 256 bytes", differ[256] == 0)


def _at(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a copy that begins at a multiple of `nbytes`, and of no larger power of two."""
    items = nbytes // tensor.element_size()
    memory = torch.empty(tensor.numel() + 2048, dtype=tensor.dtype, device=tensor.device)
    first = -(memory.data_ptr() // tensor.element_size()) % 1024 + items
    found = memory[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % (2 * nbytes) == nbytes, "misplaced"
    return found


def updates(record: Record, device: torch.device, numel: int) -> None:
    """Compare an update on the device with the same on the host, element by element."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator).bfloat16()
    lists = [torch.randn(numel, generator=generator) for _ in range(2)] + [torch.rand(numel, generator=generator)]
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
    results = []
    for place in (torch.device("cpu"), device):
        param = grad.to(place, copy=True)
        master, *states = (one.to(place, copy=True) for one in lists)
        kernels = Kernels.best(place)
        span = Span(param, Gradient(param), master, tuple(states), rule)
        kernels.update([span], (0.5,))
        results.append([kernels.for_update(span).name, *(one.cpu() for one in (param, master, *states))])
    (here, *expected), (there, *found) = results
    bad = sum(
        int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
        for one, other in zip(expected, found, strict=True)
    )
    record.check(f"an update of {numel:,} elements: {there} as {here}", bad == 0, f"{bad} bytes differ" if bad else "")
