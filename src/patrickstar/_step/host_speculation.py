"""Speculative updates of chunks whose states are on the host: into spare blocks, beside the device's work."""

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.update import WHOLE, WHOLE_IN_ORDER, InPlace, Rules, SpareHome, Update
from patrickstar._step.updates import Updates
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.host_arena import ArenaBlock
from patrickstar._tiers.host_tier import HostTier

IN_FLIGHT = 2
"""Updates that run or wait at a time, of those that no worker thread chooses between."""

Blocks = Sequence[ArenaBlock]
"""Spare blocks for the new content of one chunk of each list."""


class SpareMemory:
    """Spare blocks that updates take when they begin, in any thread.

    An update that finds none takes those of the oldest update that has ended, which is dropped by that.
    """

    def __init__(self, host_tier: HostTier) -> None:
        self.host_tier = host_tier
        self._lock = threading.Lock()
        self._free: list[Blocks] = []
        self._holders: dict[SpareBlocks, Update] = {}
        """Who has taken blocks, and may lose them once its update has ended, the oldest first."""
        self.replaced = 0
        """Number of updates that were dropped for newer ones, or found no blocks."""
        self.withdrawn: list[int] = []
        """Indices of chunks whose update had not begun when a chunk that it reads was moved."""

    def take(self, home: "SpareBlocks", update: Update) -> bool:
        """Give blocks to an update that begins. Return False if there are none for it."""
        with self._lock:
            blocks = next((blocks for blocks in self._free if _sizes(blocks) == home.sizes), None)
            if blocks is not None:
                self._free.remove(blocks)
            else:
                self.replaced += 1
                ended = (each for each, held in self._holders.items() if held.running is not None and held.running.done)
                oldest = next((each for each in ended if each.sizes == home.sizes), None)
                if oldest is None:
                    return False
                del self._holders[oldest]
                blocks, oldest.blocks = oldest.blocks, None
            home.blocks = blocks
            self._holders[home] = update
            return True

    def keep(self, home: "SpareBlocks") -> bool:
        """Let an update keep its blocks from now on. Return False if it has none."""
        with self._lock:
            self._holders.pop(home, None)
            return home.blocks is not None

    def provide(self, sizes: tuple[int, ...]) -> bool:
        """Allocate blocks of these bytes for an update. Return False if the host has no spare memory for them."""
        blocks = self.host_tier.allocate_spare(sizes)
        if blocks is not None:
            with self._lock:
                self._free.append(blocks)
        return blocks is not None

    def release(self, home: "SpareBlocks | None" = None) -> bool:
        """Release the blocks of an update that has ended or was cancelled, or free ones. Return False without any."""
        with self._lock:
            if home is None:
                blocks = self._free.pop() if self._free else None
            else:
                self._holders.pop(home, None)
                blocks, home.blocks = home.blocks, None
        for block in blocks or ():
            self.host_tier.release_spare(block)
        return blocks is not None


def _sizes(blocks: Blocks) -> tuple[int, ...]:
    return tuple(block.nbytes for block in blocks)


class SpareBlocks(SpareHome):
    """Spare blocks of the host, which become the host copies of the chunk when the step commits them."""

    def __init__(self, data: LocalShards, index: int, updates: Updates, memory: SpareMemory) -> None:
        super().__init__(data, index)
        self._updates, self._memory = updates, memory
        self._chunks = self.written(index)
        self.sizes = tuple(chunk.nbytes for chunk in self._chunks)
        """Bytes of its blocks."""
        self.blocks: Blocks | None = None
        """Spare block of each chunk's new content: from the begin of the update on, unless a newer one took them."""
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
            update.running = host.start_when_ready(partial(self._bind, update), update.scales, self.inputs)
        self._updates.add(update)

    def _bind(self, update: Update) -> list[Span] | None:
        """Return the spans of an update that begins, bound to spare blocks; None without blocks."""
        self._took_blocks = self._memory.take(self, update)
        self.begun.set()
        if not self._took_blocks:
            return None
        assert self.blocks is not None, "blocks were taken"
        tier = self._memory.host_tier
        views = [tier.view(block, chunk.dtype) for chunk, block in zip(self._chunks, self.blocks, strict=True)]
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
            self._memory.withdrawn.append(update.index)
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
        return self._memory.keep(self)

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
        blocks, self.blocks = self.blocks, None
        assert blocks is not None, "its blocks were kept"
        for chunk, block in zip(self._chunks, blocks, strict=True):
            self._memory.host_tier.replace_block(chunk, block)
            self._renew(chunk, urgent=self._ended_late)
        super().end(rules)
        self.data.update_param_views()

    def drop(self, update: Update) -> None:
        """Give an update up, and its blocks back."""
        if update.running is not None and not update.given_up:
            update.given_up = True
            self._updates.queue.discard(update.running)
            update.running.cancel()
            self._memory.release(self)
            self._count()

    def forget(self, rules: Collection[ManagedParam]) -> None:
        """Give the blocks of an update back, which the step has committed and which has failed."""
        self._memory.release(self)


class HostSpeculation:
    """Starts updates whose results are in spare blocks until the step decides. See [Note: speculation].

    Beside an accelerator, whose work is late, all are submitted when their chunks are complete. The worker thread takes
    the last one whose gradients the device has written, and blocks for it. The oldest results give up their blocks for
    newer ones: their chunks are used last in the next forward, beside which they can be updated.
    """

    def __init__(self, data: LocalShards, updates: Updates, host_updates: HostUpdates) -> None:
        self.data = data
        self.memory = SpareMemory(data.manager.host_tier)
        self._updates, self._host_updates = updates, host_updates
        self._host_tier = data.manager.host_tier
        self._in_place = InPlace(data)
        reclaim = weakref.WeakMethod(self._drop_oldest)  # no cycle: memory goes back without a garbage collection
        self._host_tier.reclaim = lambda: (drop := reclaim()) is not None and drop()

    @property
    def undecided(self) -> dict[Update, SpareBlocks]:
        """Updates that the step may commit, with their homes, the oldest first."""
        pairs = ((update, update.home) for update in self._updates.queue.updates if not update.given_up)
        return {update: home for update, home in pairs if isinstance(home, SpareBlocks) and home.speculative}

    @property
    def capacity(self) -> int:
        """Number of updates that may be started now: all if the worker thread chooses between them, else one ahead."""
        if self._host_updates.waits_for_copies:
            return len(self.data.by_chunk)
        return IN_FLIGHT - sum(update.running is not None and not update.running.done for update in self.undecided)

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
        home = SpareBlocks(self.data, index, self._updates, self.memory)
        if not self.memory.provide(home.sizes) and not self.undecided:
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

    def _drop_oldest(self) -> bool:
        """Release spare blocks that no update has taken, else those of the oldest. Return False if there are none."""
        if self.memory.release():
            return True
        for update, home in self.undecided.items():
            home.drop(update)
            return True
        return False

    def end_step(self) -> int:
        """Release the blocks that are left. Return how many updates found no blocks, or gave them up."""
        replaced, self.memory.replaced = self.memory.replaced, 0
        self.memory.withdrawn.clear()
        while self.memory.release():
            pass
        return replaced
