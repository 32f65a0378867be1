"""Speculative updates of chunks whose states are on the host: into spare blocks, beside the device's work."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam, profiled_names
from patrickstar._step.failed_update import give_up
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.update_home import WHOLE, WHOLE_IN_ORDER
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.host_arena import ArenaBlock
from patrickstar._tiers.host_tier import HostTier

IN_FLIGHT = 2
"""Updates that run or wait at a time, of those that no worker thread chooses between."""

Blocks = Sequence[ArenaBlock]
"""Spare blocks for the new content of one chunk of each list."""


@dataclass(eq=False)
class _Update:
    """Update of one chunk's parameters into spare blocks."""

    rules: Mapping[ManagedParam, Rule]
    chunks: Sequence[Chunk]
    """Chunks that get new content: `param16`, masters and states."""
    inputs: Sequence[Chunk]
    """Chunks that it reads."""
    spans: Sequence[Span]
    """Spans in place, to be bound to spare blocks."""
    downloads: Sequence[ManagedParam]
    """Parameters whose gradients it copies from the device."""
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when it has taken blocks, or found none."""
    copies: bool = False
    """True once it has taken blocks, and copies gradients."""
    running: Transfer | None = None
    blocks: Blocks | None = None
    """Spare block of each chunk's new content: from the begin of the update on, unless a newer one took them."""
    failed: bool = False
    ended_late: bool = False
    """True if it had not ended when the step committed it: the next forward uses such chunks first."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its blocks."""
        return tuple(chunk.nbytes for chunk in self.chunks)


class _SpareBlocks:
    """Spare blocks that updates take when they begin, in any thread.

    An update that finds none takes those of the oldest update that has ended, which is dropped by that.
    """

    def __init__(self, host_tier: HostTier) -> None:
        self._host_tier = host_tier
        self._lock = threading.Lock()
        self._free: list[Blocks] = []
        self._holders: list[_Update] = []
        """Updates that have begun and may lose their blocks once they have ended, the oldest first."""
        self.replaced = 0
        """Number of updates that were dropped for newer ones, or found no blocks."""

    def take(self, update: _Update) -> bool:
        """Give blocks to an update that begins. Return False if there are none for it."""
        with self._lock:
            fitting = (blocks for blocks in self._free if _sizes(blocks) == update.sizes)
            blocks = next(fitting, None)
            if blocks is not None:
                self._free.remove(blocks)
            else:
                self.replaced += 1
                fits = (each for each in self._holders if each.sizes == update.sizes)
                oldest = next((each for each in fits if each.running is not None and each.running.done), None)
                if oldest is None:
                    return False
                self._holders.remove(oldest)
                blocks, oldest.blocks = oldest.blocks, None
            update.blocks = blocks
            self._holders.append(update)
            return True

    def keep(self, update: _Update) -> bool:
        """Let an update keep its blocks from now on. Return False if it has none."""
        with self._lock:
            if update in self._holders:
                self._holders.remove(update)
            return update.blocks is not None

    def provide(self, sizes: tuple[int, ...]) -> bool:
        """Allocate blocks of these bytes for an update. Return False if the host has no spare memory for them."""
        blocks = self._host_tier.allocate_spare(sizes)
        if blocks is not None:
            with self._lock:
                self._free.append(blocks)
        return blocks is not None

    def release(self, update: _Update | None = None) -> bool:
        """Release the blocks of an update that has ended or was cancelled, or free ones. Return False without any."""
        with self._lock:
            if update is None:
                blocks = self._free.pop() if self._free else None
            else:
                if update in self._holders:
                    self._holders.remove(update)
                blocks, update.blocks = update.blocks, None
        for block in blocks or ():
            self._host_tier.release_spare(block)
        return blocks is not None


def _sizes(blocks: Blocks) -> tuple[int, ...]:
    return tuple(block.nbytes for block in blocks)


class HostSpeculation:
    """Updates whose results are in spare blocks until the step decides. See [Note: speculation].

    Beside an accelerator, whose work is late, all are submitted when their chunks are complete. The worker thread takes
    the last one whose gradients the device has written, and blocks for it. The oldest results give up their blocks for
    newer ones: their chunks are used last in the next forward, beside which they can be updated.
    """

    def __init__(self, data: LocalShards, optimizer_step: OptimizerStep, host_updates: HostUpdates) -> None:
        self.data = data
        self.withdrawn: list[int] = []
        """Indices of updates that had not begun when a chunk that they read was moved."""
        self._optimizer_step = optimizer_step
        self._host_updates = host_updates
        self._host_tier = data.manager.host_tier
        self._spare = _SpareBlocks(self._host_tier)
        self._updates: dict[int, _Update] = {}
        """Updates by chunk index, the oldest first."""
        reclaim = weakref.WeakMethod(self._drop_oldest)  # no cycle: memory goes back without a garbage collection
        self._host_tier.reclaim = lambda: (drop := reclaim()) is not None and drop()

    @property
    def capacity(self) -> int:
        """Number of updates that may be started now: all if the worker thread chooses between them, else one ahead."""
        if self._host_updates.waits_for_copies:
            return len(self.data.by_chunk)
        return IN_FLIGHT - sum(
            update.running is not None and not update.running.done for update in self._updates.values()
        )

    def begin(self) -> None:
        """Begin a backward: spare blocks hold the new content of all chunks whose states are on the host, at most."""
        use_bytes = 0
        for index, managed_params in self.data.by_chunk.items():
            inputs = [managed_params[0].shard_chunk, *self.data.state_chunks(index)]
            if len(inputs) > 1 and self.accepts(inputs):
                use_bytes += sum(chunk.nbytes for chunk in inputs)
        self._host_tier.spare_use_bytes = use_bytes

    def accepts(self, inputs: Sequence[Chunk]) -> bool:
        """Return whether masters, states and sums of gradients are on the host."""
        return all(chunk.host.valid and not chunk.device.present for chunk in inputs[1:])

    @defer_sigint
    def start(
        self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float], inputs: Sequence[Chunk]
    ) -> bool:
        """Start to update a chunk. Return False without spare memory."""
        step, param16, chunks = self._optimizer_step, inputs[0], self.data.state_chunks(index)
        part = WHOLE_IN_ORDER if self._host_updates.waits_for_copies else WHOLE
        spans = [step.home.span(managed, rule, part) for managed, rule in rules.items()]
        downloads = [managed for managed in rules if param16.device.valid and managed.overlays_shard]
        update = _Update(rules, [param16, *chunks], inputs, spans, downloads)
        if not self._spare.provide(update.sizes) and not self._updates:
            return False
        with profiler_range("update", profiled_names(rules)):
            update.running = self._host_updates.start_when_ready(partial(self._bind, update), scales, inputs)
        self._updates[index] = update
        step.running.add(update.running, inputs, partial(self._before_move, index))
        return True

    def _bind(self, update: _Update) -> list[Span] | None:
        """Return the spans of an update that begins, bound to spare blocks; None without blocks."""
        update.copies = self._spare.take(update)
        update.begun.set()
        if not update.copies:
            return None
        assert update.blocks is not None, "blocks were taken"
        views = [
            self._host_tier.view(block, chunk.dtype) for chunk, block in zip(update.chunks, update.blocks, strict=True)
        ]
        spans = []
        for managed, span in zip(update.rules, update.spans, strict=True):
            first, last = managed.location.offset, managed.location.offset + managed.location.numel
            param, *out = (view[first:last] for view in views)
            spans.append(replace(span, param=param, out=tuple(out)))
        return spans

    def room(self, indices: Sequence[int]) -> int:
        """Return for how many of these chunks, the last ones first, the spare blocks had room in this step."""
        free = self._host_tier.spare_limit_bytes - self._host_tier.spare_peak
        for number, index in enumerate(reversed(indices)):
            chunks = [self.data.by_chunk[index][0].shard_chunk, *self.data.state_chunks(index)]
            free -= sum(chunk.nbytes for chunk in chunks)
            if free < 0:
                return number
        return len(indices)

    def _drop_oldest(self) -> bool:
        """Release spare blocks that no update has taken, else those of the oldest. Return False if there are none."""
        if self._spare.release():
            return True
        if not self._updates:
            return False
        self.drop(next(iter(self._updates)))
        return True

    @defer_sigint
    def drop(self, index: int) -> None:
        """Drop an update, if it is still here."""
        update = self._updates.pop(index, None)
        if update is not None and update.running is not None:
            self._optimizer_step.running.discard(update.running)
            update.running.cancel()
            self._spare.release(update)
            self._count(update)

    def _count(self, update: _Update) -> None:
        """Count the gradients that an update has copied to the host: none if it has not begun, or found no blocks."""
        for managed in update.downloads if update.copies else ():
            nbytes = managed.location.numel * managed.shard_chunk.dtype.itemsize
            self.data.manager.count_transfer(nbytes, to_device=False, by_kernel=True)
            managed.chunk.transferred_bytes += nbytes

    def _before_move(self, index: int) -> None:
        """Let a chunk move that an update reads: wait for the update, or put it off if it has not begun."""
        update = self._updates[index]
        assert update.running is not None, "the update has been started"
        if update.running.withdraw():
            self.drop(index)
            self.withdrawn.append(index)
            return
        try:
            update.running.wait()
        except Exception:  # the step will update the chunk, and raise the error if it occurs again
            update.failed = True

    # The step

    def keep(self, index: int) -> bool:
        """Keep the results of an update that has begun; return False if there are none: the step updates the chunk."""
        update = self._updates.get(index)
        if update is None or update.failed or update.running is None or update.running.withdraw():
            return False
        update.begun.wait()
        return self._spare.keep(update)

    def commit(self, index: int) -> None:
        """Make the results that were kept those of the step: now, or once the update has ended."""
        update, running = self._updates.pop(index), self._optimizer_step.running
        assert update.running is not None, "the update has been started"
        self._count(update)
        running.discard(update.running)
        self.data.manager.transfers.complete(update.chunks[0])
        running.add(update.running, update.inputs, partial(self._finish, update))
        update.ended_late = not update.running.done
        if not update.ended_late:
            running.finish_one(update.running)

    @defer_sigint
    def _finish(self, update: _Update) -> None:
        """Wait for an update, and make its spare blocks the host copies of its chunks."""
        assert update.running is not None and update.blocks is not None, "its blocks were kept"
        try:
            update.running.wait()
        except BaseException as error:
            self._spare.release(update)
            give_up(self.data, update.rules, error)
            raise
        for chunk, block in zip(update.chunks, update.blocks, strict=True):
            self._host_tier.replace_block(chunk, block)
            self._optimizer_step.renew(chunk, urgent=update.ended_late)
        self.data.end_update(update.rules)
        self.data.update_param_views()

    def end_step(self) -> int:
        """Release the blocks that are left. Return how many updates found no blocks, or gave them up."""
        replaced, self._spare.replaced = self._spare.replaced, 0
        self.withdrawn.clear()
        while self._spare.release():
            pass
        return replaced
