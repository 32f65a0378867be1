"""Updates during backward whose results count if the step decides what they assumed (speculation)."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from patrickstar._kernels.update_rule import Rule, Running
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.host_arena import ArenaBlock
from patrickstar._memory.profiler_range import profiler_range
from patrickstar._params.managed_param import ManagedParam, profiled_names
from patrickstar._params.model_data import ModelData
from patrickstar._step.optimizer_step import GroupOf, OptimizerStep
from patrickstar._step.running_updates import EndOfUpdate

# [Note: speculation]
# Clipping, loss scaling and the caller's choices are known at `optimizer.step()` only. During backward a chunk whose
# gradients are complete is updated at once all the same, on the assumption that the step will scale gradients as at
# the start of the backward and use the same rules. New masters, states and parameters go to spare blocks of the host
# (see [Note: spare blocks]); the old ones and the gradients stay where they are. The step compares its scales and rules
# with those assumed, and the versions of all chunks that were read with those at the start. If they are equal, the
# spare blocks become the chunks' host copies, else they are released and the step updates the chunk. So the bits are
# those of an update in the step either way.
#
# The chunk that was completed last is updated first: the next forward uses it first. At most `IN_FLIGHT` updates are
# submitted at a time, so that this holds for chunks that are completed meanwhile. If no spare block is left, the
# oldest update is dropped for a newer one: its chunk is used last in the next forward, beside which it can be updated.
# As many of the first chunks are passed over in the next step.
#
# A miss costs the time of its updates, which run beside the device's work. After a step that decided otherwise nothing
# is assumed until one has decided as assumed again.

IN_FLIGHT = 2
"""Updates submitted at a time: one runs, one waits."""


@dataclass(eq=False)
class SpeculativeUpdate:
    """Update of one chunk's parameters into spare blocks."""

    rules: Mapping[ManagedParam, Rule]
    chunks: Sequence[Chunk]
    """Chunks that get new content: `param16`, masters and states."""
    blocks: Sequence[ArenaBlock]
    """Spare block of each chunk's new content."""
    inputs: Sequence[Chunk]
    """Chunks that it reads."""
    versions: Sequence[int]
    """Versions of the inputs when it was submitted."""
    running: Running
    failed: bool = False


@dataclass
class _Assumption:
    """Assumptions of a backward about its step."""

    group_of: GroupOf
    scales: Sequence[float]
    passed_over: list[int] = field(default_factory=list)
    """Indices of the chunks that were completed first and are not updated."""
    candidates: list[int] = field(default_factory=list)
    """Indices of complete chunks without an update, the last completed one last."""


class Speculation:
    """Starts updates during backward and decides at the step which of them count. See [Note: speculation]."""

    def __init__(self, data: ModelData, optimizer_step: OptimizerStep, enabled: bool = True) -> None:
        self.data = data
        self.possible = enabled and optimizer_step.host_updates is not None and data.world.size == 1
        """True if updates can run beside operators."""
        self._optimizer_step = optimizer_step
        self._host_tier = data.manager.host_tier
        reclaim = weakref.WeakMethod(self._drop_oldest)  # no cycle: memory goes back without a garbage collection
        self._host_tier.reclaim = lambda: (drop := reclaim()) is not None and drop()
        self._assumption: _Assumption | None = None
        self._updates: dict[int, SpeculativeUpdate] = {}
        """Updates by chunk index, the oldest first."""
        self._confident = False
        """True if the last step decided as its backward assumed or would have."""
        self._scales: Sequence[float] = ()
        self._options: Any = None
        self._backwards = 0
        """Number of backwards before the last step."""
        self._passed_over = 0
        """Number of chunks completed first that are not updated, because later ones would take their spare blocks."""
        self._replaced = 0

    @property
    def active(self) -> bool:
        """True while a backward updates chunks."""
        return self._assumption is not None

    def begin(
        self, groups: Callable[[], Mapping[ManagedParam, Mapping[str, Any]]], options: Any, scales: Sequence[float]
    ) -> None:
        """Begin a backward.

        Args:
            groups: Returns the param group of each parameter.
            options: Copy of the hyper-parameters, to be compared with those of the step.
            scales: Factors of the gradients if nothing is clipped.
        """
        self._assumption, self._scales, self._options = None, scales, options
        if self._confident and self.data.backwards_in_step == self._backwards:
            self._assumption = _Assumption(groups().get, scales)

    def add(self, index: int) -> None:
        """Add a chunk whose gradients are complete."""
        if self._assumption is not None:
            passed_over = self._assumption.passed_over
            skips = len(passed_over) < self._passed_over
            (passed_over if skips else self._assumption.candidates).append(index)

    def progress(self) -> None:
        """Submit updates of complete chunks."""
        if self._assumption is None:
            return
        while (
            self._assumption.candidates
            and sum(not update.running.done for update in self._updates.values()) < IN_FLIGHT
        ):
            self._start(self._assumption.candidates.pop(), self._assumption)

    @defer_sigint
    def _start(self, index: int, assumption: _Assumption) -> None:
        step, manager, managed_params = self._optimizer_step, self.data.manager, self.data.by_chunk[index]
        rules = step.rules(managed_params, assumption.group_of)
        param16, chunks = managed_params[0].shard_chunk, step.optimizer_chunks(index, managed_params)
        sums = step.gradient_sums(index)
        inputs, updates = [param16, *chunks, *sums], step.host_updates
        assert updates is not None, "without updates beside operators nothing is speculated"
        on_host = all(chunk.host_valid and not chunk.device_resident for chunk in (*chunks, *sums))
        # A spare block holds whole chunks: every parameter in them has to be updated.
        if not on_host or len(rules) < len(managed_params) or not all(rule.by_pages for rule in rules.values()):
            return
        manager.transfers.complete_in_order(param16)
        self.data.update_param_views()
        if not param16.in_memory:
            return
        targets = [param16, *chunks]
        blocks = self._allocate([chunk.nbytes for chunk in targets])
        if blocks is None:
            return
        views = [self._host_tier.view(block, chunk.dtype) for chunk, block in zip(targets, blocks, strict=True)]
        spans = []
        for managed, rule in rules.items():
            span = step.span(managed, rule, chunks, in_order=updates.waits_for_copies)
            first, last = managed.location.offset, managed.location.offset + managed.location.numel
            param, *out = (view[first:last] for view in views)
            spans.append(replace(span, param=param, out=tuple(out)))
            if param16.device_valid:
                manager.count_transfer(param.nbytes, to_device=False, by_kernel=True)
                managed.chunk.transferred_bytes += param.nbytes
        with profiler_range("update", profiled_names(rules)):
            running = updates.start(spans, assumption.scales, inputs)
        for block in blocks:
            self._host_tier.copy_issued(block, EndOfUpdate(running, repr(param16)))
        update = SpeculativeUpdate(rules, targets, blocks, inputs, [chunk.version for chunk in inputs], running)
        self._updates[index] = update
        step.running.add(running, inputs, partial(self._before_move, index))

    def _allocate(self, sizes: Sequence[int]) -> list[ArenaBlock] | None:
        """Allocate spare blocks; the oldest updates are dropped for this one."""
        while (blocks := self._host_tier.allocate_spare(sizes)) is None:
            if not self._drop_oldest():
                return None
            self._replaced += 1
        return blocks

    def _drop_oldest(self) -> bool:
        """Drop the oldest update. Return False if there is none."""
        if not self._updates:
            return False
        self._drop(next(iter(self._updates)))
        return True

    def _drop(self, index: int) -> None:
        update = self._updates.pop(index)
        self._optimizer_step.running.discard(update.running)
        update.running.cancel()
        self._release(update)

    def _release(self, update: SpeculativeUpdate) -> None:
        for block in update.blocks:
            self._host_tier.release_spare(block)

    def _before_move(self, index: int) -> None:
        """Let a chunk move that an update reads: wait for the update, or put it off if it has not begun."""
        update = self._updates[index]
        if update.running.withdraw():
            self._drop(index)
            if self._assumption is not None:
                self._assumption.candidates.insert(0, index)
            return
        try:
            update.running.finish()
        except Exception:  # the step will update the chunk, and raise the error if it occurs again
            update.failed = True

    # The step

    @defer_sigint
    def decide(self, group_of: GroupOf, options: Any, scales: Sequence[float], overflow: bool) -> None:
        """Commit the updates that a step's decisions confirm, and drop the others.

        Args:
            group_of: Returns the param group of a parameter.
            options: Hyper-parameters of the step.
            scales: Factors of the gradients, with those of clipping.
            overflow: The step is skipped.
        """
        assumption, self._assumption = self._assumption, None
        counters = self.data.manager.counters
        counters.speculated += len(self._updates)
        decided = not overflow and _effective(scales) == _effective(self._scales)
        for index in sorted(self._updates, key=self.data.tracer.trace.first_use):
            if decided and self._is_valid(index, group_of):
                counters.speculation_hits += 1
                self._commit(index)
            else:
                self._drop(index)
        self._confident = decided and options == self._options
        self._backwards = self.data.backwards_in_step
        if assumption is not None:
            self._passed_over = len(assumption.passed_over) + self._replaced - self._room(assumption.passed_over)
        self._replaced = 0

    def _room(self, passed_over: Sequence[int]) -> int:
        """Return for how many of the chunks that were passed over the spare blocks had room, the last ones first."""
        free = self._host_tier.spare_limit_bytes - self._host_tier.spare_peak
        for number, index in enumerate(reversed(passed_over)):
            managed_params = self.data.by_chunk[index]
            chunks = [managed_params[0].shard_chunk, *self._optimizer_step.optimizer_chunks(index, managed_params)]
            free -= sum(chunk.nbytes for chunk in chunks)
            if free < 0:
                return number
        return len(passed_over)

    def _is_valid(self, index: int, group_of: GroupOf) -> bool:
        """Return whether an update has read what the step would read, and used the rules that the step would use."""
        update, managed_params = self._updates[index], self.data.by_chunk[index]
        inputs = [*update.chunks, *self._optimizer_step.gradient_sums(index)]
        return (
            not update.failed
            and list(update.inputs) == inputs
            and list(update.versions) == [chunk.version for chunk in inputs]
            and self._optimizer_step.rules(managed_params, group_of) == update.rules
        )

    def _commit(self, index: int) -> None:
        """Make the results of an update those of the step: now, or once it has ended."""
        update, running = self._updates.pop(index), self._optimizer_step.running
        running.discard(update.running)
        self.data.before_update(index)
        self.data.manager.transfers.complete_in_order(update.chunks[0])
        for managed in update.rules:
            managed.begin_update()
        self._optimizer_step.note_order(index)
        running.add(update.running, update.inputs, partial(self._finish, update))
        if update.running.done:
            running.finish_one(update.running)

    @defer_sigint
    def _finish(self, update: SpeculativeUpdate) -> None:
        """Wait for an update, and make its spare blocks the host copies of its chunks."""
        manager, param16 = self.data.manager, update.chunks[0]
        try:
            update.running.finish()
        except BaseException as error:
            self._release(update)
            self._optimizer_step.give_up(update.rules, error)
            raise
        if param16.held:
            manager.withdraw_hold(param16)  # its device memory goes
        for chunk, block in zip(update.chunks, update.blocks, strict=True):
            self._host_tier.replace_block(chunk, block)
            manager.host_renewed(chunk)
        self.data.end_update(update.rules)
        self.data.update_param_views()

    @defer_sigint
    def cancel(self) -> None:
        """Drop all updates."""
        self._assumption = None
        self._replaced = 0
        while self._drop_oldest():
            pass


def _effective(scales: Iterable[float]) -> list[float]:
    """Return the factors that change a gradient: multiplying by one is exact."""
    return [scale for scale in scales if scale != 1.0]
