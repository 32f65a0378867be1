"""Speculative updates of chunks whose states are on the host: into spare blocks, beside the device's work."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from patrickstar._kernels.update_rule import Rule, Running
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.host_arena import ArenaBlock
from patrickstar._memory.profiler_range import profiler_range
from patrickstar._params.managed_param import ManagedParam, profiled_names
from patrickstar._params.model_data import ModelData
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.running_updates import EndOfUpdate
from patrickstar._step.streamed_update import HostUpdates


@dataclass(eq=False)
class _Update:
    """Update of one chunk's parameters into spare blocks."""

    rules: Mapping[ManagedParam, Rule]
    chunks: Sequence[Chunk]
    """Chunks that get new content: `param16`, masters and states."""
    blocks: Sequence[ArenaBlock]
    """Spare block of each chunk's new content."""
    inputs: Sequence[Chunk]
    running: Running
    failed: bool = False


class HostSpeculation:
    """Updates whose results are in spare blocks until the step decides. See [Note: speculation].

    If no spare block is left, the oldest update is dropped for a newer one: its chunk is used last in the next forward,
    beside which it can be updated.
    """

    def __init__(self, data: ModelData, optimizer_step: OptimizerStep, host_updates: HostUpdates) -> None:
        self.data = data
        self.withdrawn: list[int] = []
        """Indices of updates that had not begun when a chunk that they read was moved."""
        self.replaced = 0
        """Number of updates that were dropped for newer ones."""
        self._optimizer_step = optimizer_step
        self._host_updates = host_updates
        self._host_tier = data.manager.host_tier
        self._updates: dict[int, _Update] = {}
        """Updates by chunk index, the oldest first."""
        reclaim = weakref.WeakMethod(self._drop_oldest)  # no cycle: memory goes back without a garbage collection
        self._host_tier.reclaim = lambda: (drop := reclaim()) is not None and drop()

    @property
    def unfinished(self) -> int:
        """Number of updates that run or wait."""
        return sum(not update.running.done for update in self._updates.values())

    def accepts(self, inputs: Sequence[Chunk]) -> bool:
        """Return whether masters, states and sums of gradients are on the host."""
        return all(chunk.host_valid and not chunk.device_resident for chunk in inputs[1:])

    def holds(self, index: int) -> bool:
        """Return whether there is an update of this chunk, and it has not failed."""
        return index in self._updates and not self._updates[index].failed

    @defer_sigint
    def start(
        self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float], inputs: Sequence[Chunk]
    ) -> bool:
        """Start to update a chunk. Return False without spare memory."""
        step, managed_params = self._optimizer_step, self.data.by_chunk[index]
        param16, optimizer_chunks = inputs[0], step.optimizer_chunks(index, managed_params)
        chunks = [param16, *optimizer_chunks]
        blocks = self._allocate([chunk.nbytes for chunk in chunks])
        if blocks is None:
            return False
        views = [self._host_tier.view(block, chunk.dtype) for chunk, block in zip(chunks, blocks, strict=True)]
        spans = []
        for managed, rule in rules.items():
            span = step.span(managed, rule, optimizer_chunks, in_order=self._host_updates.waits_for_copies)
            first, last = managed.location.offset, managed.location.offset + managed.location.numel
            param, *out = (view[first:last] for view in views)
            spans.append(replace(span, param=param, out=tuple(out)))
            if param16.device_valid:
                self.data.manager.count_transfer(param.nbytes, to_device=False, by_kernel=True)
                managed.chunk.transferred_bytes += param.nbytes
        with profiler_range("update", profiled_names(rules)):
            running = self._host_updates.start(spans, scales, inputs)
        for block in blocks:
            self._host_tier.copy_issued(block, EndOfUpdate(running, repr(param16)))
        self._updates[index] = _Update(rules, chunks, blocks, inputs, running)
        step.running.add(running, inputs, partial(self._before_move, index))
        return True

    def _allocate(self, sizes: Sequence[int]) -> list[ArenaBlock] | None:
        while (blocks := self._host_tier.allocate_spare(sizes)) is None:
            if not self._drop_oldest():
                return None
            self.replaced += 1
        return blocks

    def room(self, indices: Sequence[int]) -> int:
        """Return for how many of these chunks, the last ones first, the spare blocks had room in this step."""
        free = self._host_tier.spare_limit_bytes - self._host_tier.spare_peak
        for number, index in enumerate(reversed(indices)):
            managed_params = self.data.by_chunk[index]
            chunks = [managed_params[0].shard_chunk, *self._optimizer_step.optimizer_chunks(index, managed_params)]
            free -= sum(chunk.nbytes for chunk in chunks)
            if free < 0:
                return number
        return len(indices)

    def _drop_oldest(self) -> bool:
        """Drop the oldest update. Return False if there is none."""
        if not self._updates:
            return False
        self.drop(next(iter(self._updates)))
        return True

    @defer_sigint
    def drop(self, index: int) -> None:
        """Drop an update, if it is still here."""
        update = self._updates.pop(index, None)
        if update is not None:
            self._optimizer_step.running.discard(update.running)
            update.running.cancel()
            self._release(update)

    def _release(self, update: _Update) -> None:
        for block in update.blocks:
            self._host_tier.release_spare(block)

    def _before_move(self, index: int) -> None:
        """Let a chunk move that an update reads: wait for the update, or put it off if it has not begun."""
        update = self._updates[index]
        if update.running.withdraw():
            self.drop(index)
            self.withdrawn.append(index)
            return
        try:
            update.running.finish()
        except Exception:  # the step will update the chunk, and raise the error if it occurs again
            update.failed = True

    def commit(self, index: int) -> None:
        """Make the results of an update those of the step: now, or once it has ended."""
        update, running = self._updates.pop(index), self._optimizer_step.running
        running.discard(update.running)
        self.data.manager.transfers.complete_in_order(update.chunks[0])
        running.add(update.running, update.inputs, partial(self._finish, update))
        if update.running.done:
            running.finish_one(update.running)

    @defer_sigint
    def _finish(self, update: _Update) -> None:
        """Wait for an update, and make its spare blocks the host copies of its chunks."""
        manager, param16 = self.data.manager, update.chunks[0]
        try:
            update.running.finish()
        except BaseException as error:
            self._release(update)
            self._optimizer_step.give_up(update.rules, error)
            raise
        if param16.held:
            manager.withdraw_hold(param16)  # its device memory is filled anew, or freed
        for chunk, block in zip(update.chunks, update.blocks, strict=True):
            self._host_tier.replace_block(chunk, block)
            manager.transfers.host_renewed(chunk)
        self.data.end_update(update.rules)
        self.data.update_param_views()
