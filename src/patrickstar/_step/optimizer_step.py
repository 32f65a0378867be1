"""The update, chunk by chunk, each where its optimizer chunks lie (PatrickStar's hybrid Adam, §8.2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from patrickstar._kernels.cpp_backend import Running
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._layout.schema import GRAD32, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.placement import Tier
from patrickstar._step.disk_optimizer_step import Pipeline, count_crossing
from patrickstar._step.staging_pool import Ring, RingSize
from patrickstar.optim import Optimizer

STREAM_NUMEL = 1 << 22
"""Elements that come down together: four pages, for several threads, 8 MiB of 16-bit gradients."""

GroupOf = Callable[[Slot], Mapping[str, Any] | None]


class Update:
    """Runs one optimizer step over all chunks that hold gradients."""

    def __init__(self, data: ModelData, optimizer: Optimizer, kernels: Kernels, ring: RingSize | None = None) -> None:
        self.data = data
        self.optimizer = optimizer
        self.kernels = kernels
        self.homes: dict[int, Tier] = {}
        """Where the optimizer chunks of each index live."""
        self.pipeline = Pipeline(data, self.update, Ring(data.manager, ring)) if ring is not None else None
        self._order: dict[int, None] = {}

    @property
    def order(self) -> list[int]:
        """Chunk indices, in the order in which they were last updated; those that never were come first."""
        there = self.data.by_chunk
        return [*(index for index in there if index not in self._order), *(i for i in self._order if i in there)]

    def run(self, group_of: GroupOf, scales: Sequence[float]) -> None:
        """Update every parameter that has a gradient and belongs to a param group.

        scales: factors that gradients are multiplied by before, one after the other.
        """
        for index in self.data.by_chunk:
            for running in self.run_chunk(index, group_of, scales):
                running.finish()
        if self.pipeline is not None:
            self.pipeline.sort(self.data.clock.trace.first_use)
            self.proceed()

    def proceed(self) -> None:
        """Go on with what was asked for, without waiting."""
        if self.pipeline is not None:
            self.pipeline.proceed()
        self.data.go_on_saving()

    def complete(self, slots: Sequence[Slot] | None = None) -> None:
        """Have these parameters updated, or all that are not, if that was asked for and has not ended."""
        if self.pipeline is None:
            return
        if slots is None:
            self.pipeline.finish()
        elif late := self.pipeline.pending.intersection(slot.place.chunk for slot in slots):
            self.pipeline.finish(late)

    @uninterrupted
    def run_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float]) -> list[Running]:
        """The same for the parameters of one chunk. What is returned may still be running, and must be waited for."""
        slots = self.data.by_chunk[index]
        if not slots[0].scheme.trained:
            return []
        if self.pipeline is not None and index in self.pipeline.pending:
            if not any(slot.has_gradient for slot in slots):
                return []
            self.pipeline.finish([index])
        if any(slot.has_gradient for slot in slots):
            self.data.about_to_change(index)
            self._order.pop(index, None)
            self._order[index] = None
        self._place(index, slots)
        groups = {slot: group_of(slot) for slot in slots if slot.has_gradient}
        rules = {
            slot: self.optimizer.rule(group, slot.steps + 1, slot.memory)
            for slot, group in groups.items()
            if group is not None
        }
        if not rules:
            return []
        if not self._optimizer_chunks(index, slots)[0].in_memory:
            assert self.pipeline is not None, "without a disk all chunks are in memory"
            self.pipeline.add(index, rules, scales)
            return []
        try:
            running = self._start(rules, scales)
        except BaseException as error:
            for slot in rules:
                self.data.give_up(slot)
            error.add_note(
                f"The update of chunk {index} ({', '.join(slot.name for slot in rules)}) failed on the way: its "
                f"parameters may be updated in part, their gradients are gone. Load a saved state to go on as before."
            )
            raise
        self.data.updated(rules)
        for chunk in (slots[0].own, *self._optimizer_chunks(index, slots)):
            self.data.manager.mark_written(chunk, on_device=chunk.device_valid)
        return running

    def _start(self, rules: Mapping[Slot, Rule], scales: Sequence[float]) -> list[Running]:
        """Begin the update of parameters of one chunk. Those that lie above their masters are finished."""
        together = []
        for slot, rule in rules.items():
            span = self.span(slot, rule)
            self._count_moves(slot)
            if span.param.device == span.master.device:
                together.append(span)
            else:
                self._stream(span, scales)
        return self.kernels.start(together, scales)

    def _count_moves(self, slot: Slot) -> None:
        """Where the parameter lies above its master, its gradient comes down, and it goes up again."""
        manager = self.data.manager
        if slot.own.device_valid and not manager[PARAM32, slot.place.chunk].device_valid:
            slot.chunk.moved_bytes += count_crossing(manager, slot, slot.place.numel)

    def span(self, slot: Slot, rule: Rule) -> Span:
        """What an update of one parameter reads and writes, where it lies."""
        manager, index = self.data.manager, slot.place.chunk
        master, *states = (slot.flat(manager[spec.kind, index]) for spec in slot.scheme.optimizer_lists)
        return Span(slot.flat(slot.own), self.data.gradient(slot), master, tuple(states), rule)

    def _stream(self, span: Span, scales: Sequence[float]) -> None:
        """Update below what lies above: gradients come down and parameters go up, some pages at a time.

        While some are updated, the next come down: there are two stages.
        """
        device, pinned = span.master.device, span.param.device.type == "cuda"
        length = span.numel if not span.rule.by_pages else min(span.numel, STREAM_NUMEL)
        stages = [torch.empty(length, dtype=span.param.dtype, device=device, pin_memory=pinned) for _ in range(2)]
        before: tuple[list[Running], torch.Tensor, torch.Tensor] | None = None
        try:
            for number, first in enumerate(range(0, span.numel, max(1, length))):
                part = span.page(slice(first, first + length))
                stage, grad = stages[number % 2][: part.numel], part.grad
                if grad.last.device != device:
                    grad = replace(grad, last=stage.copy_(grad.last))
                running = self.kernels.start([replace(part, param=stage, grad=grad)], scales)
                if before is not None:
                    _land(*before)
                before = running, stage, part.param
        finally:
            if before is not None:
                _land(*before)

    def workspace_bytes(self) -> int:
        """The most that an update takes on the device beside chunks."""
        optimizer, device = self.optimizer, self.data.manager.device
        rule = optimizer.rule(optimizer.defaults(), 1, {})
        needs = (
            self.kernels.workspace_bytes(rule, device, getattr(torch, slot.scheme.master_dtype), slot.place.numel)
            for slot in self.data.slots
            if slot.scheme.trained
        )
        return max(needs, default=0)

    def home(self, index: int) -> Tier:
        """Where the optimizer chunks of this index live."""
        return self.homes.get(index, Tier.HOST)

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update spans whose masters are on the host, wherever their parameters are."""
        together = [span for span in spans if span.param.device == span.master.device]
        self.kernels.update(together, scales)
        for span in spans:
            if span.param.device != span.master.device:
                self._stream(span, scales)

    def stuck(self) -> set[int]:
        """Indices whose optimizer chunks are on the device and find no room on the host.

        Going down must leave the host what `param16` needs to change places.
        """
        manager = self.data.manager
        read = [slots[0].chunk for slots in self.data.by_chunk.values()]
        exchange = 2 * max(0 if chunk.shared else chunk.nbytes for chunk in read)
        free = manager.host.free_bytes - exchange
        found = set()
        for index, slots in self.data.by_chunk.items():
            # Room for `param16` may have been made by a part of them.
            chunks = self._optimizer_chunks(index, slots)
            above = [chunk for chunk in chunks if chunk.device_valid and not chunk.host_valid]
            if above:
                nbytes = sum(chunk.nbytes for chunk in above)
                if nbytes > free:
                    found.add(index)
                else:
                    free -= nbytes
        return found

    def _optimizer_chunks(self, index: int, slots: list[Slot]) -> list[Chunk]:
        """The chunks of one index that only the update touches, as its scheme lists them."""
        return [self.data.manager[spec.kind, index] for spec in slots[0].scheme.optimizer_lists]

    def _home_now(self, index: int, chunks: Sequence[Chunk]) -> Tier:
        """Where optimizer chunks are updated this time: at home, but for the disk's while the host has no room yet."""
        home, manager = self.home(index), self.data.manager
        if home is Tier.HOST and manager.disk is not None:
            needed = sum(chunk.nbytes for chunk in chunks if chunk.host is None)
            if not manager.host.has_room(needed):
                return Tier.DISK
        return home

    def _place(self, index: int, slots: list[Slot]) -> None:
        """Bring the chunks of one index to the tier where its optimizer chunks are to live.

        Below, `param16` comes along where it would have to leave the device anyway, or lies there already. Where all of
        it fits above, it stays: gradients stream down and parameters up.
        """
        manager = self.data.manager
        chunks = self._optimizer_chunks(index, slots)
        if (GRAD32, index) in manager.chunks:
            chunks.append(manager[GRAD32, index])
        home = self._home_now(index, chunks)
        read = slots[0].own
        if any(slot.has_gradient for slot in slots):
            manager.moves.settle(read)
            has_place = read.host_bytes > 0 or manager.host.has_room(read.nbytes)
            if home is Tier.DEVICE or (manager.disk is None and manager.moves.keep_duplicates and has_place):
                chunks.append(read)
            elif home is Tier.HOST:
                manager.have(read)
        if home is Tier.DEVICE:
            manager.bring(chunks)
        for chunk in chunks:
            manager.settle(chunk, home)
        self.data.follow_moves()


def _land(running: list[Running], stage: torch.Tensor, param: torch.Tensor) -> None:
    """When a stage is updated, take it up."""
    for one in running:
        one.finish()
    param.copy_(stage)
