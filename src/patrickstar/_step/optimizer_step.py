"""Optimizer step, chunk by chunk, on the tier of the optimizer chunks (PatrickStar's hybrid Adam, §8.2)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Rule
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam, profiled_names
from patrickstar._schedule.placement import Tier
from patrickstar._step.delayed_update import DelayedUpdates
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.failed_update import give_up
from patrickstar._step.group_update import GroupUpdate
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.lock_free_update import LockFreeUpdates
from patrickstar._step.running_updates import RunningUpdates
from patrickstar._step.staging_pool import StagingPool, StagingSize
from patrickstar._step.streamed_update import StreamedUpdates
from patrickstar._step.update_home import WHOLE, WHOLE_IN_ORDER, InPlace
from patrickstar._step.update_rules import GroupOf, UpdateRules
from patrickstar._step.update_tiers import UpdateTiers
from patrickstar._tiers.chunk import Chunk
from patrickstar.config import Delayed, LockFree
from patrickstar.optim import Optimizer


class OptimizerStep:
    """Optimizer step over all chunks that have gradients."""

    def __init__(
        self,
        data: LocalShards,
        optimizer: Optimizer,
        kernels: Kernels,
        staging_size: StagingSize | None = None,
        buffer_bytes: int = 0,
        update: Delayed | LockFree | None = None,
    ) -> None:
        manager, accelerator = data.manager, data.manager.hardware.accelerator
        self.data = data
        self.rules = UpdateRules(optimizer, kernels, data.manager.device)
        self.kernels = kernels
        self.host_updates: HostUpdates | None = None
        """Updates on the host beside operators; None on a CPU, where both would compete for the cores."""
        if manager.hardware.has_gpu:
            streamed = None
            if accelerator is not None:
                by_pages = all(rule.by_pages for rule in optimizer.default_rules())
                streamed = StreamedUpdates(kernels, accelerator, manager.host_tier, buffer_bytes, by_pages)
            self.host_updates = HostUpdates(kernels, streamed)
        self.home = InPlace(data)
        self.running = RunningUpdates()
        """Updates in progress, except those from disk."""
        self.tiers = UpdateTiers(data, self._waits_for_copies)
        self.disk_step = (
            DiskOptimizerStep(data, kernels, self.rules, self.host_updates, StagingPool(manager, staging_size))
            if staging_size is not None
            else None
        )
        self.together = GroupUpdate.of(optimizer, data, kernels, self.rules)
        """Updates of all parameters together; None if chunks are updated one by one."""
        self.delayed: DelayedUpdates | None = None
        self.lock_free: LockFreeUpdates | None = None
        own = kernels, self.host_updates, self.running, self.disk_step
        if isinstance(update, Delayed):
            self.delayed = DelayedUpdates(data, *own, update.after)
        elif isinstance(update, LockFree):
            self.lock_free = LockFreeUpdates(data, optimizer, self.rules, *own, update)
        self._late_from = None if update is None else update.after
        self.steps = 0
        """Number of steps, with the one that runs."""
        self._in_step = False
        self._backward_id = 0
        """Number of the last backward before the step."""
        self._order: dict[int, None] = {}

    @property
    def order(self) -> list[int]:
        """Chunk indices in the order of their last update; those without one first."""
        known = self.data.by_chunk
        return [*(index for index in known if index not in self._order), *(i for i in self._order if i in known)]

    @property
    def _waits_for_copies(self) -> bool:
        """True if updates on the host wait for the copies of their chunks themselves."""
        return self.host_updates is not None and self.host_updates.waits_for_copies

    @property
    def updating(self) -> bool:
        """True while updates are running or queued."""
        return bool(self.running) or (self.disk_step is not None and bool(self.disk_step.unfinished))

    @property
    def updated_in_part(self) -> list[str]:
        """Names of parameters on disk whose update has begun and not ended."""
        return [] if self.disk_step is None else self.disk_step.updated_in_part

    def run(self, group_of: GroupOf, scales: Sequence[float]) -> None:
        """Update every parameter that has a gradient and a param group; multiply the gradients by `scales` in order.

        Beside an accelerator updates are started: see [Note: running updates]. Late ones are started on every tier:
        see [Note: delayed updates] and [Note: lock-free updates].
        """
        if self.together is not None:
            self.together.run(scales)
            return
        indices, first_use = list(self.data.by_chunk), self.data.tracer.trace.first_use
        if self.host_updates is not None or self.is_late:
            indices.sort(key=first_use)
        lock_free = self.lock_free if self.is_late else None
        if lock_free is not None:
            lock_free.begin_step(self.steps)
        for index in indices:
            if not self.is_late:
                self.update_chunk(index, group_of, scales)
            elif lock_free is None:
                self._delay_chunk(index, group_of, scales)
            else:
                self._buffer_chunk(lock_free, index, group_of, scales)
        if lock_free is not None:
            lock_free.end_step()
        self.running.reorder(first_use)
        if self.disk_step is not None:
            if lock_free is None:  # its queue goes round
                self.disk_step.reorder(first_use)
            self.progress()

    @property
    def is_late(self) -> bool:
        """True if the update of the step that runs, or has run last, is delayed or lock-free."""
        return self._late_from is not None and self.steps >= self._late_from

    @property
    def next_is_late(self) -> bool:
        """True if the update of the next step will be delayed or lock-free."""
        return self._late_from is not None and self.steps + 1 >= self._late_from

    @property
    def staleness(self) -> tuple[float, int]:
        """Updates that the parameters of the present forward lack: mean over elements, and maximum."""
        late = self.delayed or self.lock_free
        return (0.0, 0) if late is None else late.staleness

    def skip(self) -> None:
        """Drop the gradients of the step, which have overflowed."""
        if self.is_late and self.lock_free is not None:
            self.run(lambda managed: None, ())
        else:
            self.flush()

    def begin_step(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """Count a step, unless it repeats one that was interrupted, without a backward in between.

        Args:
            groups: Param group of each parameter.
        """
        repeats = self._in_step and self._backward_id == self.data.backward_id
        if not repeats:
            self.end_step()
            self.steps += 1
        self._in_step, self._backward_id = True, self.data.backward_id
        self.rules.note_updates(self.data, groups)

    @defer_sigint
    def end_step(self, param_groups: Iterable[dict[str, Any]] = ()) -> None:
        """End the step that `begin_step` has begun.

        Args:
            param_groups: Param groups into which the optimizer may write, once per step.
        """
        self.rules.end_step(param_groups)
        self._in_step = False
        if self.delayed is not None:
            self.delayed.end_step()
        if self.lock_free is not None:
            self.lock_free.end_interrupted()

    def resume(self, steps: int) -> None:
        """Go on after this number of steps, from a checkpoint that was loaded."""
        self.steps, self._in_step = steps, False
        if self.lock_free is not None:
            self.lock_free.resume()

    def flush(self) -> None:
        """Finish late updates, and make the newest parameters those that operators read."""
        late = self.delayed or self.lock_free
        if late is not None:
            self.complete()
            late.publish_all()

    def close(self) -> None:
        """End the worker thread."""
        if self.disk_step is not None:
            self.disk_step.cancel_running()
        if self.lock_free is not None:
            self.lock_free.close()
        self.running.clear()
        if self.host_updates is not None:
            self.host_updates.close()

    def progress(self) -> None:
        """Advance deferred updates and a running checkpoint save, without waiting."""
        self.running.finish_done()
        if self.disk_step is not None:
            self.disk_step.progress()
        if self.data.saving is not None:
            self.data.saving.progress()

    def finish_running(self) -> None:
        """Finish the updates that have been started; deferred ones that have not begun stay deferred."""
        self.running.finish()
        if self.disk_step is not None:
            self.disk_step.finish_running()

    def complete(self, managed_params: Sequence[ManagedParam] | None = None) -> None:
        """Wait for updates of these parameters (default: all) that are running or deferred. Raises the first error."""
        if managed_params is None:
            self.running.finish()
            if self.lock_free is not None:
                self.lock_free.complete()
            if self.disk_step is not None:
                self.disk_step.finish()
        elif self.running or self.disk_step is not None:
            chunks = [managed.shard_chunk for managed in managed_params]
            for chunk in chunks:
                chunk.finish_update()
            deferred = {chunk.index for chunk in chunks if chunk.end_deferred is not None}
            if deferred and self.disk_step is not None:
                self.disk_step.finish(deferred)  # together: pages of one are updated while those of others are read

    @defer_sigint
    def update_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float], *, first: bool = False) -> None:
        """Update the parameters of one chunk, as `run` does; `first`: before updates that have not begun."""
        managed_params = self.data.by_chunk[index]
        if not managed_params[0].schema.trained:
            return
        if any(managed.state.update_pending for managed in managed_params):
            assert not any(managed.has_gradient for managed in managed_params), (
                f"a gradient of chunk {index} has arrived before its last update has ended"
            )
            return
        if any(managed.has_gradient for managed in managed_params):
            self.data.before_update(index)
            self.note_order(index)
        self.tiers.move(index, managed_params)
        rules = self.rules.next(managed_params, group_of)
        if not rules:
            return
        chunks = self.data.state_chunks(index)
        if not chunks[0].in_memory:
            assert self.disk_step is not None, "without a disk all chunks are in memory"
            self.disk_step.submit(index, rules, scales, self.home)
            return
        used = [managed_params[0].shard_chunk, *chunks, *self.data.gradient_sums(index)]
        self.rules.make_room(self.data, rules, used, on_device=chunks[0].device.valid)
        try:
            with profiler_range("update", profiled_names(rules)):
                renewed = self._host_copy_to_renew(index, rules, chunks)
                running, used = self._start(rules, scales, chunks, first, renewed)
        except BaseException as error:
            give_up(self.data, rules, error)
            raise
        for chunk in (managed_params[0].shard_chunk, *chunks):
            self.data.manager.mark_written(chunk, on_device=chunk.device.valid)
        self.home.begin(rules)
        if running is None:
            self.data.end_update(rules)
        else:
            self.running.add(running, used, partial(self._finish, running, rules, renewed), renewed)

    @defer_sigint
    def _delay_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float]) -> None:
        """End the delayed update of one chunk, and start the next one."""
        managed_params = self.data.by_chunk[index]
        if self.delayed is None or not managed_params[0].schema.trained or not self.delayed.begin_chunk(index):
            return
        self.complete(managed_params)  # of the last step that was not delayed
        self.delayed.list_of(index).complete_update()
        if any(managed.has_gradient for managed in managed_params):
            self.data.before_update(index)
            self.note_order(index)
        self.tiers.move(index, managed_params)
        self.delayed.update(index, self.rules.next(managed_params, group_of), scales)

    @defer_sigint
    def _buffer_chunk(self, lock_free: LockFreeUpdates, index: int, group_of: GroupOf, scales: Sequence[float]) -> None:
        """Add the gradients of one chunk to the buffers, and replace them by the newest parameters."""
        managed_params = self.data.by_chunk[index]
        if not managed_params[0].schema.trained:
            return
        self.complete(managed_params)  # of the last step that was not lock-free
        with_gradient = [managed for managed in managed_params if managed.has_gradient]
        if with_gradient or lock_free.buffer.pending(index):
            self.data.before_update(index)
            self.note_order(index)
        tier = self.tiers.tier_of(index)
        if tier is not Tier.DISK:
            lock_free.withdraw_from_disk(index)
        if tier is not Tier.DISK or self.data.state_chunks(index)[0].in_memory:
            self.tiers.move(index, managed_params, tier)  # waits for pages that are being written
        lock_free.accept(index, {managed: group_of(managed) for managed in with_gradient}, scales)

    def note_order(self, index: int) -> None:
        """Record that the chunks of an index are updated next."""
        self._order.pop(index, None)
        self._order[index] = None

    @defer_sigint
    def _finish(self, running: Transfer, rules: Mapping[ManagedParam, Rule], renewed: Chunk | None) -> None:
        """Wait for the update of one chunk's parameters; `renewed`: their chunk if its host copy was written."""
        try:
            running.wait()
        except BaseException as error:
            running.cancel()  # Ctrl-C may have interrupted the wait
            give_up(self.data, rules, error)
            raise
        if renewed is not None:
            self.renew(renewed, urgent=True)
        self.data.end_update(rules)
        if renewed is not None:
            self.data.update_param_views()

    def renew(self, chunk: Chunk, *, urgent: bool) -> None:
        """Make the host copy of a chunk, which an update has written, the valid one."""
        if chunk.held:
            self.data.manager.withdraw_hold(chunk)  # its device memory is filled anew, or freed
        self.data.manager.transfers.host_renewed(chunk, urgent)

    def _host_copy_to_renew(
        self, index: int, rules: Mapping[ManagedParam, Rule], chunks: Sequence[Chunk]
    ) -> Chunk | None:
        """Return the chunk of the parameters if its update beside an accelerator is to write the host copy.

        Then both copies are valid once it has been copied to the device, and an eviction needs no copy. Every parameter
        in it has to be updated, since the host copy of others may be old.
        """
        on_host = self.host_updates is not None and not chunks[0].device.valid
        param16 = next(iter(rules)).shard_chunk
        whole = all(managed in rules for managed in self.data.by_chunk[index] if managed.location.numel)
        return param16 if on_host and whole and param16.device.valid and param16.host.present else None

    def _start(
        self,
        rules: Mapping[ManagedParam, Rule],
        scales: Sequence[float],
        chunks: Sequence[Chunk],
        urgent: bool,
        renewed: Chunk | None,
    ) -> tuple[Transfer | None, list[Chunk]]:
        """Update one chunk's parameters; beside an accelerator, start to. `renewed`: write them to its host copy.

        Returns:
            What may still be running, and the chunks that it uses.
        """
        manager, on_host = self.data.manager, not chunks[0].device.valid
        updates, shard_chunk = self.host_updates if on_host else None, next(iter(rules)).shard_chunk
        in_order = on_host and self._waits_for_copies
        part = WHOLE_IN_ORDER if in_order else WHOLE
        if not in_order:
            manager.transfers.settle(shard_chunk)
        spans = [self.home.span(managed, rule, part) for managed, rule in rules.items()]
        if renewed is not None:
            on_host_copy = [renewed.flat_on_host(each.location.offset, each.location.numel) for each in rules]
            spans = [replace(span, param=param) for span, param in zip(spans, on_host_copy, strict=True)]
        if shard_chunk.device.valid and on_host:
            for managed in rules:
                numel, by_kernel = managed.location.numel, self.host_updates is not None
                copied = self.home.count_transfers(managed, numel, upload=renewed is None, by_kernel=by_kernel)
                managed.chunk.transferred_bytes += copied
        used = [shard_chunk, *chunks, *self.data.gradient_sums(shard_chunk.index)]
        if updates is not None:
            running = updates.start(spans, scales, used, urgent)
            if any(rule.needs_shape for rule in rules.values()):
                running.wait()  # while the device has room for its products of matrices
            return running, used
        self.kernels.update(spans, scales)
        return None, used
