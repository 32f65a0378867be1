"""The update of chunks whose states lie on disk: pages come, are updated, go back, while the next are read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import GRAD32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import Manager
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._step.staging_pool import PageSet, Ring

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
class Job:
    """The update of one chunk's parameters, page by page."""

    index: int
    rules: Mapping[Slot, Rule]
    scales: Sequence[float]
    lists: list[Chunk]
    pages: list[tuple[int, int]]
    updated: int = 0
    """How many of the pages are done."""

    @property
    def param16(self) -> Chunk:
        """The chunk whose gradients become parameters."""
        return next(iter(self.rules)).own


class Pipeline:
    """Runs updates from disk to disk through the ring."""

    def __init__(self, data: ModelData, start: Callable[[Sequence[Span], Sequence[float]], None], ring: Ring) -> None:
        self.data = data
        self.start = start
        self.ring = ring
        self.ahead = True
        """Whether pages are read before somebody waits for them."""
        self._jobs: list[Job] = []
        self._expected: dict[int, list[tuple[int, int]]] = {}
        """Chunk indices, with their pages, in the order in which updates were last asked for."""

    @property
    def pending(self) -> set[int]:
        """Chunk indices that are not updated yet."""
        return {job.index for job in self._jobs}

    @uninterrupted
    def add(self, index: int, rules: Mapping[Slot, Rule], scales: Sequence[float]) -> None:
        """Have the parameters of one chunk updated, after those asked for before."""
        manager = self.data.manager
        scheme = next(iter(rules)).scheme
        lists = [manager[spec.kind, index] for spec in scheme.optimizer_lists]
        if (GRAD32, index) in manager.chunks and not manager[GRAD32, index].in_memory:
            lists.append(manager[GRAD32, index])
        pages = [
            (first, numel)
            for first, numel in self.ring.pages(lists[0])
            if any(_overlap(one, first, first + numel) for one in rules)
        ]
        self._expected = {one: its for one, its in self._expected.items() if one != index} | {index: pages}
        if not pages:
            self.data.updated(rules)
            return
        for one in rules:
            one.pending = True
        self._jobs.append(Job(index, rules, scales, lists, pages))

    def sort(self, key: Callable[[int], int]) -> None:
        """Put those of which nothing was read yet in this order of chunk indices."""
        begun = {there.owner for there in self._queued()} | {job for job in self._jobs if job.updated}
        self._jobs.sort(key=lambda job: (-1, 0) if job in begun else (0, key(job.index)))

    @uninterrupted
    def proceed(self) -> None:
        """Update the pages that have arrived, and ask for the next; never waits for the disk."""
        if not self.ahead:
            return
        self._read_ahead()
        while queued := self._queued():
            param16 = queued[0].owner.param16
            if not queued[0].arrived or param16.coming is not None or not param16.in_memory:
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
                self.ring.wait([write for there in self.ring.live for write in there.writes])
                continue
            self.ring.complete(queued[0])
            self.ring.wait(queued[0].reads)
            self.data.manager.have(queued[0].owner.param16)
            self.data.follow_moves()
            self._update(queued[0])
        if indices is None:
            self.ring.wait([write for there in self.ring.live for write in there.writes])
            self.ring.collect()

    @uninterrupted
    def _give_up(self, error: BaseException) -> None:
        """What is under way can't be finished: parameters become their masters, rounded, as far as these have come."""
        slots = [slot for job in self._jobs for slot in job.rules if slot.pending]
        self._jobs.clear()
        if self.data.manager.transit.failed is not None:
            self.ring.live.clear()
            return
        for there in list(self.ring.live):
            self.ring.drop(there)
        for slot in slots:
            self.data.have_own(slot)
            self.data.give_up(slot)
        error.add_note(
            f"The update of {', '.join(slot.name for slot in slots)} failed on the way: these parameters may be "
            f"updated in part, their gradients are gone. Load a saved state to go on as before."
        )

    # Inside

    def _queued(self) -> list[PageSet]:
        """Sets that wait to be updated, in order."""
        queued = [there for there in self.ring.live if there.owner is not None and not there.updated]
        place = {job: number for number, job in enumerate(self._jobs)}
        return sorted(queued, key=lambda there: (place[there.owner], there.first))

    @uninterrupted
    def _read_ahead(self) -> None:
        """Ask for as many pages as the ring has room for: of what is to be updated, then of what will be."""
        self.ring.collect()
        for job in self._jobs:
            asked = {there.first for there in self.ring.live if there.owner is job}
            for first, numel in job.pages[job.updated :]:
                if first not in asked and not self._ask(job, first, numel):
                    return
                if not self.ahead:
                    return
        if self.ahead and not self.data.accumulates:  # what is accumulated on disk is known when it is complete
            self._read_on_trust()

    def _ask(self, job: Job, first: int, numel: int) -> bool:
        """Have a page of a job on its way; False if the ring has no room for it yet."""
        on_trust = [there for there in self.ring.live if there.owner is None]
        there = next((one for one in on_trust if (one.index, one.first) == (job.index, first)), None)
        if there is not None and not there.serves(job.lists):
            self.ring.drop(there)
            there = None
        if there is None:
            there = self.ring.read(job.lists, first, numel)
        while there is None and on_trust and not any(chunk.being_written for chunk in job.lists):
            untold = on_trust.pop()  # the last to be expected
            if untold in self.ring.live:
                self.ring.drop(untold)
            there = self.ring.read(job.lists, first, numel)
        if there is None:
            return False
        there.owner = job
        return True

    def _read_on_trust(self) -> None:
        """See [Note: updating after the step has returned]."""
        manager, pending = self.data.manager, self.pending
        known = {(there.index, there.first) for there in self.ring.live}
        for index, pages in self._expected.items():
            if index in pending:
                break  # what comes after was asked for in this step, and so have the ones before it been
            slots = self.data.by_chunk.get(index)
            lists = [manager[spec.kind, index] for spec in slots[0].scheme.optimizer_lists] if slots else []
            if not lists or any(chunk.in_memory for chunk in lists):
                continue
            for first, numel in pages:
                if (index, first) not in known and self.ring.read(lists, first, numel) is None:
                    return

    @uninterrupted
    def _update(self, there: PageSet) -> None:
        """Update what a set holds, and begin to write it back."""
        job = there.owner
        try:
            self.ring.wait(there.reads)
            pages = dict(zip((chunk.kind for chunk in there.lists), self.ring.views(there), strict=True))
            spans = []
            for slot, rule in job.rules.items():
                part = _overlap(slot, there.first, there.first + there.numel)
                if part is not None:
                    spans.append(self._span(slot, rule, part, there.first, pages))
                    if slot.own.device_valid:  # states are on the host
                        count_crossing(self.data.manager, slot, part.stop - part.start)
            self.start(spans, job.scales)
            self.data.manager.mark_written(job.param16, on_device=job.param16.device_valid)
            self.ring.write(there, [chunk for chunk in there.lists if chunk.kind != GRAD32])
            there.updated = True
            job.updated += 1
            if job.updated == len(job.pages):
                self.data.updated(job.rules)
                self._jobs.remove(job)
        except BaseException as error:
            # Wherever Ctrl-C or a failure struck: what lies on disk is whole, page by page, and parameters follow it.
            self._give_up(error)
            raise

    def _span(self, slot: Slot, rule: Rule, part: slice, first: int, pages: Mapping[str, torch.Tensor]) -> Span:
        """What the update of a part of a parameter reads and writes."""
        on_page = slice(slot.place.offset + part.start - first, slot.place.offset + part.stop - first)
        param = slot.flat(slot.own)[part]
        earlier = None
        if slot.in_list:
            kept = pages.get(GRAD32)
            chunk = self.data.manager[GRAD32, slot.place.chunk]
            earlier = kept[on_page] if kept is not None else slot.flat(chunk)[part]
        dtype = getattr(torch, slot.scheme.master_dtype)
        if slot.over_own:
            grad = Gradient(param, earlier, dtype)
        else:
            assert earlier is not None, f"{slot.name} has no gradient"
            grad = Gradient(earlier, None, dtype)
        master, *states = (pages[spec.kind][on_page] for spec in slot.scheme.optimizer_lists)
        return Span(param, grad, master, tuple(states), rule)


def count_crossing(manager: Manager, slot: Slot, numel: int) -> int:
    """Count the bytes with which a part of a parameter is updated below: its gradient comes down, and it goes up."""
    nbytes = numel * slot.own.dtype.itemsize
    directions = (False, True) if slot.over_own else (True,)
    for to_device in directions:
        manager.count_move(nbytes, to_device=to_device)
    return nbytes * len(directions)


def _overlap(slot: Slot, first: int, end: int) -> slice | None:
    """The part of a parameter, among its own elements, that lies between two elements of its chunk."""
    begin, stop = max(first, slot.place.offset), min(end, slot.place.offset + slot.place.numel)
    return slice(begin - slot.place.offset, stop - slot.place.offset) if begin < stop else None
