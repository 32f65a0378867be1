"""Lock-free updates: each page is updated once the disk has delivered its states (Angel-PTM §4.3, Algorithm 2)."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.gradient_buffer import BufferedPage, GradientBuffer, by_chunk
from patrickstar._step.update import Update, give_up
from patrickstar._step.update_dispatch import Updates
from patrickstar._step.update_log import LoggedRun, UpdateLog, UpdateRecord, log_of_rank
from patrickstar._step.update_rules import UpdateRules
from patrickstar._tiers.chunk import Chunk
from patrickstar.config import LockFree
from patrickstar.errors import TrainingError
from patrickstar.optim import Optimizer

# [Note: lock-free updates]
# The host has two buffers: for each parameter the sum of the gradients that no update has used, and its newest values.
# `optimizer.step()` number i adds the gradients g(i), scaled and clipped as in that step, to the sums, and copies the
# newest values into the parameters' place. Between the steps pages are updated whose states have been read from disk:
# the update takes all of the sum, and writes masters, states and newest values. So forward and backward read the same
# values, and do not wait for the disk.
#
# A step never begins while a page is being updated: the pages whose update has begun are finished first, which takes
# no I/O. It waits for others only if their oldest gradient would otherwise be older than `max_staleness` steps. The
# queue of pages goes round: a page is queued at the end once its last update has ended and a gradient has been added,
# in the reverse order of the layers, as in the paper.
#
# States in memory: beside an accelerator their update runs beside operators, too, or stays in the queue until the next
# step. On a CPU, where it would take the operators' cores, it runs in the step and uses the gradient of that step.
#
# Which page was updated when depends on the disk. So each update is recorded: its page, the first and the last step
# whose gradients it has used, and the step after which a forward first read its results. With these records a replay
# gives the same bits on any tier: before it adds g(i) it makes the updates that use older gradients, after that those
# that use g(i).
#
# The step count of an update is the number of updates of its page. `flush` makes the counts of a parameter's pages
# equal to the largest, so that checkpoints have one.


class LockFreeUpdates:
    """Updates of pages at the speed of the disk. See [Note: lock-free updates]."""

    def __init__(
        self, data: LocalShards, optimizer: Optimizer, update_rules: UpdateRules, updates: Updates, options: LockFree
    ) -> None:
        self.data = data
        self.options = options
        self.staleness: tuple[float, int] = (0.0, 0)
        """Gradients that the parameters of the present forward lack: mean over elements, and maximum."""
        self._updates = updates
        self._by_pages = all(rule.by_pages for rule in optimizer.default_rules())
        self.buffer = GradientBuffer(data, update_rules, self._page_numel)
        self._replay = None if options.replay is None else LoggedRun(log_of_rank(options.replay, data.world))
        self._log: UpdateLog | None = None
        self._in_progress = False
        """True from the beginning to the end of a step, also if it was interrupted."""
        self._group_options: dict[int, Mapping[str, Any]] = {}
        """Copies of the options of param groups in the present step, by the group's id."""

    def _page_numel(self, states: Sequence[Chunk]) -> int:
        if not self._by_pages:
            return states[0].numel
        disk, index = self.data.manager.disk_tier, str(states[0].index)
        if disk is None and self._replay is not None and index in self._replay.pages:
            return int(self._replay.pages[index]["page_numel"])
        itemsize = max(chunk.dtype.itemsize for chunk in states)
        return (PAGE_BYTES if disk is None else disk.page_bytes) // itemsize

    def open_log(self) -> None:
        """Open the log, once all parameters are in chunks. Raises ConfigError, also if the replayed one differs."""
        if self._replay is not None:
            self._replay.check_any(self._run_options, self.buffer.describe())
        if self.options.log is not None:
            self._log = UpdateLog(log_of_rank(self.options.log, self.data.world), self._run_options)

    @property
    def _run_options(self) -> dict[str, Any]:
        """Options on which the results of a run depend."""
        return {"after": self.options.after, "gradient_dtype": self.options.gradient_dtype}

    # The step

    def begin_step(self, step: int) -> None:
        """Begin a step: end the updates that run, and those that may not wait any longer. Raises TrainingError."""
        for update in self._queued():
            interruption_point()
            if update.running is not None:
                self._end_or_withdraw(update, step)
        begins = not self._in_progress  # else it goes on after an interruption
        if begins and self._replay is not None:
            self._replay.check(step, self._run_options, self.buffer.describe())
            self._repeat([record for record in self._replay.at(step) if record.last < step])
        elif begins:
            self._update_overdue([page for page in self.buffer.pending() if self._is_overdue(page, step)])
        self._updates.queue.finish(on_disk=True)  # also pages that were updated beside the last overdue one
        if begins:
            self._open(step)

    def _open(self, step: int) -> None:
        self._group_options.clear()
        self.buffer.step, self._in_progress = step, True

    def _queued(self, index: int | None = None) -> list[Update]:
        """Return the updates, of one chunk or of all, that are queued or run."""
        queued = [update for update in self._updates.queue.updates if update.home is self.buffer]
        return [update for update in queued if index is None or update.index == index]

    def _is_overdue(self, page: BufferedPage, step: int) -> bool:
        """Return whether the forward after a step may not lack the gradients of a page."""
        return page.oldest <= step - self.options.max_staleness

    def _update_overdue(self, pages: Sequence[BufferedPage]) -> None:
        """Update pages, and wait."""
        on_disk = []
        for index, overdue in by_chunk(pages).items():
            if self.data.state_chunks(index)[0].in_memory:
                self._update_all({index: overdue})
                continue
            on_disk += overdue
            queued = self.buffer.pages_in(self._queued(index))
            if missing := [page for page in overdue if page not in queued]:  # an interrupted step has not queued them
                self._updates.start(self._update(index, missing))
        if on_disk:
            assert self._updates.disk is not None, "without a disk all chunks are in memory"
            late = {page.index for page in on_disk}
            self._updates.disk.finish_pages(late, lambda: not any(page.pending for page in on_disk))

    def accept(
        self, index: int, groups: Mapping[ManagedParam, Mapping[str, Any] | None], scales: Sequence[float]
    ) -> None:
        """Add the gradients of one chunk to the sums, and make the newest values those that operators read.

        Args:
            groups: Param group of each parameter with a gradient; the gradient of one without is dropped.
        """
        nonempty = [managed for managed in groups if managed.location.numel]
        self.buffer.accepted[index] = self.buffer.step
        try:
            for managed in nonempty:
                self._accept(managed, groups[managed], scales)
            if self._replay is not None:
                used = [record for record in self._replay.at(self.buffer.step) if record.last == self.buffer.step]
                self._repeat([record for record in used if record.chunk == index])
            elif self._updates_in_step(index):
                self._updates.run(self._update(index, self.buffer.pending(index)))
            for managed in self.data.by_chunk[index]:
                if managed in self.buffer.renewed:
                    self.buffer.renew(managed)
                    torch.autograd.graph.increment_version(managed.param)
        except BaseException as error:
            self.withdraw_from_disk(index)
            failed = {*nonempty, *self.buffer.rules(self.buffer.pending(index))}
            self.buffer.forget(failed)
            give_up(self.data, failed, error)
            raise
        self.data.update_param_views()

    def _accept(self, managed: ManagedParam, group: Mapping[str, Any] | None, scales: Sequence[float]) -> None:
        """Add the gradient of one parameter to the sums, and put its newest values into its place."""
        was_delayed = managed.state.late
        if group is not None:
            if id(group) not in self._group_options:
                unchanging = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                self._group_options[id(group)] = unchanging
            self.buffer.add(managed, self._group_options[id(group)], scales)
        if was_delayed:
            self.buffer.renewed.add(managed)
        else:
            if managed.overlays_shard:
                self.data.restore_own(managed)
            self.buffer.fill(managed)
        self.data.end_update([managed])
        managed.state.late = was_delayed or group is not None

    def _updates_in_step(self, index: int) -> bool:
        """Return whether the states of a chunk are updated in the step."""
        states = self.data.state_chunks(index)[0]
        return states.in_memory and (self._updates.host is None or states.device.valid)

    def end_step(self) -> None:
        """End a step: queue the updates of its gradients, and log those that its parameters contain."""
        if self._replay is None:
            self._queue()
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """End a step that was interrupted and will not be repeated, if there is one."""
        if self._in_progress:
            self.staleness = self.buffer.staleness
            self._in_progress = False
            self._write_log()

    def resume(self) -> None:
        """Go on with the step after a checkpoint that was loaded."""
        self.buffer.step, self._in_progress = 0, False
        if self._log is not None:
            self._log.resume()

    def _queue(self) -> None:
        first_use = self.data.tracer.trace.first_use
        queued = set(self.buffer.pages_in(self._queued()))
        waiting = by_chunk(page for page in self.buffer.pending() if page not in queued)
        for index in sorted(waiting, key=lambda each: (min(p.oldest for p in waiting[each]), -first_use(each))):
            self._updates.start(self._update(index, waiting[index]))

    def _update(self, index: int, pages: Sequence[BufferedPage]) -> Update:
        """Return the update of some pages of a chunk with the gradients that they have."""
        return Update(index, self.buffer.rules(pages), (), self.buffer, pages)

    def _end_or_withdraw(self, update: Update, step: int) -> None:
        """End the update of a chunk whose states are on the host, or withdraw it if it has not begun and may wait."""
        overdue = any(self._is_overdue(page, step) for page in self.buffer.pages_in([update]))
        if not overdue and update.running is not None and update.running.withdraw():
            self._updates.queue.remove(update)
        else:
            self._updates.finish(update)

    def withdraw_from_disk(self, index: int) -> None:
        """Withdraw the queued updates of a chunk whose states are about to move."""
        for update in self._queued(index):
            if update.lists and self._updates.disk is not None:
                self._updates.disk.remove(update)

    def before_write(self, index: int) -> None:
        """Let the queued pages of a chunk be read again, since the caller will write them."""
        waiting = self.buffer.pages_in(self._queued(index))
        if waiting and not self.data.state_chunks(index)[0].in_memory:
            self.withdraw_from_disk(index)
            self._updates.start(self._update(index, sorted(waiting, key=lambda page: page.first)))

    # Updates at once

    def _repeat(self, records: Iterable[UpdateRecord]) -> None:
        """Make the updates of a log. Raises TrainingError if this run has taken another course."""
        repeated = []
        for record in records:
            page = self.buffer.pages(record.chunk)[record.page]
            if not page.pending and page.used == (record.first, record.last):
                continue  # it was made when the state was read
            if not page.pending or page.oldest != record.first or page in repeated:
                found = f"has gradients since step {page.oldest}" if page.pending else "has no gradients"
                raise TrainingError(
                    f"the replay differs from the log {str(self.options.replay)!r}: an update of page {record.page} of "
                    f"chunk {record.chunk} used gradients of steps {record.first} to {record.last}, but the page "
                    f"{found}. Run the same loop with the same data, saves, flushes and reads of states, from the same "
                    f"checkpoint"
                )
            repeated.append(page)
        self._update_all(by_chunk(repeated))

    def _update_all(self, pages_by_chunk: Mapping[int, Sequence[BufferedPage]]) -> None:
        """Update pages that are not queued, and wait."""
        on_disk = []
        for index, pages in pages_by_chunk.items():
            self.data.before_update(index)
            if not self.data.state_chunks(index)[0].in_memory:
                pages = sorted(pages, key=lambda page: page.first)
            update = self._update(index, pages)
            self._updates.start(update, beside=False)
            on_disk += [index] if update.lists else []
        if on_disk and self._updates.disk is not None:
            self._updates.disk.finish(on_disk)

    # The end of staleness

    def complete(self) -> None:
        """Make all updates for which there are gradients. Those in memory that ran have ended."""
        if self._updates.disk is not None:
            self._updates.disk.finish_all()
        self._update_all(by_chunk(self.buffer.pending()))

    def publish_all(self) -> None:
        """Make the newest parameters those that operators read. All updates have ended."""
        self.data.agree_on_steps()
        for managed in self.data.managed_params:
            interruption_point()
            self._publish(managed)
        self.data.update_param_views()
        self._end_flush()

    def _end_flush(self) -> None:
        self.buffer.forget_updates()
        self.staleness, self._in_progress = (0.0, 0), False
        self._write_log(flush=True)

    def _publish(self, managed: ManagedParam) -> None:
        if not managed.state.late:
            return
        if not managed.overlays_shard:  # else the gradient is discarded by rounding the master
            self.buffer.renew(managed)
            torch.autograd.graph.increment_version(managed.param)
        self.buffer.renewed.discard(managed)
        managed.state.end_late(managed.param._version)

    def _write_log(self, *, flush: bool = False) -> None:
        if self._log is not None and self.buffer.step:
            self._log.write(self.buffer.step, self.buffer.records, self.buffer.describe(), flush=flush)
        self.buffer.records.clear()

    def close(self) -> None:
        """Write the last updates to the log, and close it."""
        if self._log is not None:
            self._write_log(flush=True)
            self._log.close(self.buffer.describe())
