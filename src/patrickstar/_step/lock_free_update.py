"""Lock-free updates: each page is updated once the disk has delivered its states (Angel-PTM §4.3, Algorithm 2)."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.failed_update import give_up
from patrickstar._step.gradient_buffer import BufferedPage, GradientBuffer, by_chunk
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.pages_in_memory import PagesInMemory
from patrickstar._step.running_updates import RunningUpdates
from patrickstar._step.update_log import LoggedRun, UpdateLog, UpdateRecord
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


@dataclass(eq=False)
class _HostUpdate:
    """Update of a chunk whose states are on the host, beside operators of an accelerator."""

    running: Transfer
    pages: Sequence[BufferedPage]


class LockFreeUpdates:
    """Updates of pages at the speed of the disk. See [Note: lock-free updates].

    Args:
        host_updates: Updates on the host beside operators; None on a CPU.
        running: Updates in progress, to which those of states on the host are added.
        disk_step: Updates of states on disk; None without a disk.
    """

    def __init__(
        self,
        data: LocalShards,
        optimizer: Optimizer,
        update_rules: UpdateRules,
        kernels: Kernels,
        host_updates: HostUpdates | None,
        running: RunningUpdates,
        disk_step: DiskOptimizerStep | None,
        options: LockFree,
    ) -> None:
        self.data = data
        self.options = options
        self.staleness: tuple[float, int] = (0.0, 0)
        """Gradients that the parameters of the present forward lack: mean over elements, and maximum."""
        self._host_updates = host_updates
        self._running, self._disk_step = running, disk_step
        self._by_pages = all(rule.by_pages for rule in optimizer.default_rules())
        self.buffer = GradientBuffer(data, update_rules, self._page_numel)
        self._in_memory = PagesInMemory(data, kernels, self.buffer)
        self._on_host: dict[int, _HostUpdate] = {}
        data.before_write = self._queue_again
        self._replay = None if options.replay is None else LoggedRun(options.replay)
        self._log: UpdateLog | None = None
        self._in_progress = False
        """True from the beginning to the end of a step, also if it was interrupted."""
        self._group_options: dict[int, Mapping[str, Any]] = {}
        """Copies of the options of param groups in the present step, by the group's id."""

    def _page_numel(self, master: Chunk) -> int:
        if not self._by_pages:
            return master.numel
        disk = self.data.manager.disk_tier
        if disk is None and self._replay is not None and str(master.index) in self._replay.pages:
            return int(self._replay.pages[str(master.index)]["page_numel"])
        return (PAGE_BYTES if disk is None else disk.page_bytes) // master.dtype.itemsize

    def open_log(self) -> None:
        """Open the log, once all parameters are in chunks. Raises ConfigError, also if the replayed one differs."""
        if self._replay is not None:
            self._replay.check_any(self._run_options, self.buffer.describe())
        if self.options.log is not None:
            self._log = UpdateLog(self.options.log, self._run_options)

    @property
    def _run_options(self) -> dict[str, Any]:
        """Options on which the results of a run depend."""
        return {"after": self.options.after, "gradient_dtype": self.options.gradient_dtype}

    # The step

    def begin_step(self, step: int) -> None:
        """Begin a step: end the updates that run, and those that may not wait any longer. Raises TrainingError."""
        self._end_running()
        for index in list(self._on_host):
            self._end_or_withdraw(index, step)
        if self._in_progress:
            return  # it goes on after an interruption
        if self._replay is not None:
            self._replay.check(step, self._run_options, self.buffer.describe())
            self._repeat([record for record in self._replay.at(step) if record.last < step])
        else:
            self._update_overdue([page for page in self.buffer.pending() if self._is_overdue(page, step)])
            self._end_running()  # pages that were updated beside the last overdue one
        self._open(step)

    @defer_sigint
    def _open(self, step: int) -> None:
        self._group_options.clear()
        self.buffer.step, self._in_progress = step, True

    def _end_running(self) -> None:
        """End the updates of pages from disk that have begun."""
        if self._disk_step is not None:
            self._disk_step.finish_running()

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
            if missing := [page for page in overdue if not page.queued]:  # an interrupted step has not queued them
                self._start(index, missing)
        if on_disk:
            assert self._disk_step is not None, "without a disk all chunks are in memory"
            late = {page.index for page in on_disk}
            self._disk_step.finish_pages(late, lambda: not any(page.pending for page in on_disk))

    @defer_sigint
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
                self._in_memory.update(index, self.buffer.pending(index))
            for managed in self.data.by_chunk[index]:
                if managed in self.buffer.renewed:
                    self.buffer.renew(managed)
                    torch.autograd.graph.increment_version(managed.param)
        except BaseException as error:
            self.withdraw_from_disk(index)
            self._give_up({*nonempty, *self.buffer.rules(self.buffer.pending(index))}, error)
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
        managed.state.late = True

    def _updates_in_step(self, index: int) -> bool:
        """Return whether the states of a chunk are updated in the step."""
        states = self.data.state_chunks(index)[0]
        return states.in_memory and (self._host_updates is None or states.device.valid)

    def end_step(self) -> None:
        """End a step: queue the updates of its gradients, and log those that its parameters contain."""
        if self._replay is None:
            self._queue()
        self.end_interrupted()

    @defer_sigint
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
        waiting = by_chunk(page for page in self.buffer.pending() if not page.queued)
        for index in sorted(waiting, key=lambda each: (min(p.oldest for p in waiting[each]), -first_use(each))):
            self._start(index, waiting[index])

    @defer_sigint
    def _start(self, index: int, pages: Sequence[BufferedPage]) -> None:
        """Start or queue the update of some pages of a chunk."""
        for page in pages:
            page.queued = True
        if not self.data.state_chunks(index)[0].in_memory:
            self._submit(index, pages)
            return
        assert self._host_updates is not None, "states in memory are updated in the step"
        rules, used = self.buffer.rules(pages), [*self.data.state_chunks(index), *self.buffer.chunks(index)]
        try:
            running = self._host_updates.start(self._in_memory.spans(index, pages), (), used)
        except BaseException as error:
            self._give_up(rules, error)
            raise
        self._in_memory.mark_written(index)
        self._on_host[index] = _HostUpdate(running, pages)
        self._running.add(running, used, partial(self._end_on_host, index))

    def _submit(self, index: int, pages: Sequence[BufferedPage]) -> None:
        assert self._disk_step is not None, "without a disk all chunks are in memory"
        ranges = [(page.first, page.numel) for page in pages]
        self._disk_step.submit(index, self.buffer.rules(pages), (), self.buffer, ranges)

    @defer_sigint
    def _end_on_host(self, index: int) -> None:
        """Wait for the update of a chunk whose states are on the host."""
        update = self._on_host.pop(index)
        try:
            update.running.wait()
        except BaseException as error:
            update.running.cancel()
            self._give_up(self.buffer.rules(update.pages), error)
            raise
        for page in update.pages:
            self.buffer.note_update(index, page.first)

    @defer_sigint
    def _end_or_withdraw(self, index: int, step: int) -> None:
        """End the update of a chunk whose states are on the host, or withdraw it if it has not begun and may wait."""
        update = self._on_host[index]
        overdue = any(self._is_overdue(page, step) for page in update.pages)
        if not overdue and update.running.withdraw():
            self._running.discard(update.running)
            del self._on_host[index]
            for page in update.pages:
                page.queued = False
        else:
            self._running.finish_one(update.running)

    @defer_sigint
    def withdraw_from_disk(self, index: int) -> None:
        """Withdraw the queued updates of a chunk whose states are about to move."""
        if self._disk_step is None:
            return
        for update in self._disk_step.buffered(index):
            self._disk_step.remove(update)
        for page in self.buffer.pages(index):
            page.queued = False

    def _queue_again(self, index: int) -> None:
        """Let the queued pages of a chunk be read again, since the caller will write them."""
        waiting = self.buffer.queued(index)
        if waiting and not self.data.state_chunks(index)[0].in_memory:
            self.withdraw_from_disk(index)
            self._start(index, waiting)

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
            if self.data.state_chunks(index)[0].in_memory:
                rules = self.buffer.rules(pages)
                try:
                    self._in_memory.update(index, pages)
                except BaseException as error:
                    self._give_up(rules, error)
                    raise
            else:
                on_disk.append(index)
                self._submit(index, sorted(pages, key=lambda page: page.first))
        if on_disk:
            assert self._disk_step is not None, "without a disk all chunks are in memory"
            self._disk_step.finish(on_disk)

    # The end of staleness

    def complete(self) -> None:
        """Make all updates for which there are gradients."""
        if self._disk_step is not None:
            self._disk_step.finish()
        for update in list(self._on_host.values()):
            self._running.finish_one(update.running)
        self._update_all(by_chunk(self.buffer.pending()))

    def publish_all(self) -> None:
        """Make the newest parameters those that operators read. All updates have ended."""
        for managed in self.data.managed_params:
            self._publish(managed)
        self.data.update_param_views()
        self._end_flush()

    @defer_sigint
    def _end_flush(self) -> None:
        self.buffer.forget_updates()
        self.staleness, self._in_progress = (0.0, 0), False
        self._write_log(flush=True)

    @defer_sigint
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

    def _give_up(self, failed: Collection[ManagedParam], error: BaseException) -> None:
        """Drop the gradients of parameters whose update has failed."""
        if failed:
            self.buffer.give_up(failed)
            give_up(self.data, failed, error)
