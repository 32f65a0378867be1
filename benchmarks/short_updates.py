"""Compare short updates on the host, and updates beside a simulated accelerator, with the kernel on long spans.

python benchmarks/short_updates.py [--threads 2] [--rounds 5] [--variant avx2]
The first table updates the same tensors of 2^26 elements in calls of different lengths. The second updates parameters
on the strict device of the tests in timed mode, whose links copy as many elements per second as the kernel updates: a
step takes as long as its updates if copies in both directions, the kernel and the worker threads' own work overlap.
The simulated links are threads that copy memory, for which the kernel leaves a core. What they cost
the kernel nevertheless is measured, too: the kernel on long spans, while two threads copy as many bytes at that rate.
`--threads` are those of the kernel, `--variant` is its instruction set: avx512, avx2 or baseline.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from report import options, publish
from steps import alternating, ratio_of, seconds_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import strict_device

import patrickstar as ps
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Running, Span
from patrickstar._layout.byte_size import format_size
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._step.streamed_update import PIECE_NUMEL, StreamedUpdates, buffer_bytes

DEVICE = torch.device("strict", 0)
NUMEL = 1 << 26
LENGTHS = (26, 22, 20, 19, 18, 16)
CHUNKS = {24: 4, 22: 16}
"""Number of parameters by the logarithm of their elements."""
PARAM_BYTES = 2
UPDATE_BYTES = 28
"""Bytes that an update of an element reads and writes."""


class Work:
    """Parameters, gradients and states of an update."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.param = torch.randn(numel, generator=generator).bfloat16()
        self.lists = torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)
        optimizer = ps.AdamW(lr=1e-4)
        self.rule = optimizer.rule(optimizer.defaults(), 1, {})

    def spans(self, length: int, param: torch.Tensor | None = None) -> list[Span]:
        """Return spans of `length` elements; `param`: where the parameters are, if elsewhere."""
        return [
            Span(part, Gradient(part), lists[0], lists[1:], self.rule)
            for part, *parts in zip(
                (self.param if param is None else param).split(length),
                *(each.split(length) for each in self.lists),
                strict=True,
            )
            for lists in [tuple(parts)]
        ]


class SuppliedKernels(Kernels):
    """Kernels that note how long they have a piece."""

    def __init__(self, cpp: CppBackend) -> None:
        super().__init__(cpp)
        self.supplied_s = 0.0
        self._pieces, self._since_s = 0, 0.0

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Running]:
        running = super().start(spans, scales)
        if not self._pieces:
            self._since_s = time.perf_counter()
        self._pieces += 1
        return [Noted(each, self._ended) for each in running]

    def _ended(self) -> None:
        self._pieces -= 1
        if not self._pieces:
            self.supplied_s += time.perf_counter() - self._since_s


@dataclass
class Noted:
    """An update that calls `ended` at its end."""

    running: Running
    ended: Callable[[], None]

    def finish(self) -> None:
        self.running.finish()
        self.ended()


def update_each(kernels: Kernels, spans: list[Span]) -> None:
    for span in spans:
        kernels.update([span], ())


def short_spans(kernels: Kernels, work: Work, rounds: int) -> list[dict[str, str]]:
    """Return a row for each length of a call: its rate, and its ratio to the longest of the same round."""
    spans = {length: work.spans(1 << length) for length in LENGTHS}
    by_length = alternating({length: partial(update_each, kernels, each) for length, each in spans.items()}, rounds)
    return [
        {
            "elements per call": f"2^{length}",
            "10^9 elements/s": f"{NUMEL / median(values) / 1e9:.2f}",
            "GB/s": f"{UPDATE_BYTES * NUMEL / median(values) / 1e9:.1f}",
            "of the rate at 2^26": f"{ratio_of(by_length[LENGTHS[0]], values):.2f}",
        }
        for length, values in by_length.items()
    ]


def beside_copies(kernels: Kernels, spans: list[Span], rate: float) -> float:
    """Return the seconds of the kernel while two threads copy gradients to buffers and parameters back."""
    start = threading.Barrier(3)
    source = torch.cat([span.param for span in spans])
    target, buffer = torch.empty_like(source), torch.zeros(PIECE_NUMEL, dtype=source.dtype)

    def copy(up: bool) -> None:
        start.wait()
        end_s = time.perf_counter()
        for piece in (target if up else source).split(PIECE_NUMEL):
            part = buffer[: piece.numel()]
            piece.copy_(part) if up else part.copy_(piece)
            end_s += piece.nbytes / rate
            time.sleep(max(0.0, end_s - time.perf_counter()))

    threads = [threading.Thread(target=copy, args=(up,)) for up in (False, True)]
    for thread in threads:
        thread.start()
    start.wait()
    seconds = seconds_of(lambda: kernels.update(spans, ()))
    for thread in threads:
        thread.join()
    return seconds


def streamed(kernels: SuppliedKernels, work: Work, length: int, rounds: int) -> dict[str, str]:
    """Return a row: the rate of updates of parameters of 2^length elements beside the simulated accelerator."""
    count, numel = CHUNKS[length], CHUNKS[length] << length
    on_host = work.spans(1 << length)[:count]
    kernels.update(on_host, ())
    long_s = median(seconds_of(lambda: kernels.update(on_host, ())) for _ in range(3))
    rate = PARAM_BYTES * numel / long_s
    strict_device.configure(timed=strict_device.Rates(up=rate, down=rate))
    nbytes = buffer_bytes(1 << length, PARAM_BYTES, by_pages=True)
    manager = ChunkManager(DEVICE, 1 << 20, 2 * nbytes, poison=False)
    accelerator = manager.hardware.accelerator
    assert accelerator is not None
    updates = StreamedUpdates(kernels, accelerator, manager.host_tier, nbytes)
    spans = work.spans(1 << length, work.param.to(DEVICE))[:count]

    def step() -> None:
        for update in [updates.submit([span], (), ()) for span in spans]:
            update.finish()
        accelerator.synchronize()

    step()
    results = []
    for _ in range(rounds):
        alone_s, copying_s = seconds_of(lambda: kernels.update(on_host, ())), beside_copies(kernels, on_host, rate)
        kernels.supplied_s = 0.0
        streamed_s = seconds_of(step)
        results.append((alone_s, copying_s, streamed_s, kernels.supplied_s))
    updates.close()
    manager.close()
    strict_device.configure()
    alone, copying, whole, supplied = zip(*results, strict=True)
    return {
        "parameters": f"{count} x 2^{length}",
        "each link": f"{format_size(int(rate))}/s",
        "kernel, 10^9 elements/s": f"{numel / median(alone) / 1e9:.2f}",
        "kernel beside copies": f"{numel / median(copying) / 1e9:.2f}",
        "streamed": f"{numel / median(whole) / 1e9:.2f}",
        "streamed / kernel": f"{ratio_of(alone, whole):.2f}",
        "streamed / kernel beside copies": f"{ratio_of(copying, whole):.2f}",
        "time in which the kernel has a piece": f"{ratio_of(supplied, whole):.2f}",
    }


def main() -> None:
    given = options(__doc__, threads=2, rounds=5, variant=None)
    backend = CppBackend.find(given.variant, given.threads)
    assert backend is not None, "this installation has no C++ kernel; see `patrickstar doctor`"
    kernels, work = Kernels(backend), Work(NUMEL)
    threads = max(1, given.threads - 1)
    beside_links = SuppliedKernels(CppBackend.find(given.variant, threads))
    name = "" if given.variant is None else f"_{given.variant}"
    publish(
        f"short_updates{name}",
        "cpu",
        f"AdamW updates by {backend.name} on {given.threads} threads, bf16 parameters; medians of {given.rounds} "
        f"rounds, ratios within a round. Limits: 0.9 at 2^19 elements, 0.7 at 2^16.",
        short_spans(kernels, work, given.rounds),
    )
    publish(
        f"streamed_updates{name}",
        "cpu",
        f"Updates beside a simulated accelerator by {backend.name} on {threads} threads; medians of {given.rounds} "
        f"rounds, ratios within a round. Its links copy as fast as the kernel updates; they are two threads that copy "
        f"memory, for which the kernel leaves a core. Limit: 0.9 of the kernel's rate.",
        [streamed(beside_links, work, length, given.rounds) for length in CHUNKS],
    )


if __name__ == "__main__":
    main()
