"""Simulated accelerator on CPU tensors that delays copies by a seeded schedule.

[Note: late copies]
A GPU runs copies on separate streams, some time after the host has issued them. On a CPU the same code would copy at
once, and a missing wait would not be detected. `LateHardware` makes CPU memory behave like GPU memory. Copies are
queued per stream, in order. A copy runs when the host waits for it, when computation is ordered after it, or when a
query of its state finds, by the seeded schedule, that it is done.

- Until a copy has run, its target holds NaN. Code that reads the target too early computes NaN.
- A copy reads its source when it runs. Code that overwrites or frees the source too early changes bits, or accesses
  protected pages.
- Computation is eager here, so a copy runs at once when computation is ordered after it. On a GPU the copy may still
  read its source then. So the source is compared again when the host learns that the copy is done: it must not have
  changed.

Updates on the host, which run on threads while the device computes, are late as well (`LateKernels`): they run when
they are waited for.

The device's arithmetic on lists on the host (`patrickstar._params.device_arithmetic`) is eager as well. It sees what
the device has written to the host in earlier copies, for which the host need not have waited.

The simulation does not detect errors of computation that is late itself, of threads, or of device types.
"""

import ctypes
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch

from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import PagePool, VMRange
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span
from patrickstar._params import device_arithmetic, local_shards
from patrickstar._tiers.chunk import Chunk, fill_poison
from patrickstar._tiers.copy_streams import CopyStreams, StreamTransfer
from patrickstar._tiers.hardware import Hardware

CPU = torch.device("cpu")


class LateTransfer(StreamTransfer):
    """Copy between host and device memory of a chunk, queued on a simulated stream."""

    def __init__(self, stream: "LateStream", chunk: Chunk, target: torch.Tensor, source: torch.Tensor) -> None:
        self.device = CPU
        self.stream = stream
        self.label = repr(chunk)
        self.number = stream.hardware.queued
        self.chunk = chunk
        self.target_address, self.source_address = target.data_ptr(), source.data_ptr()
        self.nbytes = source.nbytes
        self.ran = False
        self.ordered = False
        """True if computation is ordered after the copy."""
        self.known_done = False
        """True if the host knows that the copy is done."""
        self.read: bytes | None = None
        """Bytes of the source when the copy ran, while the source must not change."""
        self.to_host = chunk.host.present and target.data_ptr() == chunk.host.memory.data_ptr()
        self.hidden: bytes | None = None
        """Bytes that were copied to the host, which has not waited for them."""
        self.before = {transfer for transfer in stream.hardware.pending if transfer.ordered}
        """Copies of any stream that the device's work, and so this copy, is ordered after."""
        stream.hardware.allow_overwrite(target)
        stream.hardware.pending.add(self)
        fill_poison(target)

    def __repr__(self) -> str:
        return f"LateTransfer({self.chunk!r}, {'done' if self.known_done else 'ran' if self.ran else 'queued'})"

    @property
    def done(self) -> bool:
        self.stream.advance_at_random()
        # The host need not know that a copy has run that computation was ordered after.
        if self.ran and not self.known_done and self.stream.schedule.random() < 0.5:
            self._notice()
        return self.known_done

    def wait(self) -> None:
        self.stream.hardware.host_waits += not self.known_done
        self.stream.advance_to(self)
        self._notice()

    def cancel(self) -> None:
        self.wait()

    def order(self) -> None:
        self.stream.advance_to(self)
        for transfer in self.stream.hardware.pending:
            if transfer.stream is self.stream and transfer.number <= self.number:
                transfer.ordered = True
                if transfer.to_host:
                    transfer.check()  # the device may write its source from now on, in the order of its work

    def run(self) -> None:
        """Copy the current bytes. The host sees bytes that the device has written once it has waited for them."""
        self.ran = True
        assert self.chunk.device.present, f"{self.chunk}: its device memory was freed while a copy was queued"
        self.stream.hardware.arrive(self.source_address, self.nbytes)
        self.read = ctypes.string_at(self.source_address, self.nbytes)
        if self.to_host:
            self.hidden = self.read
        else:
            ctypes.memmove(self.target_address, self.read, self.nbytes)

    def arrive(self) -> None:
        """Let the host see what was copied."""
        if self.hidden is not None:
            ctypes.memmove(self.target_address, self.hidden, self.nbytes)
            self.hidden = None

    def check(self) -> None:
        """Assert that the source has not changed since the copy ran, and allow it to change from now on."""
        assert self.read is None or ctypes.string_at(self.source_address, self.nbytes) == self.read, (
            f"{self.chunk}: the source of a copy was overwritten before the host had waited for the copy"
        )
        self.read = None

    def _notice(self) -> None:
        """Let the host know that this copy, all earlier copies of its stream, and those before them are done."""
        pending = self.stream.hardware.pending
        known = {t for t in pending if t.stream is self.stream and t.number <= self.number}
        known |= pending & set().union(*(t.before for t in known))
        for transfer in sorted(known, key=lambda t: t.number):  # several may have written the same memory
            transfer.check()
            transfer.arrive()
            transfer.known_done, transfer.before = True, set()
            pending.discard(transfer)


class LateStream:
    """Queue of copies, which run in order."""

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
    """Copy streams of `LateHardware`: one simulated stream per direction, and one for urgent copies."""

    def __init__(self, hardware: "LateHardware") -> None:
        super().__init__(None)
        self._up, self._urgent, self._down = (LateStream(hardware) for _ in range(3))

    def up(self, chunk: Chunk, urgent: bool = False, after: LateTransfer | None = None) -> LateTransfer:
        if after is not None:
            after.order()
        assert chunk.host.memory is not None
        stream = self._urgent if urgent else self._up
        return stream.submit(chunk, chunk.on_device(chunk.whole), chunk.host.memory)

    def down(self, chunk: Chunk) -> LateTransfer:
        assert chunk.host.memory is not None
        return self._down.submit(chunk, chunk.host.memory, chunk.on_device(chunk.whole))

    def down_now(self, chunk: Chunk) -> None:
        assert chunk.host.memory is not None
        self._down.hardware.allow_overwrite(chunk.host.memory)
        super().down_now(chunk)


class LateUpdate(Transfer):
    """Update on the host that runs when it is waited for."""

    label = "a late update"

    def __init__(self, run: Callable[[], None], begun: bool) -> None:
        self._run: Callable[[], None] | None = run
        self._begun = begun
        """True if it can no longer be withdrawn."""

    @property
    def done(self) -> bool:
        return self._run is None

    def prioritize(self) -> None:
        """Do nothing: it runs when it is waited for."""

    def withdraw(self) -> bool:
        if self._run is None or self._begun:
            return False
        self._run = None
        return True

    def cancel(self) -> None:
        self._run = None

    def wait(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run()


class LateKernels(Kernels):
    """CPU kernels whose updates run as late as possible."""

    started = 0

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[LateUpdate]:
        self.started += 1
        run = partial(Kernels.update, Kernels(self.cpp), spans, scales)
        return [LateUpdate(run, begun=self.started % 2 == 0)] if spans else []


class FragmentedPool(PagePool):
    """Page pool whose commits fail at random, several times in a row."""

    def __init__(self, hardware: "LateHardware") -> None:
        super().__init__()
        self.hardware = hardware
        self._failures_left = 0

    def commit(self, target: VMRange) -> None:
        hardware = self.hardware
        if self._failures_left == 0 and hardware.schedule.random() < hardware.failures:
            self._failures_left = hardware.failures_in_a_row
        elif self._failures_left > 0:
            self._failures_left -= 1
        if self._failures_left > 0:
            raise torch.OutOfMemoryError(f"no {target.nbytes} contiguous bytes")
        super().commit(target)


class LateHardware(Hardware):
    """CPU hardware that behaves like a machine with a GPU. See [Note: late copies].

    Args:
        seed: Seed of the schedule by which copies run.
        failures: Probability that a request for device memory fails.
        failures_in_a_row: Number of consecutive failures.
    """

    def __init__(self, seed: int, failures: float = 0.0, failures_in_a_row: int = 1) -> None:
        super().__init__(CPU)
        self.has_gpu = True
        _simulated.add(self)
        self.schedule = random.Random(seed)
        self.failures = failures
        self.failures_in_a_row = failures_in_a_row
        self.host_waits = 0
        """Number of waits of the training thread for a copy."""
        self.queued = 0
        self.pending: set[LateTransfer] = set()
        """Copies that are not done as far as the host knows."""

    def allow_overwrite(self, target: torch.Tensor) -> None:
        """Allow `target` to change: the device writes it after the copies that computation is ordered after."""
        start, end = target.data_ptr(), target.data_ptr() + target.nbytes
        for transfer in self.pending:
            if transfer.ordered and transfer.source_address < end and start < transfer.source_address + transfer.nbytes:
                transfer.check()

    def arrive(self, address: int, nbytes: int) -> None:
        """Let a copy of the device see what earlier copies have written to host memory."""
        for transfer in sorted(self.pending, key=lambda transfer: transfer.number):
            overlaps = (
                transfer.target_address < address + nbytes and address < transfer.target_address + transfer.nbytes
            )
            # A closed engine's copies remain here, while its memory may belong to another.
            if transfer.ordered and overlaps and transfer.chunk.host.present:
                transfer.arrive()

    def check_pending(self) -> None:
        """Assert that the sources of copies that were never waited for have not changed."""
        for transfer in self.pending:
            transfer.check()

    def copies(self) -> CopyStreams:
        return LateCopies(self)

    def page_pool(self) -> PagePool | None:
        return FragmentedPool(self)


_simulated: weakref.WeakSet[LateHardware] = weakref.WeakSet()


def _after_copies(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of two tensors that sees what earlier copies of the device have written to the host."""

    @wraps(function)
    def wrapper(target: torch.Tensor, source: torch.Tensor, **options: Any) -> None:
        for hardware in _simulated:
            for tensor in (target, source):
                hardware.arrive(tensor.data_ptr(), tensor.nbytes)
        function(target, source, **options)

    return wrapper


local_shards.add_gradient = _after_copies(device_arithmetic.add_gradient)  # type: ignore[attr-defined]
local_shards.round_to_device = _after_copies(device_arithmetic.round_to_device)  # type: ignore[attr-defined]
