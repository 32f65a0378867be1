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
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.placement import Tier
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep, count_crossing
from patrickstar._step.staging_pool import StagingPool, StagingSize
from patrickstar.optim import Optimizer

STREAM_NUMEL = 1 << 22
"""Elements that come down together: four pages, for several threads, 8 MiB of 16-bit gradients."""

GroupOf = Callable[[ManagedParam], Mapping[str, Any] | None]


class OptimizerStep:
    """Runs one optimizer step over all chunks that hold gradients."""

    def __init__(
        self, data: ModelData, optimizer: Optimizer, kernels: Kernels, ring: StagingSize | None = None
    ) -> None:
        self.data = data
        self.optimizer = optimizer
        self.kernels = kernels
        self.home_tiers: dict[int, Tier] = {}
        """Where the optimizer chunks of each index live."""
        self.disk_step = (
            DiskOptimizerStep(data, self.update, StagingPool(data.manager, ring)) if ring is not None else None
        )
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
            for running in self.update_chunk(index, group_of, scales):
                running.finish()
        if self.disk_step is not None:
            self.disk_step.sort(self.data.tracer.trace.first_use)
            self.progress()

    def progress(self) -> None:
        """Go on with what was asked for, without waiting."""
        if self.disk_step is not None:
            self.disk_step.progress()
        self.data.continue_save()

    def complete(self, managed_params: Sequence[ManagedParam] | None = None) -> None:
        """Have these parameters updated, or all that are not, if that was asked for and has not ended."""
        if self.disk_step is None:
            return
        if managed_params is None:
            self.disk_step.finish()
        elif late := self.disk_step.pending.intersection(managed.location.chunk for managed in managed_params):
            self.disk_step.finish(late)

    @defer_sigint
    def update_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float]) -> list[Running]:
        """The same for the parameters of one chunk. What is returned may still be running, and must be waited for."""
        managed_params = self.data.by_chunk[index]
        if not managed_params[0].schema.trained:
            return []
        if self.disk_step is not None and index in self.disk_step.pending:
            if not any(managed.has_gradient for managed in managed_params):
                return []
            self.disk_step.finish([index])
        if any(managed.has_gradient for managed in managed_params):
            self.data.before_update(index)
            self._order.pop(index, None)
            self._order[index] = None
        self._move_for_update(index, managed_params)
        groups = {managed: group_of(managed) for managed in managed_params if managed.has_gradient}
        rules = {
            managed: self.optimizer.rule(group, managed.steps + 1, managed.optimizer_extra)
            for managed, group in groups.items()
            if group is not None
        }
        if not rules:
            return []
        if not self._optimizer_chunks(index, managed_params)[0].in_memory:
            assert self.disk_step is not None, "without a disk all chunks are in memory"
            self.disk_step.submit(index, rules, scales)
            return []
        try:
            running = self._start(rules, scales)
        except BaseException as error:
            for managed in rules:
                self.data.give_up(managed)
            error.add_note(
                f"The update of chunk {index} ({', '.join(managed.name for managed in rules)}) failed on the way: its "
                f"parameters may be updated in part, their gradients are gone. Load a saved state to go on as before."
            )
            raise
        self.data.mark_updated(rules)
        for chunk in (managed_params[0].shard_chunk, *self._optimizer_chunks(index, managed_params)):
            self.data.manager.mark_written(chunk, on_device=chunk.device_valid)
        return running

    def _start(self, rules: Mapping[ManagedParam, Rule], scales: Sequence[float]) -> list[Running]:
        """Begin the update of parameters of one chunk. Those that lie above their masters are finished."""
        together = []
        for managed, rule in rules.items():
            span = self.span(managed, rule)
            self._count_moves(managed)
            if span.param.device == span.master.device:
                together.append(span)
            else:
                self._stream(span, scales)
        return self.kernels.start(together, scales)

    def _count_moves(self, managed: ManagedParam) -> None:
        """Where the parameter lies above its master, its gradient comes down, and it goes up again."""
        manager = self.data.manager
        if managed.shard_chunk.device_valid and not manager[PARAM32, managed.location.chunk].device_valid:
            managed.chunk.transferred_bytes += count_crossing(manager, managed, managed.location.numel)

    def span(self, managed: ManagedParam, rule: Rule) -> Span:
        """What an update of one parameter reads and writes, where it lies."""
        manager, index = self.data.manager, managed.location.chunk
        master, *states = (managed.flat(manager[spec.kind, index]) for spec in managed.schema.optimizer_lists)
        return Span(managed.flat(managed.shard_chunk), self.data.gradient(managed), master, tuple(states), rule)

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
                if grad.latest.device != device:
                    grad = replace(grad, latest=stage.copy_(grad.latest))
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
            self.kernels.workspace_bytes(
                rule, device, getattr(torch, managed.schema.master_dtype), managed.location.numel
            )
            for managed in self.data.managed_params
            if managed.schema.trained
        )
        return max(needs, default=0)

    def home_tier(self, index: int) -> Tier:
        """Where the optimizer chunks of this index live."""
        return self.home_tiers.get(index, Tier.HOST)

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update spans whose masters are on the host, wherever their parameters are."""
        together = [span for span in spans if span.param.device == span.master.device]
        self.kernels.update(together, scales)
        for span in spans:
            if span.param.device != span.master.device:
                self._stream(span, scales)

    def bound_to_device(self) -> set[int]:
        """Indices whose optimizer chunks are on the device and find no room on the host.

        Going down must leave the host what `param16` needs to change places.
        """
        manager = self.data.manager
        read = [managed_params[0].chunk for managed_params in self.data.by_chunk.values()]
        exchange = 2 * max(0 if chunk.sharded else chunk.nbytes for chunk in read)
        free = manager.host_tier.free_bytes - exchange
        found = set()
        for index, managed_params in self.data.by_chunk.items():
            # Room for `param16` may have been made by a part of them.
            chunks = self._optimizer_chunks(index, managed_params)
            above = [chunk for chunk in chunks if chunk.device_valid and not chunk.host_valid]
            if above:
                nbytes = sum(chunk.nbytes for chunk in above)
                if nbytes > free:
                    found.add(index)
                else:
                    free -= nbytes
        return found

    def _optimizer_chunks(self, index: int, managed_params: list[ManagedParam]) -> list[Chunk]:
        """The chunks of one index that only the update touches, as its scheme lists them."""
        return [self.data.manager[spec.kind, index] for spec in managed_params[0].schema.optimizer_lists]

    def _update_tier(self, index: int, chunks: Sequence[Chunk]) -> Tier:
        """Where optimizer chunks are updated this time: at home, but for the disk's while the host has no room yet."""
        home, manager = self.home_tier(index), self.data.manager
        if home is Tier.HOST and manager.disk_tier is not None:
            needed = sum(chunk.nbytes for chunk in chunks if chunk.host is None)
            if not manager.host_tier.has_room(needed):
                return Tier.DISK
        return home

    def _move_for_update(self, index: int, managed_params: list[ManagedParam]) -> None:
        """Bring the chunks of one index to the tier where its optimizer chunks are to live.

        Below, `param16` comes along where it would have to leave the device anyway, or lies there already. Where all of
        it fits above, it stays: gradients stream down and parameters up.
        """
        manager = self.data.manager
        chunks = self._optimizer_chunks(index, managed_params)
        if (GRAD32, index) in manager.chunks:
            chunks.append(manager[GRAD32, index])
        home = self._update_tier(index, chunks)
        read = managed_params[0].shard_chunk
        if any(managed.has_gradient for managed in managed_params):
            manager.transfers.wait_idle(read)
            has_place = read.host_bytes > 0 or manager.host_tier.has_room(read.nbytes)
            if home is Tier.DEVICE or (manager.disk_tier is None and manager.transfers.keep_duplicates and has_place):
                chunks.append(read)
            elif home is Tier.HOST:
                manager.ensure_in_memory(read)
        if home is Tier.DEVICE:
            manager.fetch(chunks)
        for chunk in chunks:
            manager.move_to_tier(chunk, home)
        self.data.update_param_views()


def _land(running: list[Running], stage: torch.Tensor, param: torch.Tensor) -> None:
    """When a stage is updated, take it up."""
    for one in running:
        one.finish()
    param.copy_(stage)
