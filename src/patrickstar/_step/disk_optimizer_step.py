"""Optimizer step of chunks whose states are on disk: read pages, update them, write them back, in a pipeline."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from patrickstar._hardware.sigint_gate import interruption_point, uninterruptible
from patrickstar._hardware.transfer import Deferred, Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.read_ahead import ReadAhead
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._step.update import Page, Update, give_up
from patrickstar._step.update_queue import EndOfUpdate, UpdateQueue
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
    """Updates whose pages pass through the staging pool; see [Note: deferred updates]."""

    def __init__(
        self,
        data: LocalShards,
        kernels: Kernels,
        update_rules: UpdateRules,
        queue: UpdateQueue,
        host_updates: HostUpdates | None,
        staging_pool: StagingPool,
    ) -> None:
        self.data = data
        self.staging_pool = staging_pool
        self.read_ahead = ReadAhead(data, staging_pool)
        self.late: set[int] = set()
        """Indices of chunks whose parameters were needed before the pages of their update had been read."""
        self._torn: set[ManagedParam] = set()
        """Parameters that `torn` has found."""
        self._kernels, self._update_rules, self._host_updates = kernels, update_rules, host_updates
        self._queue = queue

    @property
    def updates(self) -> list[Update]:
        """Updates of states on disk, in the order in which their pages are read."""
        return [update for update in self._queue.updates if update.lists and not update.given_up]

    @property
    def unfinished(self) -> set[int]:
        """Indices of chunks with an update that is queued, speculative ones excepted."""
        return {update.index for update in self.updates if not update.home.speculative}

    @property
    def updated_in_part(self) -> list[str]:
        """Names of the parameters whose update has begun and not ended, also if an error has ended it."""
        begun = [update for update in self._queue.updates if update.updated and not update.home.speculative]
        return [managed.name for update in begun for managed in update.rules]

    def torn(self) -> set[ManagedParam]:
        """Return parameters of whose split masters a failed disk has lost halves, since the others are newer."""
        for pages in self.staging_pool.live:
            if pages.owner is not None and (pages.updated or pages.update is not None):
                page, of_chunk = Page(pages.index, pages.first, pages.numel), self.data.by_chunk[pages.index]
                self._torn.update(each for each in of_chunk if each.schema.splits and page.part(each) is not None)
        return self._torn

    def submit(self, update: Update) -> None:
        """Queue an update, by default of all pages that have parameters."""
        home = update.home
        update.lists = home.lists(update.index)
        if not update.pages:
            pages = [Page(update.index, *each) for each in self.staging_pool.pages(update.lists)]
            update.pages = [page for page in pages if any(page.part(managed) for managed in update.rules)]
        if home.late:
            self.read_ahead.expected.clear()  # the next step writes what its update reads, or queues all pages itself
        elif not home.speculative:
            self.read_ahead.expect(update)
        home.begin(update.rules)
        if update.pages:
            self._queue.updates.append(update)
            self._let_wait(update, Deferred(repr(update.param16), partial(self.finish, [update.index])))
        else:
            home.end(update.rules)

    @staticmethod
    def _let_wait(update: Update, deferred: Transfer | None) -> None:
        """Let a chunk wait for an update of its content; None: it has ended."""
        if (chunk := update.home.waiting(update.index)) is not None:
            chunk.deferred = deferred

    def remove(self, update: Update) -> None:
        """Remove an update from the queue. Pages that are read and not updated yet serve later updates."""
        self._queue.remove(update)
        self.release(update)

    def release(self, update: Update) -> None:
        """Let pages of an update that are not updated yet serve later ones."""
        for pages in [pages for pages in self.staging_pool.live if pages.owner is update]:
            if pages.update is not None and not pages.updated:
                self._queue.discard(pages.update)
                pages.update.cancel()
                self.staging_pool.drop(pages)
            elif not pages.updated:
                pages.owner = pages.param_buffer = None

    def reorder(self, key: Callable[[int], int]) -> None:
        """Sort the updates that have not started by this key of their chunk index."""
        in_memory = {pages.owner for pages in self.staging_pool.live}
        started = in_memory | {update for update in self._queue.updates if update.updated}

        def rank(update: Update) -> tuple[int, int]:
            if update.home.speculative:
                return 1, 0
            return (-1, 0) if not update.lists or update in started else (0, key(update.index))

        self._queue.updates.sort(key=rank)

    def progress(self) -> None:
        """Update the pages whose reads have finished, and start the next reads; never wait for the disk."""
        if not self.read_ahead.enabled:
            return
        self._queue.finish_done(on_disk=True)
        for update in self.updates:
            if not update.complete and not update.home.is_current:
                update.given_up = True
                self.release(update)
        self.read_ahead.start(self.updates)
        while queued := self._queued():
            update = queued[0].owner
            fetching = update.param16.device.writer is not None or not update.param16.in_memory
            if not queued[0].ready or (fetching and update.reads_memory):
                break
            self._update(queued[0])
            self.read_ahead.start(self.updates)

    def finish(self, indices: Iterable[int]) -> None:
        """Wait until these chunks are updated."""
        wanted = self.unfinished & set(indices)
        if not wanted:
            return
        self.late |= wanted - {pages.owner.index for pages in self._queued() if pages.ready}
        with uninterruptible():
            self.finish_pages(wanted, lambda: not wanted & self.unfinished)

    def finish_all(self) -> None:
        """Wait until all chunks are updated, and every page is written back."""
        wanted = self.unfinished
        self.finish_pages(wanted, lambda: not wanted & self.unfinished)
        self.staging_pool.wait([write for pages in self.staging_pool.live for write in pages.writes])
        self.staging_pool.collect()

    def finish_pages(self, indices: Collection[int], ended: Callable[[], bool]) -> None:
        """Update pages, those of these chunks first, until `ended` returns True or none is left."""
        self.reorder(lambda index: index not in indices)
        self._update_until(ended, indices)

    def _update_until(self, ended: Callable[[], bool], first: Collection[int]) -> None:
        """Update pages in the order of the queue; begin with those of chunks `first` while others run."""
        while self.updates and not ended():
            interruption_point()
            self.read_ahead.start(self.updates)
            queued = self._queued()
            if queued and (queued[0].owner.index in first or not self._queue.runs(on_disk=True)):
                self.staging_pool.complete(queued[0])
                if queued[0].owner.reads_memory:
                    self.data.manager.ensure_in_memory(queued[0].owner.param16)
                    self.data.update_param_views()
                self._update(queued[0])
            elif self._queue.runs(on_disk=True):
                self._queue.finish_first(on_disk=True)
            else:
                self.staging_pool.wait_for_buffers()

    def cancel_running(self) -> None:
        """Cancel the updates of the worker thread that have not begun, and wait for the one that has."""
        for pages in self.staging_pool.live:
            if pages.update is not None:
                self._queue.discard(pages.update)
                pages.update.cancel()

    def _abort(self, error: BaseException) -> None:
        """Drop all queued updates, and reset their parameters to the rounded masters, updated or not."""
        aborted = [update for update in self.updates if not update.home.speculative]
        for update in self.updates:
            update.given_up = True
            self._let_wait(update, None)
        self.cancel_running()
        for update in aborted:
            update.home.forget(update.rules)
        if self.data.manager.io_dispatch.failed is not None:
            self.torn()  # as long as the pages are known
            self.staging_pool.live.clear()
            return
        self._queue.updates = [update for update in self._queue.updates if update not in aborted]
        for pages in list(self.staging_pool.live):
            self.staging_pool.drop(pages)
        give_up(self.data, [managed for update in aborted for managed in update.rules], error)

    def _queued(self) -> list[PageSet]:
        """Return the page sets that wait for their update, in order."""
        queued = [
            pages
            for pages in self.staging_pool.live
            if pages.owner is not None and pages.update is None and not pages.updated
        ]
        rank = {update: number for number, update in enumerate(self.updates)}
        return sorted(queued, key=lambda pages: (rank[pages.owner], pages.first))

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
        for managed in update.rules:
            if (part := page.part(managed)) is not None:  # states are on the host
                update.home.count_transfers(managed, part.stop - part.start, by_kernel=updates is not None)
        in_order, lists = updates is not None and updates.waits_for_copies, self.staging_pool.views(pages)
        spans: list[Span] = update.home.spans(page, update.rules, lists, in_order)
        return spans

    def _hold(self, pages: PageSet, updates: HostUpdates, spans: Sequence[Span]) -> None:
        """Start to update a page set on the worker thread, before whole chunks on the host: the disk is slower."""
        owner = pages.owner
        chunks = [chunk for chunk in owner.home.used(pages.index) if chunk not in pages.lists]
        pages.update = updates.start(spans, owner.scales, chunks, urgent=True)
        if any(span.rule.needs_shape for span in spans):
            pages.update.wait()  # while the device has room for its products of matrices
        self.staging_pool.keep_until(EndOfUpdate(pages.update, repr(owner.param16)))
        self._queue.run(owner, pages.update, owner.home.copies(chunks), partial(self._finish, pages))

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
        update, pages.updated = pages.owner, True
        update.home.end_page(pages, self.staging_pool)
        update.updated += 1
        if update.complete and not update.home.speculative:
            update.home.end(update.rules)
            self._queue.remove(update)
            self._let_wait(update, None)
