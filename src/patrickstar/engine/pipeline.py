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

    lists: list[Chunk]
    first: int
    numel: int
    buffers: list[int]
    versions: list[int]
    """The chunks' disk versions when it was read."""
    transfers: list[Transfer] = field(default_factory=list)

    def serves(self, job: "Job") -> bool:
        """Whether these are the lists that an update wants, as they lie on disk now."""
        return self.lists == job.lists and self.versions == [chunk.disk_version for chunk in self.lists]


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
        self.ahead = True
        """Whether pages are read before somebody waits for them."""
        assert data.manager.disk is not None
        self.page_bytes = data.manager.disk.page_bytes
        self._ring = data.manager.host.borrow(ring.nbytes)
        self._free = list(range(ring.pages))
        self._jobs: deque[Job] = deque()
        self._sets: deque[tuple[Job, PageSet]] = deque()
        self._writing: deque[PageSet] = deque()
        self._ahead: dict[tuple[int, int], PageSet] = {}
        """Pages read for updates that nobody has asked for yet, by chunk index and first element."""
        self._order: list[int] = []
        """Chunk indices in the order in which updates were last asked for: what to expect."""

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
        touched = deque(
            (first, numel)
            for first, numel in self._pages(lists[0])
            if any(_overlap(one, first, first + numel) for one in rules)
        )
        if index in self._order:
            self._order.remove(index)
        self._order.append(index)
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
        """Update the pages that have arrived, and ask for the next; never waits for the disk."""
        if not self.ahead:
            return
        self._read_ahead()
        while self._sets:
            job, there = self._sets[0]
            param16 = self._param16(job)
            arrived = all(transfer.done for transfer in there.transfers)
            if not arrived or param16.coming is not None or not param16.in_memory:
                break
            self._update_first()
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
            job, there = self._sets[0]
            self._wait(there.transfers)
            self.data.manager.have(self._param16(job))
            self.data.follow_moves()
            self._update_first()
        if indices is None:
            while self._writing:
                self._wait(self._writing[0].transfers)
                self._collect()

    def _give_up(self, error: BaseException) -> None:
        """What is under way can't be finished: parameters become their masters, rounded, as far as these have come."""
        slots = [slot for job in self._jobs for slot in job.rules if slot.pending]
        dropped = [there for _, there in self._sets]
        self._jobs.clear()
        self._sets.clear()
        if self.data.manager.transit.failed is not None:
            return
        for there in dropped:
            self._drop(there)
        for slot in slots:
            self.data.have(slot)
            self.data.give_up(slot)
        error.add_note(
            f"The update of {', '.join(slot.name for slot in slots)} failed on the way: these parameters may be "
            f"updated in part, their gradients are gone. Load a saved state to go on as before."
        )

    # Inside

    def _param16(self, job: Job) -> Chunk:
        return next(iter(job.rules)).chunk

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self.data.manager.transit.wait(transfer)

    def _collect(self) -> None:
        """Take pages back whose bytes are on disk."""
        while self._writing and all(transfer.done for transfer in self._writing[0].transfers):
            self._wait(self._writing[0].transfers)
            written = self._writing.popleft()
            self._free.extend(written.buffers)
            for chunk in written.lists:
                chunk.writing = [transfer for transfer in chunk.writing if not transfer.done]

    def _read_ahead(self) -> None:
        """Ask for as many pages as the ring has room for: of what is to be updated, then of what will be."""
        self._collect()
        for job in self._jobs:
            while job.to_read:
                first, numel = job.to_read[0]
                there = self._ahead.pop((job.index, first), None)
                if there is not None and not there.serves(job):
                    self._drop(there)
                    there = None
                if there is None:
                    while self._ahead and len(self._free) < len(job.lists):
                        _, untold = self._ahead.popitem()  # the last to be expected
                        self._drop(untold)
                    there = self._read(job.lists, first, numel)
                if there is None:
                    return
                job.to_read.popleft()
                self._sets.append((job, there))
        if self.ahead:
            self._read_on_trust()

    def _read_on_trust(self) -> None:
        """Fill what is left of the ring with pages of the next updates, which come in the same order in each step.

        So the disk has work where a step has none for it, and the update begins with what memory holds.
        """
        manager, pending = self.data.manager, self.pending
        for index in self._order:
            slots = self.data.by_chunk.get(index)
            if index in pending or slots is None:
                continue
            lists = [manager[spec.kind, index] for spec in slots[0].scheme.optimizer_lists]
            if any(chunk.in_memory for chunk in lists):
                continue
            for first, numel in self._pages(lists[0]):
                if (index, first) not in self._ahead:
                    there = self._read(lists, first, numel)
                    if there is None:
                        return
                    self._ahead[index, first] = there

    def _read(self, lists: list[Chunk], first: int, numel: int) -> PageSet | None:
        """Begin to read a page of each list; None where the ring is full, or the last update is not yet on disk."""
        if any(chunk.writing for chunk in lists) or len(self._free) < len(lists):
            return None
        buffers = [self._free.pop() for _ in lists]
        there = PageSet(lists, first, numel, buffers, [chunk.disk_version for chunk in lists])
        for chunk, memory in zip(lists, self._views(there), strict=True):
            start = first * chunk.dtype.itemsize
            there.transfers.append(self.data.manager.transit.read(chunk, start, memory.view(torch.uint8)))
        return there

    def _drop(self, there: PageSet) -> None:
        """Pages that nobody wants after all."""
        self._wait(there.transfers)
        self._free.extend(there.buffers)

    def _pages(self, chunk: Chunk) -> list[tuple[int, int]]:
        """The first element and the length of each page of a list."""
        length = self.page_bytes // chunk.dtype.itemsize if self.ring.by_pages else chunk.numel
        return [(first, min(length, chunk.numel - first)) for first in range(0, chunk.numel, max(1, length))]

    def _views(self, there: PageSet) -> list[torch.Tensor]:
        """The set's pages as tensors, in the order of its job's lists."""
        ring = self.data.manager.host.slab.view(self._ring, torch.uint8)
        found = []
        for chunk, number in zip(there.lists, there.buffers, strict=True):
            begin, nbytes = number * self.ring.page_bytes, there.numel * chunk.dtype.itemsize
            found.append(ring[begin : begin + nbytes].view(chunk.dtype))
        return found

    def _update_first(self) -> None:
        """Update what the first set holds, and begin to write it back."""
        try:
            job, there = self._sets[0]
            self._update(job, there)
            self._sets.popleft()
            self._writing.append(there)
            job.to_update -= 1
            if not job.to_update:
                self._jobs.remove(job)
                self.data.updated(job.rules)
        except BaseException as error:
            # Wherever Ctrl-C or a failure struck: what lies on disk is whole, page by page, and parameters follow it.
            self._give_up(error)
            raise

    def _update(self, job: Job, there: PageSet) -> None:
        manager = self.data.manager
        self._wait(there.transfers)
        pages = dict(zip((chunk.kind for chunk in there.lists), self._views(there), strict=True))
        spans = []
        for slot, rule in job.rules.items():
            part = _overlap(slot, there.first, there.first + there.numel)
            if part is not None:
                spans.append(self._span(slot, rule, part, there.first, pages))
        self.start(spans, job.scales)
        param16 = self._param16(job)
        manager.mark_written(param16, on_device=param16.device_valid)
        there.transfers = []
        for chunk, memory in zip(there.lists, pages.values(), strict=True):
            if chunk.kind != GRAD32:
                write = manager.transit.write(chunk, there.first * chunk.dtype.itemsize, memory.view(torch.uint8))
                there.transfers.append(write)
                chunk.writing.append(write)

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


def _overlap(slot: Slot, first: int, end: int) -> slice | None:
    """The part of a parameter, among its own elements, that lies between two elements of its chunk."""
    begin, stop = max(first, slot.place.offset), min(end, slot.place.offset + slot.place.numel)
    return slice(begin - slot.place.offset, stop - slot.place.offset) if begin < stop else None
