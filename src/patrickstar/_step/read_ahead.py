"""Reads of pages before their update: of updates in the queue, and of those that are expected."""

from collections.abc import Sequence
from functools import partial

from patrickstar._params.local_shards import LocalShards
from patrickstar._step.staging_pool import StagingPool
from patrickstar._step.update import Page, Update

# [Note: expected updates]
# Updates run in the same order in each step. So staging buffers that the queued updates do not need are filled
# speculatively with pages of the expected next updates. This keeps the disk busy when a step has no I/O of its own,
# and lets the next update start with pages that are already in memory.


class ReadAhead:
    """Fills the staging buffers with pages. See [Note: expected updates]."""

    def __init__(self, data: LocalShards, staging_pool: StagingPool) -> None:
        self.data = data
        self.staging_pool = staging_pool
        self.enabled = True
        """Read pages before an update waits for them."""
        self.reads_expected = True
        """Read pages of updates that are expected, while no update needs the buffers."""
        self.expected: dict[int, Sequence[Page]] = {}
        """Pages by chunk index, in the order in which the updates were last submitted."""

    def expect(self, update: Update) -> None:
        """Expect the pages of an update to be updated in the next step in the order of these calls."""
        earlier = {chunk: expected for chunk, expected in self.expected.items() if chunk != update.index}
        self.expected = earlier | {update.index: update.pages}

    def start(self, updates: Sequence[Update]) -> None:
        """Start to read as many pages as the pool has buffers for: of queued updates, then of expected ones."""
        self.staging_pool.collect()
        for update in updates:
            requested = {pages.first for pages in self.staging_pool.live if pages.owner is update}
            for page in update.pages[update.updated :]:
                if page.first not in requested and not self._start_read(update, page):
                    return
                if not self.enabled:
                    return
        final = not self.data.accumulates  # otherwise the gradient list on disk changes until the step
        if self.enabled and self.reads_expected and final:
            self._read_expected(updates)

    def _start_read(self, update: Update, page: Page) -> bool:
        """Start to read one page of an update, or reuse a speculative read; return False if no buffer is free."""
        first, numel, pool = page.first, page.numel, self.staging_pool
        others = [pages for pages in pool.live if pages.owner is None]
        found = next((pages for pages in others if (pages.index, pages.first) == (update.index, first)), None)
        if found is not None:
            others.remove(found)
            if not found.is_current(update.lists):
                pool.drop(found)
                found = None
        read = partial(pool.start_read, first=first, numel=numel) if found is None else partial(pool.extend, found)
        pages = read(update.lists)
        while pages is None and others and not pool.writes_page(update.lists, first):
            victim = others.pop()  # expected last
            if victim in pool.live:
                pool.drop(victim)
            pages = read(update.lists)
        if pages is None:
            return False
        if update.home.speculative and not pool.take_param_buffer(pages):
            if not others:
                return False
            pool.drop(others.pop())
            pool.take_param_buffer(pages)
        pages.owner = update
        return True

    def _read_expected(self, updates: Sequence[Update]) -> None:
        """Start to read pages of expected updates."""
        pending = {update.index for update in updates if not update.home.speculative}
        speculative = {update.index for update in updates if update.home.speculative}
        known = {(pages.index, pages.first) for pages in self.staging_pool.live}
        for index, expected in self.expected.items():
            if index in pending:
                break  # the updates from here on were submitted in this step
            lists = self.data.state_chunks(index) if index in self.data.by_chunk else []
            if not lists or index in speculative or any(chunk.in_memory for chunk in lists):
                continue
            for page in expected:
                read = (index, page.first) in known
                if not read and self.staging_pool.start_read(lists, page.first, page.numel) is None:
                    return
