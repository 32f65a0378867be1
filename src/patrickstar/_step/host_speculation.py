"""Speculative updates of chunks whose states are on the host: into spare blocks, beside the device's work."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.update import WHOLE, WHOLE_IN_ORDER, InPlace, Rules, SpareHome, Update
from patrickstar._step.update_dispatch import Updates
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.spare_memory import SpareUse

IN_FLIGHT = 2
"""Updates that run or wait at a time, of those that no worker thread chooses between."""


class SpareBlocks(SpareHome):
    """Spare blocks of the host, which become the host copies of the chunk when the step commits them.

    Args:
        withdrawn: Gets the index of the chunk if a chunk that it reads is moved before the update has begun.
    """

    def __init__(self, data: LocalShards, index: int, updates: Updates, withdrawn: list[int]) -> None:
        super().__init__(data, index)
        self._updates, self._withdrawn = updates, withdrawn
        self._host_tier = data.manager.host_tier
        self._chunks = self.written(index)
        self.use = SpareUse(tuple(chunk.nbytes for chunk in self._chunks))
        self.begun = threading.Event()
        """Set when the update has taken blocks, or found none."""
        self._spans: dict[ManagedParam, Span] = {}
        """Tensors of an update in place, to be bound to blocks."""
        self._downloads: list[ManagedParam] = []
        """Parameters whose gradients it copies from the device, once it has taken blocks."""
        self._took_blocks = self._failed = self._ended_late = False

    def start(self, update: Update, host: HostUpdates) -> None:
        """Start an update, once its gradients are complete. Its tensors are bound to blocks when it begins."""
        part = WHOLE_IN_ORDER if host.waits_for_copies else WHOLE
        self._spans = {managed: self.span(managed, rule, part) for managed, rule in update.rules.items()}
        on_device = update.param16.device.valid
        self._downloads = [managed for managed in update.rules if on_device and managed.overlays_shard]
        with profiler_range("update", *update.rules):
            self.use.running = update.running = host.start_when_ready(self._bind, update.scales, self.inputs)
        self._updates.add(update)

    def _bind(self) -> list[Span] | None:
        """Return the spans of an update that begins, bound to spare blocks; None without blocks."""
        self._took_blocks = self._host_tier.spare.take(self.use)
        self.begun.set()
        if not self._took_blocks:
            return None
        assert self.use.blocks is not None, "blocks were taken"
        blocks = zip(self._chunks, self.use.blocks, strict=True)
        views = [self._host_tier.view(block, chunk.dtype) for chunk, block in blocks]
        spans = []
        for managed, span in self._spans.items():
            first, last = managed.location.offset, managed.location.offset + managed.location.numel
            param, *out = (view[first:last] for view in views)
            spans.append(replace(span, param=param, out=tuple(out)))
        return spans

    def _count(self) -> None:
        """Count the gradients that an update has copied to the host: none if it has not begun, or found no blocks."""
        for managed in self._downloads if self._took_blocks else ():
            nbytes = managed.location.numel * managed.shard_chunk.dtype.itemsize
            self.data.manager.count_transfer(nbytes, to_device=False, by_kernel=True)
            managed.chunk.transferred_bytes += nbytes

    def finish(self, update: Update) -> None:
        """Wait for an update; before the step has decided, put it off if it has not begun."""
        assert update.running is not None, "the update has been started"
        if not self.speculative:
            super().finish(update)
        elif update.running.withdraw():
            self.drop(update)
            self._withdrawn.append(update.index)
        else:
            try:
                update.running.wait()
            except Exception:  # the step will update the chunk, and raise the error if it occurs again
                self._failed = True

    def keep(self, update: Update) -> bool:
        """Keep the results of an update that has begun; return False if there are none: the step updates the chunk."""
        assert update.running is not None, "the update has been started"
        if update.given_up or self._failed or update.running.withdraw():
            return False
        self.begun.wait()
        return self._host_tier.spare.keep(self.use)

    def commit(self, update: Update) -> None:
        """Make the results that were kept those of the step: now, or once the update has ended."""
        assert update.running is not None, "the update has been started"
        self._count()
        self._updates.queue.discard(update.running)
        self.data.manager.transfers.complete(update.param16)
        self.speculative = False
        self._updates.add(update)
        self._ended_late = not update.running.done  # the next forward uses such chunks first
        if not self._ended_late:
            self._updates.finish(update)

    def end(self, rules: Rules) -> None:
        """Make the spare blocks the host copies of the chunks, and let operators read the new parameters."""
        blocks, self.use.blocks = self.use.blocks, None
        assert blocks is not None, "its blocks were kept"
        for chunk, block in zip(self._chunks, blocks, strict=True):
            self._host_tier.replace_block(chunk, block)
            self._renew(chunk, urgent=self._ended_late)
        super().end(rules)
        self.data.update_param_views()

    def drop(self, update: Update) -> None:
        """Give an update up, and its blocks back."""
        if update.running is not None and not update.given_up:
            update.given_up = True
            self._updates.queue.discard(update.running)
            update.running.cancel()
            self._host_tier.release_spare(self.use)
            self._count()

    def forget(self, rules: Collection[ManagedParam]) -> None:
        """Give the blocks of an update back, which the step has committed and which has failed."""
        self._host_tier.release_spare(self.use)


class HostSpeculation:
    """Starts updates whose results are in spare blocks until the step decides. See [Note: speculation].

    Beside an accelerator, whose work is late, all are submitted when their chunks are complete. The worker thread takes
    the last one whose gradients the device has written, and blocks for it. The oldest results give up their blocks for
    newer ones: their chunks are used last in the next forward, beside which they can be updated.
    """

    def __init__(self, data: LocalShards, updates: Updates, host_updates: HostUpdates) -> None:
        self.data = data
        self._updates, self._host_updates = updates, host_updates
        self._host_tier = data.manager.host_tier
        self._in_place = InPlace(data)
        self.withdrawn: list[int] = []
        """Indices of chunks whose update had not begun when a chunk that it reads was moved."""

    @property
    def capacity(self) -> int:
        """Number of updates that may be started now: all if the worker thread chooses between them, else one ahead."""
        if self._host_updates.waits_for_copies:
            return len(self.data.by_chunk)
        running = (use.running for use in self._host_tier.spare.uses)
        return IN_FLIGHT - sum(each is not None and not each.done for each in running)

    def begin(self) -> None:
        """Begin a backward: spare blocks hold the new content of all chunks whose states are on the host, at most."""
        use_bytes = 0
        for index in self.data.by_chunk:
            written = self._in_place.written(index)
            if len(written) > 1 and self.accepts(written):
                use_bytes += sum(chunk.nbytes for chunk in written)
        self._host_tier.spare_use_bytes = use_bytes

    def accepts(self, inputs: Sequence[Chunk]) -> bool:
        """Return whether masters, states and sums of gradients are on the host."""
        return all(chunk.host.valid and not chunk.device.present for chunk in inputs[1:])

    def start(self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float]) -> bool:
        """Start to update a chunk. Return False without spare memory."""
        home = SpareBlocks(self.data, index, self._updates, self.withdrawn)
        if not self._host_tier.allocate_spare(home.use.sizes) and self._host_tier.spare.is_empty:
            return False
        home.start(Update(index, rules, scales, home), self._host_updates)
        return True

    def room(self, indices: Sequence[int]) -> int:
        """Return for how many of these chunks, the last ones first, the spare blocks had room in this step."""
        free = self._host_tier.spare_limit_bytes - self._host_tier.spare_peak
        for number, index in enumerate(reversed(indices)):
            free -= sum(chunk.nbytes for chunk in self._in_place.written(index))
            if free < 0:
                return number
        return len(indices)

    def end_step(self) -> int:
        """Release the blocks that are left. Return how many updates found no blocks, or gave them up."""
        replaced, self._host_tier.spare.replaced = self._host_tier.spare.replaced, 0
        self.withdrawn.clear()
        while self._host_tier.release_spare():
            pass
        return replaced
