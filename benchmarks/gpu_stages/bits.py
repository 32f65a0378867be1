"""Bit-exactness that only a GPU can test: kernels chosen by alignment, Triton arithmetic; copies that are late."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from gpu_stages.record import Record
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import CopyStreams
from patrickstar._tiers.hardware import Hardware

DELAY_CYCLES = 2_000_000
"""About a millisecond: many times the compute time of the tiny model between two copies."""

ALIGNMENTS = (64, 128, 256)
"""Alignments in bytes, compared with the 512 of PyTorch's allocator."""


def run(record: Record, options: SimpleNamespace) -> None:
    """Run all comparisons."""
    torch.use_deterministic_algorithms(True)
    device = torch.device(options.device)
    alignment(record, device, *((3, 16) if options.small else (50, 500)))
    updates(record, device, 100_000 if options.small else 100_000_000)


class DelayedCopies(CopyStreams):
    """Copy streams that are kept busy before each copy, which exposes missing synchronization."""

    def up(self, chunk: Chunk, urgent: bool = False, after: Transfer | None = None) -> Transfer:
        self._delay(self.urgent_stream if urgent else self.up_stream)
        return super().up(chunk, urgent, after)

    def down(self, chunk: Chunk) -> Transfer:
        self._delay(self.down_stream)
        return super().down(chunk)

    def _delay(self, stream: torch.Stream | None) -> None:
        if self.accelerator is None or stream is None:
            return
        if self.accelerator.device.type != "cuda":
            time.sleep(1e-3)  # a simulated device is late in any case
            return
        with self.accelerator.use(stream, after_current=False):
            torch.cuda._sleep(DELAY_CYCLES)


class DelayedHardware(Hardware):
    """Hardware of this machine with delayed copies."""

    def copies(self) -> CopyStreams:
        return DelayedCopies(self.accelerator)


def alignment(record: Record, device: torch.device, shapes: int, largest: int) -> None:
    """Count the linear layers whose output changes with a smaller alignment of the weight."""
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
            f"linear layers that differ at {nbytes} bytes", count, f"of {shapes}", note="the engine aligns to 256"
        )
    record.check("no linear layer differs at 256 bytes", differ[256] == 0)


def _at(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a copy that begins at a multiple of `nbytes`, and of no larger power of two."""
    items = nbytes // tensor.element_size()
    memory = torch.empty(tensor.numel() + 2048, dtype=tensor.dtype, device=tensor.device)
    first = -(memory.data_ptr() // tensor.element_size()) % 1024 + items
    aligned = memory[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)
    assert aligned.data_ptr() % (2 * nbytes) == nbytes, "wrong alignment"
    return aligned


def updated(device: torch.device, numel: int, update: Callable[[list[Span], tuple[float]], None]) -> list[torch.Tensor]:
    """Return the parameter, master and states of an update on a device."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(numel, generator=generator).bfloat16().to(device)
    values = [torch.randn(numel, generator=generator) for _ in range(2)] + [torch.rand(numel, generator=generator)]
    master, *states = (each.to(device) for each in values)
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
    update([Span(param, Gradient(param), master, tuple(states), rule)], (0.5,))
    return [each.cpu() for each in (param, master, *states)]


def updates(record: Record, device: torch.device, numel: int) -> None:
    """Compare an update on the device with the same update on the host, element by element."""
    names, results = [], []
    for target in (torch.device("cpu"), device):
        kernels = Kernels.best(target)

        def update(spans: list[Span], scales: tuple[float], kernels: Kernels = kernels) -> None:
            names.append(kernels.for_update(spans[0]).name)
            kernels.update(spans, scales)

        results.append(updated(target, numel, update))
    bad = sum(
        int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in zip(*results, strict=True)
    )
    label = f"update of {numel:,} elements: {names[1]} equals {names[0]}"
    record.check(label, bad == 0, f"{bad} bytes differ" if bad else "")
