"""Optimizer step, chunk by chunk, on the tier of the optimizer chunks (PatrickStar's hybrid Adam, §8.2)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._kernels.dispatch import Kernels
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.placement import Tier
from patrickstar._step.delayed_update import DelayedUpdates
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.gradient_buffer import InBuffer
from patrickstar._step.group_update import GroupUpdate
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.lock_free_update import LockFreeUpdates
from patrickstar._step.staging_pool import StagingPool, StagingSize
from patrickstar._step.streamed_update import StreamedUpdates
from patrickstar._step.update import InHostCopy, InPlace, Rules, Update
from patrickstar._step.update_dispatch import Updates
from patrickstar._step.update_queue import UpdateQueue
from patrickstar._step.update_rules import GroupOf, UpdateRules
from patrickstar._step.update_tiers import UpdateTiers
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
        host = None
        if manager.hardware.has_gpu:
            streamed = None
            if accelerator is not None:
                by_pages = all(rule.by_pages for rule in optimizer.default_rules())
                streamed = StreamedUpdates(kernels, accelerator, manager.host_tier, buffer_bytes, by_pages)
            host = HostUpdates(kernels, streamed)
        queue, disk = UpdateQueue(), None
        if staging_size is not None:
            staging_pool = StagingPool(manager, staging_size)
            disk = DiskOptimizerStep(data, kernels, self.rules, queue, host, staging_pool)
        self.updates = Updates(data, kernels, queue, host, disk)
        self.tiers = UpdateTiers(data, host is not None and host.waits_for_copies)
        self._in_place, self._host_copy, self._in_buffer = InPlace(data), InHostCopy(data), InBuffer(data)
        self.together = GroupUpdate.of(optimizer, data, kernels, self.rules)
        """Updates of all parameters together; None if chunks are updated one by one."""
        self.delayed: DelayedUpdates | None = None
        self.lock_free: LockFreeUpdates | None = None
        if isinstance(update, Delayed):
            self.delayed = DelayedUpdates(data, self.updates, update.after)
        elif isinstance(update, LockFree):
            self.lock_free = LockFreeUpdates(data, optimizer, self.rules, self.updates, update)
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

    def run(self, group_of: GroupOf, scales: Sequence[float]) -> None:
        """Update every parameter that has a gradient and a param group; multiply the gradients by `scales` in order.

        Beside an accelerator updates are started: see [Note: running updates]. Late ones are started on every tier:
        see [Note: delayed updates] and [Note: lock-free updates].
        """
        if self.together is not None:
            self.together.run(scales)
            return
        indices, first_use = list(self.data.by_chunk), self.data.tracer.trace.first_use
        if self.updates.host is not None or self.is_late:
            indices.sort(key=first_use)
        lock_free = self.lock_free if self.is_late else None
        if lock_free is not None:
            lock_free.begin_step(self.steps)
        for index in indices:
            interruption_point()
            if not self.is_late:
                self.update_chunk(index, group_of, scales)
            elif lock_free is None:
                self._delay_chunk(index, group_of, scales)
            else:
                self._buffer_chunk(lock_free, index, group_of, scales)
        if lock_free is not None:
            lock_free.end_step()
        self.updates.queue.reorder(first_use)
        if self.updates.disk is not None:
            if lock_free is None:  # its queue goes round
                self.updates.disk.reorder(first_use)
            self.updates.progress()

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
        """End all updates, the log and the worker threads."""
        try:
            if self.lock_free is not None:
                self.lock_free.close()
        finally:
            self.updates.close()

    def complete(self) -> None:
        """Wait for all updates that are running or deferred. Raises the first error."""
        self.updates.queue.finish(on_disk=False)
        if self.lock_free is not None:
            self.lock_free.complete()
        if self.updates.disk is not None:
            self.updates.disk.finish_all()

    def before_write(self, index: int) -> None:
        """Let no late update of a chunk write a page that it has read before the caller writes it."""
        if self.lock_free is not None:
            self.lock_free.before_write(index)

    def update_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float], *, first: bool = False) -> None:
        """Update the parameters of one chunk, as `run` does; `first`: before updates that have not begun."""
        managed_params = self.data.by_chunk[index]
        if not managed_params[0].schema.trained:
            return
        if any(managed.state.update_pending for managed in managed_params):
            if not any(managed.has_gradient for managed in managed_params):
                return
            self.updates.complete(managed_params)  # of those that backward has updated
        if any(managed.has_gradient for managed in managed_params):
            self.before_update(index)
        self.tiers.move(index, managed_params)
        rules = self.rules.next(managed_params, group_of)
        if not rules:
            return
        if (states := self.data.state_chunks(index)[0]).in_memory:
            self.rules.make_room(self.data, rules, self._in_place.used(index), on_device=states.device.valid)
        self.updates.start(Update(index, rules, scales, self._home_of(index, rules)), urgent=first)

    def _home_of(self, index: int, rules: Rules) -> InPlace:
        """Return where the update of a chunk writes: to the host copy, if it is on the host beside an accelerator.

        Then every parameter in the chunk has to be updated, since the host copy of others may be old; and where the
        parameters are the upper halves of split masters, it has to have them.
        """
        schema, param16 = next(iter(rules)).schema, next(iter(rules)).shard_chunk
        if schema.splits and not schema.gradients_beside:
            return self._in_buffer
        states = self.data.state_chunks(index)[0]
        on_host = self.updates.host is not None and states.in_memory and not states.device.valid
        whole = all(managed in rules for managed in self.data.by_chunk[index] if managed.location.numel)
        has_copy = param16.host.valid if schema.gradients_beside else param16.host.present
        renews = on_host and whole and param16.device.valid and has_copy
        return self._host_copy if renews else self._in_place

    def _delay_chunk(self, index: int, group_of: GroupOf, scales: Sequence[float]) -> None:
        """End the delayed update of one chunk, and start the next one."""
        managed_params = self.data.by_chunk[index]
        if self.delayed is None or not managed_params[0].schema.trained or not self.delayed.begin_chunk(index):
            return
        self.updates.complete(managed_params)  # of the last step that was not delayed
        self.delayed.list_of(index).complete_update()
        if any(managed.has_gradient for managed in managed_params):
            self.before_update(index)
        self.tiers.move(index, managed_params)
        self.delayed.update(index, self.rules.next(managed_params, group_of), scales)

    def _buffer_chunk(self, lock_free: LockFreeUpdates, index: int, group_of: GroupOf, scales: Sequence[float]) -> None:
        """Add the gradients of one chunk to the buffers, and replace them by the newest parameters."""
        managed_params = self.data.by_chunk[index]
        if not managed_params[0].schema.trained:
            return
        self.updates.complete(managed_params)  # of the last step that was not lock-free
        with_gradient = [managed for managed in managed_params if managed.has_gradient]
        if with_gradient or lock_free.buffer.pending(index):
            self.before_update(index)
        tier = self.tiers.tier_of(index)
        if tier is not Tier.DISK:
            lock_free.withdraw_from_disk(index)
        if tier is not Tier.DISK or any(chunk.in_memory for chunk in self.data.state_chunks(index)):
            self.tiers.move(index, managed_params, tier)  # waits for pages that are being written
        lock_free.accept(index, {managed: group_of(managed) for managed in with_gradient}, scales)

    def before_update(self, index: int) -> None:
        """Note that the chunks of an index are updated next."""
        self.data.before_update(index)
        self._order.pop(index, None)
        self._order[index] = None
