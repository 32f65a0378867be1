"""Optimizer step of chunks whose states are on disk: read pages, update them, write them back, in a pipeline."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from patrickstar._hardware.defer_sigint import defer_sigint
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.disk_update import DiskUpdate
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.read_ahead import ReadAhead
from patrickstar._step.running_updates import EndOfUpdate, RunningUpdates
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._step.update_home import Home, Page
from patrickstar._step.update_rules import UpdateRules

# [Note: deferred updates]
# A parameter must be updated before its next use, but not earlier. So `optimizer.step()` queues the updates and
# returns. Pages are read ahead in the order in which the next forward uses the parameters. Pages whose reads have
# finished are updated at the end of each operator; an operator that uses a parameter with a deferred update waits for
# that update. On a CPU the update runs between operators, so that both can use all cores; only disk I/O overlaps with
# operators. Beside an accelerator a worker thread runs it, and it is finished at the end of an operator: see
# [Note: updates beside an accelerator] and [Note: running updates]. Until the update, the gradient overlays the
# parameter and `update_pending` is set: no code may use that gradient for anything else.


class DiskOptimizerStep:
    """Queue of updates whose pages pass through the staging pool; see [Note: deferred updates]."""

    def __init__(
        self,
        data: LocalShards,
        kernels: Kernels,
        update_rules: UpdateRules,
        host_updates: HostUpdates | None,
        staging_pool: StagingPool,
    ) -> None:
        self.data = data
        self.staging_pool = staging_pool
        self.read_ahead = ReadAhead(data, staging_pool)
        self.late: set[int] = set()
        """Indices of chunks whose parameters were needed before the pages of their update had been read."""
        self._kernels, self._update_rules, self._host_updates = kernels, update_rules, host_updates
        self._updates: list[DiskUpdate] = []
        self._aborted: list[DiskUpdate] = []
        """Updates that ended because bytes of chunks were lost."""
        self._running = RunningUpdates(in_order=True)

    @property
    def unfinished(self) -> set[int]:
        """Indices of chunks with an update that is queued, speculative ones excepted."""
        return {update.index for update in self._updates if not update.home.speculative}

    @property
    def updated_in_part(self) -> list[str]:
        """Names of the parameters whose update has begun and not ended, also if an error has ended it."""
        begun = [update for update in (*self._aborted, *self._updates) if update.updated]
        return [managed.name for update in begun if not update.home.speculative for managed in update.rules]

    @defer_sigint
    def submit(
        self,
        index: int,
        rules: Mapping[ManagedParam, Rule],
        scales: Sequence[float],
        home: Home,
        pages: Sequence[tuple[int, int]] | None = None,
    ) -> DiskUpdate:
        """Queue the update of one chunk's parameters.

        Args:
            pages: First element and number of elements of each page that is updated; None: all that have parameters.
        """
        lists = home.lists(index)
        if pages is None:
            pages = [
                (first, numel)
                for first, numel in self.staging_pool.pages(lists[0])
                if any(Page(index, first, numel).part(managed) for managed in rules)
            ]
        update = DiskUpdate(index, rules, scales, lists, list(pages), home)
        if home.late:
            self.read_ahead.expected.clear()  # the next step writes what its update reads, or queues all pages itself
        elif not home.speculative:
            self.read_ahead.expect(update)
        home.begin(rules)
        if update.pages:
            self._updates.append(update)
            self._let_wait(update, partial(self.finish, [index]))
        else:
            home.end(rules)
        return update

    @staticmethod
    def _let_wait(update: DiskUpdate, finish: Callable[[], None] | None) -> None:
        """Let a chunk wait for an update of its content; None: it has ended."""
        if (chunk := update.home.waiting(update.index)) is not None:
            chunk.end_deferred = finish

    def buffered(self, index: int) -> list[DiskUpdate]:
        """Return the queued late updates of a chunk."""
        return [update for update in self._updates if update.index == index and update.home.late]

    def is_queued(self, update: DiskUpdate) -> bool:
        """Return whether an update is in the queue and not complete."""
        return update in self._updates and not update.complete

    @defer_sigint
    def remove(self, update: DiskUpdate) -> None:
        """Remove an update from the queue. Pages that are read and not updated yet serve later updates."""
        if update in self._updates:
            self._updates.remove(update)
        for pages in [pages for pages in self.staging_pool.live if pages.owner is update]:
            if pages.update is not None and not pages.updated:
                self._running.discard(pages.update)
                pages.update.cancel()
                self.staging_pool.drop(pages)
            elif not pages.updated:
                pages.owner = pages.param_buffer = None

    def reorder(self, key: Callable[[int], int]) -> None:
        """Sort the updates that have not started by this key of their chunk index."""
        in_memory = {pages.owner for pages in self.staging_pool.live}
        started = in_memory | {update for update in self._updates if update.updated}

        def rank(update: DiskUpdate) -> tuple[int, int]:
            if update.home.speculative:
                return 1, 0
            return (-1, 0) if update in started else (0, key(update.index))

        self._updates.sort(key=rank)

    @defer_sigint
    def progress(self) -> None:
        """Update the pages whose reads have finished, and start the next reads; never wait for the disk."""
        if not self.read_ahead.enabled:
            return
        self._running.finish_done()
        for update in [each for each in self._updates if not each.home.is_current and not each.complete]:
            self.remove(update)
        self.read_ahead.start(self._updates)
        while queued := self._queued():
            update = queued[0].owner
            fetching = update.param16.device.writer is not None or not update.param16.in_memory
            if not queued[0].ready or (fetching and not update.home.late):
                break
            self._update(queued[0])
            self.read_ahead.start(self._updates)

    def finish(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these chunks are updated (default: all, and until every page is written back)."""
        wanted = self.unfinished if indices is None else self.unfinished & set(indices)
        if wanted:
            if indices is not None:
                read = {pages.owner.index for pages in self._queued() if pages.ready}
                self.late |= wanted - read
            self.reorder(lambda index: index not in wanted)
        self._update_until(lambda: not wanted & self.unfinished, wanted)
        if indices is None:
            self.staging_pool.wait([write for pages in self.staging_pool.live for write in pages.writes])
            self.staging_pool.collect()

    def finish_pages(self, indices: Collection[int], ended: Callable[[], bool]) -> None:
        """Update pages, those of these chunks first, until `ended` returns True or none is left."""
        self.reorder(lambda index: index not in indices)
        self._update_until(ended, indices)

    def _update_until(self, ended: Callable[[], bool], first: Collection[int]) -> None:
        """Update pages in the order of the queue; begin with those of chunks `first` while others run."""
        while self._updates and not ended():
            self.read_ahead.start(self._updates)
            queued = self._queued()
            if queued and (queued[0].owner.index in first or not self._running):
                self.staging_pool.complete(queued[0])
                if not queued[0].owner.home.late:
                    self.data.manager.ensure_in_memory(queued[0].owner.param16)
                    self.data.update_param_views()
                self._update(queued[0])
            elif self._running:
                self._running.finish_first()
            else:
                self.staging_pool.wait_for_buffers()

    def finish_running(self) -> None:
        """Wait for the updates that the worker thread runs; others stay deferred."""
        self._running.finish()

    @defer_sigint
    def cancel_running(self) -> None:
        """Cancel the updates of the worker thread that have not begun, and wait for the one that has."""
        self._running.clear()
        for pages in self.staging_pool.live:
            if pages.update is not None:
                pages.update.cancel()

    @defer_sigint
    def _abort(self, error: BaseException) -> None:
        """Drop all queued updates, and reset their parameters to the rounded masters, updated or not."""
        managed_params = [
            managed
            for update in self._updates
            for managed in update.rules
            if managed.state.update_pending or update.home.late
        ]
        for update in self._updates:
            update.home.give_up(update.rules)
            self._let_wait(update, None)
        aborted, self._updates = self._updates, []
        self.cancel_running()
        if self.data.manager.io_dispatch.failed is not None:
            self._aborted += aborted
            self.staging_pool.live.clear()
            return
        for pages in list(self.staging_pool.live):
            self.staging_pool.drop(pages)
        for managed in managed_params:
            self.data.ensure_local(managed)
            self.data.give_up(managed)
        if not managed_params:
            return
        error.add_note(
            f"The optimizer step failed while updating {', '.join(managed.name for managed in managed_params)}. These "
            f"parameters may be updated in part, and their gradients are lost. Load a checkpoint before training on."
        )

    def _queued(self) -> list[PageSet]:
        """Return the page sets that wait for their update, in order."""
        queued = [
            pages
            for pages in self.staging_pool.live
            if pages.owner is not None and pages.update is None and not pages.updated
        ]
        rank = {update: number for number, update in enumerate(self._updates)}
        return sorted(queued, key=lambda pages: (rank[pages.owner], pages.first))

    @defer_sigint
    def _update(self, pages: PageSet) -> None:
        """Update the elements of a page set and start to write it back; beside an accelerator, only start to update."""
        update = pages.owner
        try:
            self.staging_pool.wait(pages.reads)
            self._update_rules.make_room(self.data, update.rules, [update.param16])
            spans = self._spans(pages)
            if self._host_updates is not None:
                self._hold(pages, self._host_updates, spans)
                return
            self._kernels.update(spans, update.scales)
            self._end(pages)
        except BaseException as error:
            # Ctrl-C or an error may strike at any line. Each page on disk is intact: restore parameters from the pages.
            self._abort(error)
            raise

    def _spans(self, pages: PageSet) -> list[Span]:
        """Return what the update of a page set reads and writes, and count what it copies."""
        update, updates, page = pages.owner, self._host_updates, Page(pages.index, pages.first, pages.numel)
        if update.param16.device.valid and not update.home.late:  # states are on the host
            for managed in update.rules:
                if (part := page.part(managed)) is not None:
                    options = {"upload": not update.home.speculative, "by_kernel": updates is not None}
                    update.home.count_transfers(managed, part.stop - part.start, **options)
        in_order, lists = updates is not None and updates.waits_for_copies, self.staging_pool.views(pages)
        spans: list[Span] = update.home.spans(page, update.rules, lists, in_order)
        return spans

    def _hold(self, pages: PageSet, updates: HostUpdates, spans: Sequence[Span]) -> None:
        """Start to update a page set on the worker thread, before whole chunks on the host: the disk is slower."""
        owner = pages.owner
        chunks = owner.home.chunks(pages.index, pages.lists)
        pages.update = updates.start(spans, owner.scales, chunks, urgent=True)
        if any(span.rule.needs_shape for span in spans):
            pages.update.wait()  # while the device has room for its products of matrices
        self.staging_pool.keep_until(EndOfUpdate(pages.update, repr(owner.param16)))
        self._running.add(pages.update, chunks, partial(self._finish, pages))

    @defer_sigint
    def _finish(self, pages: PageSet) -> None:
        """Wait for the update of a page set, and start to write it back."""
        try:
            pages.update.wait()
            self._end(pages)
        except BaseException as error:
            self._abort(error)
            raise

    def _end(self, pages: PageSet) -> None:
        """Start to write an updated page set back; after the last one, the chunk's parameters are updated."""
        update = pages.owner
        update.home.end_page(pages, self.staging_pool)
        pages.updated = True
        update.updated += 1
        if update.complete and not update.home.speculative:
            update.home.end(update.rules)
            self._updates.remove(update)
            self._let_wait(update, None)
