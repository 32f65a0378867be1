"""The update of chunks whose states lie on disk: pages come, are updated, go back, while the next are read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import GRAD32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._step.staging_pool import PageSet, StagingPool

# [Note: updating after the step has returned]
# A parameter must be new when it is used, and not before. So `optimizer.step()` says what is to be done, and returns.
# Pages are read ahead, in the order in which the next forward will use the parameters. At each operator's end those
# that have arrived are updated; an operator whose parameters are not new yet waits for them. On a CPU the update runs
# between operators, where both of them have all cores; only waiting for the disk goes on beside them. Until it is
# updated, a parameter's gradient lies over it, and the slot is `pending`: nobody may take the gradient for theirs.
#
# Updates come in the same order in each step, so what is left of the ring is filled with pages of the next ones before
# they are asked for, on trust: the disk has work where a step has none for it, and the next update begins with what
# memory holds.


@dataclass(eq=False)
class DiskUpdate:
    """The update of one chunk's parameters, page by page."""

    index: int
    rules: Mapping[ManagedParam, Rule]
    scales: Sequence[float]
    lists: list[Chunk]
    pages: list[tuple[int, int]]
    updated: int = 0
    """How many of the pages are done."""

    @property
    def param16(self) -> Chunk:
        """The chunk whose gradients become parameters."""
        return next(iter(self.rules)).shard_chunk


class DiskOptimizerStep:
    """Runs updates from disk to disk through the ring."""

    def __init__(
        self, data: ModelData, start: Callable[[Sequence[Span], Sequence[float]], None], ring: StagingPool
    ) -> None:
        self.data = data
        self.start = start
        self.staging_pool = ring
        self.reads_ahead = True
        """Whether pages are read before somebody waits for them."""
        self._jobs: list[DiskUpdate] = []
        self._expected: dict[int, list[tuple[int, int]]] = {}
        """Chunk indices, with their pages, in the order in which updates were last asked for."""

    @property
    def pending(self) -> set[int]:
        """Chunk indices that are not updated yet."""
        return {job.index for job in self._jobs}

    @defer_sigint
    def submit(self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float]) -> None:
        """Have the parameters of one chunk updated, after those asked for before."""
        manager = self.data.manager
        schema = next(iter(rules)).schema
        lists = [manager[spec.kind, index] for spec in schema.optimizer_lists]
        if (GRAD32, index) in manager.chunks and not manager[GRAD32, index].in_memory:
            lists.append(manager[GRAD32, index])
        pages = [
            (first, numel)
            for first, numel in self.staging_pool.pages(lists[0])
            if any(_overlap(one, first, first + numel) for one in rules)
        ]
        self._expected = {one: its for one, its in self._expected.items() if one != index} | {index: pages}
        if not pages:
            self.data.mark_updated(rules)
            return
        for one in rules:
            one.update_pending = True
        self._jobs.append(DiskUpdate(index, rules, scales, lists, pages))

    def sort(self, key: Callable[[int], int]) -> None:
        """Put those of which nothing was read yet in this order of chunk indices."""
        begun = {there.owner for there in self._queued()} | {job for job in self._jobs if job.updated}
        self._jobs.sort(key=lambda job: (-1, 0) if job in begun else (0, key(job.index)))

    @defer_sigint
    def progress(self) -> None:
        """Update the pages that have arrived, and ask for the next; never waits for the disk."""
        if not self.reads_ahead:
            return
        self._read_ahead()
        while queued := self._queued():
            param16 = queued[0].owner.param16
            if not queued[0].ready or param16.fetch_transfer is not None or not param16.in_memory:
                break
            self._update(queued[0])
            self._read_ahead()

    def finish(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these chunks are updated, or all are and every page is on disk."""
        wanted = self.pending if indices is None else self.pending & set(indices)
        if wanted:
            self.sort(lambda index: index not in wanted)
        while wanted & self.pending:
            self._read_ahead()
            queued = self._queued()
            if not queued:
                self.staging_pool.wait([write for there in self.staging_pool.live for write in there.writes])
                continue
            self.staging_pool.complete(queued[0])
            self.staging_pool.wait(queued[0].reads)
            self.data.manager.ensure_in_memory(queued[0].owner.param16)
            self.data.update_param_views()
            self._update(queued[0])
        if indices is None:
            self.staging_pool.wait([write for there in self.staging_pool.live for write in there.writes])
            self.staging_pool.collect()

    @defer_sigint
    def _give_up(self, error: BaseException) -> None:
        """What is under way can't be finished: parameters become their masters, rounded, as far as these have come."""
        managed_params = [managed for job in self._jobs for managed in job.rules if managed.update_pending]
        self._jobs.clear()
        if self.data.manager.io_dispatch.failed is not None:
            self.staging_pool.live.clear()
            return
        for there in list(self.staging_pool.live):
            self.staging_pool.drop(there)
        for managed in managed_params:
            self.data.ensure_local(managed)
            self.data.give_up(managed)
        error.add_note(
            f"The update of {', '.join(managed.name for managed in managed_params)} failed on the way: "
            f"these parameters may be "
            f"updated in part, their gradients are gone. Load a saved state to go on as before."
        )

    # Inside

    def _queued(self) -> list[PageSet]:
        """Sets that wait to be updated, in order."""
        queued = [there for there in self.staging_pool.live if there.owner is not None and not there.updated]
        place = {job: number for number, job in enumerate(self._jobs)}
        return sorted(queued, key=lambda there: (place[there.owner], there.first))

    @defer_sigint
    def _read_ahead(self) -> None:
        """Ask for as many pages as the ring has room for: of what is to be updated, then of what will be."""
        self.staging_pool.collect()
        for job in self._jobs:
            asked = {there.first for there in self.staging_pool.live if there.owner is job}
            for first, numel in job.pages[job.updated :]:
                if first not in asked and not self._start_read(job, first, numel):
                    return
                if not self.reads_ahead:
                    return
        if self.reads_ahead and not self.data.accumulates:  # what is accumulated on disk is known when it is complete
            self._read_speculatively()

    def _start_read(self, job: DiskUpdate, first: int, numel: int) -> bool:
        """Have a page of a job on its way; False if the ring has no room for it yet."""
        on_trust = [there for there in self.staging_pool.live if there.owner is None]
        there = next((one for one in on_trust if (one.index, one.first) == (job.index, first)), None)
        if there is not None and not there.serves(job.lists):
            self.staging_pool.drop(there)
            there = None
        if there is None:
            there = self.staging_pool.start_read(job.lists, first, numel)
        while there is None and on_trust and not any(chunk.has_page_writes for chunk in job.lists):
            untold = on_trust.pop()  # the last to be expected
            if untold in self.staging_pool.live:
                self.staging_pool.drop(untold)
            there = self.staging_pool.start_read(job.lists, first, numel)
        if there is None:
            return False
        there.owner = job
        return True

    def _read_speculatively(self) -> None:
        """See [Note: updating after the step has returned]."""
        manager, pending = self.data.manager, self.pending
        known = {(there.index, there.first) for there in self.staging_pool.live}
        for index, pages in self._expected.items():
            if index in pending:
                break  # what comes after was asked for in this step, and so have the ones before it been
            managed_params = self.data.by_chunk.get(index)
            lists = (
                [manager[spec.kind, index] for spec in managed_params[0].schema.optimizer_lists]
                if managed_params
                else []
            )
            if not lists or any(chunk.in_memory for chunk in lists):
                continue
            for first, numel in pages:
                if (index, first) not in known and self.staging_pool.start_read(lists, first, numel) is None:
                    return

    @defer_sigint
    def _update(self, there: PageSet) -> None:
        """Update what a set holds, and begin to write it back."""
        job = there.owner
        try:
            self.staging_pool.wait(there.reads)
            pages = dict(zip((chunk.kind for chunk in there.lists), self.staging_pool.views(there), strict=True))
            spans = []
            for managed, rule in job.rules.items():
                part = _overlap(managed, there.first, there.first + there.numel)
                if part is not None:
                    spans.append(self._span(managed, rule, part, there.first, pages))
                    if managed.shard_chunk.device_valid:  # states are on the host
                        count_crossing(self.data.manager, managed, part.stop - part.start)
            self.start(spans, job.scales)
            self.data.manager.mark_written(job.param16, on_device=job.param16.device_valid)
            self.staging_pool.write(there, [chunk for chunk in there.lists if chunk.kind != GRAD32])
            there.updated = True
            job.updated += 1
            if job.updated == len(job.pages):
                self.data.mark_updated(job.rules)
                self._jobs.remove(job)
        except BaseException as error:
            # Wherever Ctrl-C or a failure struck: what lies on disk is whole, page by page, and parameters follow it.
            self._give_up(error)
            raise

    def _span(
        self, managed: ManagedParam, rule: Rule, part: slice, first: int, pages: Mapping[str, torch.Tensor]
    ) -> Span:
        """What the update of a part of a parameter reads and writes."""
        on_page = slice(managed.location.offset + part.start - first, managed.location.offset + part.stop - first)
        param = managed.flat(managed.shard_chunk)[part]
        earlier = None
        if managed.in_grad_list:
            kept = pages.get(GRAD32)
            chunk = self.data.manager[GRAD32, managed.location.chunk]
            earlier = kept[on_page] if kept is not None else managed.flat(chunk)[part]
        dtype = getattr(torch, managed.schema.master_dtype)
        if managed.overlays_shard:
            grad = Gradient(param, earlier, dtype)
        else:
            assert earlier is not None, f"{managed.name} has no gradient"
            grad = Gradient(earlier, None, dtype)
        master, *states = (pages[spec.kind][on_page] for spec in managed.schema.optimizer_lists)
        return Span(param, grad, master, tuple(states), rule)


def count_crossing(manager: ChunkManager, managed: ManagedParam, numel: int) -> int:
    """Count the bytes with which a part of a parameter is updated below: its gradient comes down, and it goes up."""
    nbytes = numel * managed.shard_chunk.dtype.itemsize
    directions = (False, True) if managed.overlays_shard else (True,)
    for to_device in directions:
        manager.count_transfer(nbytes, to_device=to_device)
    return nbytes * len(directions)


def _overlap(managed: ManagedParam, first: int, end: int) -> slice | None:
    """The part of a parameter, among its own elements, that lies between two elements of its chunk."""
    begin, stop = max(first, managed.location.offset), min(end, managed.location.offset + managed.location.numel)
    return slice(begin - managed.location.offset, stop - managed.location.offset) if begin < stop else None
