"""A simulated accelerator on CPU tensors: its copies happen as late as a seeded schedule allows.

[Note: late copies]
A GPU runs copies on streams of their own, some time after the host has asked for them. On a CPU the same code would
copy at once, and a missing wait would go unnoticed. `LateHardware` makes CPU memory behave as a GPU's does: what is
asked for is queued, in order per stream, and a copy runs only when somebody waits for it, when computation is ordered
after it, or when a query of its state finds, by the seeded schedule, that it has ended.

- Until a copy has run, its target holds NaN. Who reads too early computes NaN.
- A copy reads its source when it runs. Who overwrites or frees the source too early changes bits, or touches pages
  that are protected.
- Computation here is eager, so a copy that computation is ordered after runs at once. On a GPU it may still read its
  source then. So the source is compared again when the host learns that the copy has ended: it must not have changed.

Updates on the host, which run on threads beside the device, are late too (`LateKernels`): they run when they are waited
for.

What this does not find: errors of computation that is late itself, of threads, of device types.
"""

import ctypes
import random
from collections.abc import Callable, Sequence

import torch

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span
from patrickstar._memory.chunk import Chunk, fill_poison
from patrickstar._memory.copy_streams import CopyStreams, StreamTransfer
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.vm_pool import PagePool, VMRange

CPU = torch.device("cpu")


class LateTransfer(StreamTransfer):
    """A copy between a chunk's host memory and its device memory that has been queued on a simulated stream."""

    def __init__(self, stream: "LateStream", chunk: Chunk, target: torch.Tensor, source: torch.Tensor) -> None:
        self.device = CPU
        self.stream = stream
        self.label = repr(chunk)
        self.number = stream.hardware.queued
        self.chunk = chunk
        self.to, self.come, self.nbytes = target.data_ptr(), source.data_ptr(), source.nbytes
        self.ran = False
        self.ordered = False
        """Whether computation waits for it."""
        self.seen = False
        """Whether the host knows that the copy has ended."""
        self.read: bytes | None = None
        """What the source held when the copy ran, as long as it must not change."""
        stream.hardware.overwritten_in_order(target)
        stream.hardware.pending_functions.add(self)
        fill_poison(target)

    def __repr__(self) -> str:
        return f"LateTransfer({self.chunk!r}, {'done' if self.seen else 'ran' if self.ran else 'queued'})"

    @property
    def done(self) -> bool:
        self.stream.advance_at_random()
        # A stream that computation has waited for need not have told the host yet.
        if self.ran and not self.seen and self.stream.schedule.random() < 0.5:
            self._notice()
        return self.seen

    def wait(self) -> None:
        self.stream.hardware.host_waits += not self.seen
        self.stream.advance_to(self)
        self._notice()

    def cancel(self) -> None:
        self.wait()

    def order(self) -> None:
        self.stream.advance_to(self)
        for transfer in self.stream.hardware.pending_functions:
            if transfer.stream is self.stream and transfer.number <= self.number:
                transfer.ordered = True

    def run(self) -> None:
        """Copy the bytes as they are now."""
        self.ran = True
        assert self.chunk.device_resident, f"{self.chunk}: its device memory was freed while a copy was queued"
        self.read = ctypes.string_at(self.come, self.nbytes)
        ctypes.memmove(self.to, self.read, self.nbytes)

    def check(self) -> None:
        """Assert that nobody has overwritten the source since the copy ran. Nothing is asserted of what follows."""
        assert self.read is None or ctypes.string_at(self.come, self.nbytes) == self.read, (
            f"{self.chunk}: the source of a copy was overwritten before the host had waited for the copy's end"
        )
        self.read = None

    def _notice(self) -> None:
        """The host knows of the end of this copy, and so of those before it on its stream."""
        pending_functions = self.stream.hardware.pending_functions
        for transfer in [one for one in pending_functions if one.stream is self.stream and one.number <= self.number]:
            transfer.check()
            transfer.seen = True
            pending_functions.discard(transfer)


class LateStream:
    """Copies in the order in which they were queued."""

    def __init__(self, hardware: "LateHardware") -> None:
        self.hardware = hardware
        self.schedule = hardware.schedule
        self.queue: list[LateTransfer] = []

    def submit(self, chunk: Chunk, target: torch.Tensor, source: torch.Tensor) -> LateTransfer:
        """Queue a copy."""
        transfer = LateTransfer(self, chunk, target, source)
        self.queue.append(transfer)
        self.hardware.queued += 1
        return transfer

    def advance_to(self, last: LateTransfer) -> None:
        """Run all copies up to this one."""
        while not last.ran:
            self.queue.pop(0).run()

    def advance_at_random(self) -> None:
        """Run none, some or all of the queued copies."""
        for _ in range(self.schedule.choice([0, 0, 1, len(self.queue)])):
            if self.queue:
                self.queue.pop(0).run()


class LateCopies(CopyStreams):
    """Copies on two simulated streams."""

    def __init__(self, hardware: "LateHardware") -> None:
        super().__init__(CPU)
        self._up, self._down = LateStream(hardware), LateStream(hardware)

    def up(self, chunk: Chunk) -> LateTransfer:
        assert chunk.host is not None
        return self._up.submit(chunk, chunk.on_device(chunk.whole), chunk.host)

    def down(self, chunk: Chunk) -> LateTransfer:
        assert chunk.host is not None
        return self._down.submit(chunk, chunk.host, chunk.on_device(chunk.whole))

    def down_now(self, chunk: Chunk) -> None:
        assert chunk.host is not None
        self._down.hardware.overwritten_in_order(chunk.host)
        super().down_now(chunk)


class LateUpdate:
    """An update on the host that runs when it is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def finish(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run()


class LateKernels(Kernels):
    """The kernels of a CPU, started as late as possible."""

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[LateUpdate]:
        return [LateUpdate(lambda: Kernels.update(Kernels(self.cpp), spans, scales))] if spans else []


class FragmentedBank(PagePool):
    """Pages of a device whose allocator now and then finds no block that is long enough, so many times in a row."""

    def __init__(self, hardware: "LateHardware") -> None:
        super().__init__()
        self.hardware = hardware
        self._in_a_row = 0

    def commit(self, target: VMRange) -> None:
        hardware = self.hardware
        if self._in_a_row == 0 and hardware.schedule.random() < hardware.failures:
            self._in_a_row = hardware.failures_in_a_row
        elif self._in_a_row > 0:
            self._in_a_row -= 1
        if self._in_a_row > 0:
            raise torch.OutOfMemoryError(f"no {target.nbytes} bytes in a row")
        super().commit(target)


class LateHardware(Hardware):
    """A CPU that behaves as a machine with a GPU. See [Note: late copies].

    Args:
        seed: decides when copies run.
        failures: the probability that a request for device memory finds none.
        failures_in_a_row: how often it then finds none.
    """

    def __init__(self, seed: int, failures: float = 0.0, failures_in_a_row: int = 1) -> None:
        super().__init__(CPU)
        self.has_gpu = True
        self.schedule = random.Random(seed)
        self.failures = failures
        self.failures_in_a_row = failures_in_a_row
        self.host_waits = 0
        """How often the training thread waited for a copy."""
        self.queued = 0
        self.pending_functions: set[LateTransfer] = set()
        """Copies that the host does not know to have ended."""

    def overwritten_in_order(self, target: torch.Tensor) -> None:
        """Allow `target` to change: the device writes it, after the copies that computation was ordered after."""
        start, end = target.data_ptr(), target.data_ptr() + target.nbytes
        for transfer in self.pending_functions:
            if transfer.ordered and transfer.come < end and start < transfer.come + transfer.nbytes:
                transfer.check()

    def check_rest(self) -> None:
        """Assert of the copies that nobody has waited for, too, that their source has not changed."""
        for transfer in self.pending_functions:
            transfer.check()

    def copies(self) -> CopyStreams:
        return LateCopies(self)

    def page_pool(self) -> PagePool | None:
        return FragmentedBank(self)
