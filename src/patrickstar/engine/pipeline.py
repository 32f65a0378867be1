"""The update of chunks whose states lie on disk: pages come, are updated, go back, while the next are read."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from patrickstar.engine.model_data import ModelData
from patrickstar.engine.slot import Slot
from patrickstar.kernels.rule import Gradient, Rule, Span
from patrickstar.layout.lists import GRAD32
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.movers import Transfer
from patrickstar.memory.pages import round_up

SETS = 12
"""Pages of each list that are under way at once: while the longest operator runs, the disk must find some to fill."""

# [Note: updating after the step has returned]
# A parameter must be new when it is used, and not before. So `optimizer.step()` says what is to be done, and returns.
# Pages are read ahead, in the order in which the next forward will use the parameters. At each operator's end those
# that have arrived are updated; an operator whose parameters are not new yet waits for them. On a CPU the update runs
# between operators, where both of them have all cores; only waiting for the disk goes on beside them. Until it is
# updated, a parameter's gradient lies over it, and the slot is `pending`: nobody may take the gradient for theirs.


@dataclass(frozen=True)
class Ring:
    """Pages on the host that updates pass through: how large one is, and how many there are."""

    page_bytes: int
    pages: int
    by_pages: bool
    """Whether an update can be cut into pages; else one page holds a whole chunk of a list."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.page_bytes * self.pages

    @classmethod
    def sized(
        cls, lists: int, largest_list_bytes: int, disk_page_bytes: int, by_pages: bool, room_bytes: int
    ) -> "Ring":
        """One that suits chunks with so many lists, within `room_bytes` if that is enough for two pages of each."""
        nbytes = min(disk_page_bytes, round_up(largest_list_bytes)) if by_pages else round_up(largest_list_bytes)
        sets = min(SETS if by_pages else 2, max(2, room_bytes // (lists * nbytes)))
        return cls(nbytes, lists * sets, by_pages)


@dataclass(eq=False)
class PageSet:
    """A page of each optimizer list of one chunk, between being read and being written."""

    job: "Job"
    first: int
    numel: int
    buffers: list[int]
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """The update of one chunk's parameters."""

    index: int
    rules: Mapping[Slot, Rule]
    scales: Sequence[float]
    lists: list[Chunk]
    to_read: deque[tuple[int, int]]
    to_update: int

    @property
    def begun(self) -> bool:
        """Whether a page of it was asked for."""
        return len(self.to_read) < self.to_update


class Pipeline:
    """Runs updates from disk to disk through a ring of pages on the host."""

    def __init__(self, data: ModelData, start: Callable[[Sequence[Span], Sequence[float]], None], ring: "Ring") -> None:
        self.data = data
        self.start = start
        self.ring = ring
        assert data.manager.disk is not None
        self.page_bytes = data.manager.disk.page_bytes
        self._ring = data.manager.host.borrow(ring.nbytes)
        self._free = list(range(ring.pages))
        self._jobs: deque[Job] = deque()
        self._sets: deque[PageSet] = deque()
        self._writing: deque[PageSet] = deque()

    @property
    def pending(self) -> set[int]:
        """Chunk indices that are not updated yet."""
        return {job.index for job in self._jobs}

    def add(self, index: int, rules: Mapping[Slot, Rule], scales: Sequence[float]) -> None:
        """Have the parameters of one chunk updated, after those asked for before."""
        manager = self.data.manager
        slot = next(iter(rules))
        lists = [manager[spec.kind, index] for spec in slot.scheme.optimizer_lists]
        if (GRAD32, index) in manager.chunks and not manager[GRAD32, index].in_memory:
            lists.append(manager[GRAD32, index])
        length = self.page_bytes // lists[0].dtype.itemsize if self.ring.by_pages else lists[0].numel
        starts = range(0, lists[0].numel, length)
        touched = deque(
            (first, min(length, lists[0].numel - first))
            for first in starts
            if any(_overlap(one, first, first + length) for one in rules)
        )
        if not touched:
            self.data.updated(rules)
            return
        for one in rules:
            one.pending = True
        self._jobs.append(Job(index, rules, scales, lists, touched, len(touched)))

    def sort(self, key: Callable[[int], int]) -> None:
        """Put those of which nothing was read yet in this order of chunk indices."""
        begun = [job for job in self._jobs if job.begun]
        waiting = sorted((job for job in self._jobs if not job.begun), key=lambda job: key(job.index))
        self._jobs = deque([*begun, *waiting])

    def proceed(self) -> None:
        """Update the pages that have arrived, and ask for the next; never waits."""
        if not self._jobs and not self._writing:
            return
        self._read_ahead()
        while self._sets and all(transfer.done for transfer in self._sets[0].transfers):
            param16 = self._param16(self._sets[0].job)
            if param16.coming is not None or not param16.in_memory:
                break
            self._update(self._sets.popleft())
            self._read_ahead()

    def finish(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these chunks are updated, or all are and every page is on disk."""
        wanted = self.pending if indices is None else self.pending & set(indices)
        if wanted:
            self.sort(lambda index: index not in wanted)
        while wanted & self.pending:
            self._read_ahead()
            if not self._sets:
                self._wait(self._writing[0].transfers)
                continue
            first = self._sets[0]
            self._wait(first.transfers)
            self.data.manager.have(self._param16(first.job))
            self.data.follow_moves()
            self._sets.popleft()
            self._update(first)
        if indices is None:
            while self._writing:
                self._wait(self._writing[0].transfers)
                self._collect()

    def _give_up(self, error: BaseException) -> None:
        """What is under way can't be finished: parameters become their masters, rounded, as far as these have come."""
        slots = [slot for job in self._jobs for slot in job.rules]
        self._free.extend(number for there in self._sets for number in there.buffers)
        for there in self._sets:
            self._wait(there.transfers)  # the disk must not write into pages that are used for something else
        self._jobs.clear()
        self._sets.clear()
        for slot in slots:
            self.data.manager.have(slot.chunk)
            self.data.give_up(slot)
        error.add_note(
            f"The update of {', '.join(slot.name for slot in slots)} failed on the way: these parameters may be "
            f"updated in part, their gradients are gone. Load a saved state to go on as before."
        )

    # Inside

    def _param16(self, job: Job) -> Chunk:
        return next(iter(job.rules)).chunk

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        with self.data.manager.stalled():
            for transfer in transfers:
                self.data.manager.wait_for(transfer)

    def _collect(self) -> None:
        """Take pages back whose bytes are on disk."""
        while self._writing and all(transfer.done for transfer in self._writing[0].transfers):
            self._wait(self._writing[0].transfers)
            written = self._writing.popleft()
            self._free.extend(written.buffers)
            for chunk in written.job.lists:
                chunk.writing = [transfer for transfer in chunk.writing if not transfer.done]

    def _read_ahead(self) -> None:
        """Ask for as many pages as the ring has room for."""
        self._collect()
        manager = self.data.manager
        for job in self._jobs:
            while job.to_read:
                if len(self._free) < len(job.lists) or any(chunk.writing for chunk in job.lists):
                    return
                first, numel = job.to_read.popleft()
                buffers = [self._free.pop() for _ in job.lists]
                there = PageSet(job, first, numel, buffers)
                for chunk, memory in zip(job.lists, self._views(there), strict=True):
                    start = first * chunk.dtype.itemsize
                    there.transfers.append(manager.read_disk(chunk, start, memory.view(torch.uint8)))
                self._sets.append(there)

    def _views(self, there: PageSet) -> list[torch.Tensor]:
        """The set's pages as tensors, in the order of its job's lists."""
        ring = self.data.manager.host.slab.view(self._ring, torch.uint8)
        found = []
        for chunk, number in zip(there.job.lists, there.buffers, strict=True):
            begin, nbytes = number * self.ring.page_bytes, there.numel * chunk.dtype.itemsize
            found.append(ring[begin : begin + nbytes].view(chunk.dtype))
        return found

    def _update(self, there: PageSet) -> None:
        """Update what the set holds, and begin to write it back."""
        job, manager = there.job, self.data.manager
        self._wait(there.transfers)
        pages = dict(zip((chunk.kind for chunk in job.lists), self._views(there), strict=True))
        spans = []
        for slot, rule in job.rules.items():
            part = _overlap(slot, there.first, there.first + there.numel)
            if part is not None:
                spans.append(self._span(slot, rule, part, there.first, pages))
        try:
            self.start(spans, job.scales)
        except BaseException as error:
            self._give_up(error)
            raise
        param16 = self._param16(job)
        manager.mark_written(param16, on_device=param16.device_valid)
        there.transfers = []
        for chunk, memory in zip(job.lists, pages.values(), strict=True):
            if chunk.kind != GRAD32:
                write = manager.write_disk(chunk, there.first * chunk.dtype.itemsize, memory.view(torch.uint8))
                there.transfers.append(write)
                chunk.writing.append(write)
        self._writing.append(there)
        job.to_update -= 1
        if not job.to_update and not job.to_read:
            self._end(job)

    def _span(self, slot: Slot, rule: Rule, part: slice, first: int, pages: Mapping[str, torch.Tensor]) -> Span:
        """What the update of a part of a parameter reads and writes."""
        on_page = slice(slot.place.offset + part.start - first, slot.place.offset + part.stop - first)
        param = slot.flat(slot.chunk)[part]
        earlier = None
        if slot.in_list:
            kept = pages.get(GRAD32)
            chunk = self.data.manager[GRAD32, slot.place.chunk]
            earlier = kept[on_page] if kept is not None else slot.flat(chunk)[part]
        dtype = getattr(torch, slot.scheme.master_dtype)
        if slot.over_param:
            grad = Gradient(param, earlier, dtype)
        else:
            assert earlier is not None, f"{slot.name} has no gradient"
            grad = Gradient(earlier, None, dtype)
        master, *states = (pages[spec.kind][on_page] for spec in slot.scheme.optimizer_lists)
        return Span(param, grad, master, tuple(states), rule)

    def _end(self, job: Job) -> None:
        self._jobs.remove(job)
        self.data.updated(job.rules)


def _overlap(slot: Slot, first: int, end: int) -> slice | None:
    """The part of a parameter, among its own elements, that lies between two elements of its chunk."""
    begin, stop = max(first, slot.place.offset), min(end, slot.place.offset + slot.place.numel)
    return slice(begin - slot.place.offset, stop - slot.place.offset) if begin < stop else None
