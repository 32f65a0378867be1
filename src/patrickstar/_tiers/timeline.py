"""Recorder of the timeline of a step, to which the training thread and worker threads add."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._hardware.transfer import Transfer
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel, ChunkAccess, ChunkMemory, Product, Stall, StepTimeline, Work
from patrickstar._tiers.chunk import Chunk


@dataclass(frozen=True)
class _Pending:
    channel: Channel
    label: str
    nbytes: int
    asked_s: float
    urgent: bool
    transfer: Transfer


class Timeline:
    """Recorder of one step. Worker threads and the training thread add to it.

    Args:
        seconds: Clock of the hardware.
        clock: Clock of the accelerator, if there is one.
        chunks: All chunks, whose memory is noted.
    """

    def __init__(self, seconds: Callable[[], float], clock: DeviceClock | None, chunks: Iterable[Chunk]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._pending: list[_Pending] = []
        self._device_waits: list[tuple[str, torch.Event, torch.Event]] = []
        self._products: dict[tuple[str, bool], Product] = {}
        self._last_product_s = 0.0
        self._finished = False
        self._held: set[int] = set()
        """Chunks of parameters that hold gradients."""
        now = seconds()
        self._result = StepTimeline(start_s=now, initial=[each for chunk in chunks for each in _memory_of(chunk, now)])

    # Work

    def requested(self, channel: Channel, label: str, nbytes: int, transfer: Transfer, *, urgent: bool = False) -> None:
        """Note a transfer that was requested now."""
        self._pending.append(_Pending(channel, label, nbytes, self.seconds(), urgent, transfer))

    @contextmanager
    def busy(self, channel: Channel, label: str, nbytes: int) -> Iterator[None]:
        """Note work of the calling thread, which was not asked for before. What ends after the step is in none."""
        start_s = self.seconds()
        yield
        if not self._finished:
            self._result.work.append(Work(channel, label, nbytes, start_s, start_s, self.seconds(), True))

    def stalled(self, start_s: float, end_s: float, label: str) -> None:
        """Note that computation waited."""
        self._result.stalls.append(Stall(start_s, end_s, label))

    @contextmanager
    def device_wait(self, label: str) -> Iterator[None]:
        """Note how long the accelerator's current stream waits for what it is ordered after in this context."""
        if self._clock is None:
            yield
            return
        before = self._clock.event()
        yield
        self._device_waits.append((label, before, self._clock.event()))

    def product(self, name: str, operations: int, start_s: float, *, backward: bool) -> None:
        """Add a product of a parameter that ends now, of its forward or its backward. None ends after the step.

        Args:
            name: Name of the parameter.
            operations: Multiplications and additions.
            start_s: Begin of it, or of what recomputes its factors: products that end later are no part of it.
            backward: It is a part of backward.
        """
        end_s = self.seconds()
        seconds = end_s - max(start_s, self._last_product_s)
        self._last_product_s = end_s
        if not self._finished:
            key = name, backward
            before = self._products.get(key, Product(name, backward, 0, 0.0))
            self._products[key] = Product(name, backward, before.operations + operations, before.seconds + seconds)

    # Memory

    def allocated(self, chunk: Chunk, tier: Tier) -> None:
        """Note that a chunk has memory on a tier from now on."""
        self._result.residency.append(ChunkMemory(self.seconds(), tier, chunk.kind, chunk.index, chunk.nbytes, True))

    def freed(self, chunk: Chunk, tier: Tier) -> None:
        """Note that a chunk has no memory on a tier from now on."""
        self._result.residency.append(ChunkMemory(self.seconds(), tier, chunk.kind, chunk.index, chunk.nbytes, False))

    def non_model_bytes(self, nbytes: int, *, settled: bool) -> None:
        """Note the bytes of non-model data on the device.

        Args:
            nbytes: Bytes that the current moment expects, or has been measured to have.
            settled: False before room has been made for them: they are less until then.
        """
        notes = self._result.non_model
        if settled or not notes or nbytes < notes[-1][1]:
            notes.append((self.seconds(), nbytes))

    def host_bytes(self, other_bytes: int) -> None:
        """Note the bytes of the host tier beside chunks."""
        self._result.host_other.append((self.seconds(), other_bytes))

    def disk_bytes(self, nbytes: int) -> None:
        """Note the allocated bytes of the swap file."""
        self._result.disk.append((self.seconds(), nbytes))

    def holds_gradients(self, index: int, holds: bool) -> None:
        """Note that a chunk of parameters holds gradients, or parameters again."""
        if holds is not (index in self._held):
            (self._held.add if holds else self._held.discard)(index)
            self._result.gradients.append((self.seconds(), index, holds))

    # Order

    def moment(self, number: int, chunks: tuple[int, ...]) -> None:
        """Note the begin of a moment."""
        self._result.moments.append(ChunkAccess(self.seconds(), number, chunks))

    def phase(self, name: str) -> None:
        """Note the begin of a part of the step."""
        self._result.phases.append((self.seconds(), name))

    def finish(self, step: int) -> StepTimeline:
        """Return the record of the step that ends now. Transfers in flight are in none.

        Args:
            step: Number of the step.
        """
        self._finished = True
        result = self._result
        result.step, result.end_s = step, self.seconds()
        for pending in self._pending:
            times = pending.transfer.interval(self._clock)
            if times is not None:
                start_s, end_s = self._within(times)
                asked_s = min(pending.asked_s, start_s)  # it may have begun before the request was noted
                result.work.append(
                    Work(pending.channel, pending.label, pending.nbytes, asked_s, start_s, end_s, pending.urgent)
                )
        for label, before, after in self._device_waits:
            assert self._clock is not None, "events are recorded on an accelerator"
            times = self._clock.seconds(before), self._clock.seconds(after)
            result.stalls.append(Stall(*self._within(times), label))
        result.products = list(self._products.values())
        result.work = sorted(result.work, key=lambda each: each.start_s)  # a worker thread may still add to the list
        return result

    def _within(self, times: tuple[float, float]) -> tuple[float, float]:
        """Return times that are not after the end of the step.

        The clock of a device is late by the time until the host read it, and a worker thread may go on after the step.
        """
        return min(times[0], self._result.end_s), min(times[1], self._result.end_s)


def _memory_of(chunk: Chunk, now: float) -> Iterator[ChunkMemory]:
    present = {
        Tier.DEVICE: chunk.device_bytes > 0,
        Tier.HOST: chunk.host_bytes > 0,
        Tier.DISK: chunk.disk.valid,
    }
    for tier, has_memory in present.items():
        if has_memory:
            yield ChunkMemory(now, tier, chunk.kind, chunk.index, chunk.nbytes, True)
