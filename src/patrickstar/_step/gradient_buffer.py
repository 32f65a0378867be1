"""Buffers of lock-free updates: sums of gradients that no update has used, and the newest parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import BUFFERED16, BUFFERED_GRAD
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._step.update import WHOLE, Home, InPlace, Page, Part, Rules, Update
from patrickstar._step.update_log import Pages, UpdateRecord
from patrickstar._step.update_rules import UpdateRules
from patrickstar._tiers.chunk import Chunk


@dataclass(eq=False)
class BufferedPage(Page):
    """One page of a chunk, which is updated as a whole."""

    number: int
    pending: dict[ManagedParam, int] = field(default_factory=dict)
    """Number of gradients in the sums, by parameter."""
    oldest: int = 0
    """Step of the first of these gradients."""
    used: tuple[int, int] = (0, 0)
    """First and last step whose gradients the last update has used."""
    updates: dict[ManagedParam, int] = field(default_factory=dict)
    """Number of updates of these elements, by parameter."""


class GradientBuffer(Home):
    """Sums of gradients and newest parameters, page by page, in host memory.

    Args:
        page_numel: Returns the number of elements of the pages of chunks of masters and states.
    """

    late = True

    def __init__(
        self, data: LocalShards, update_rules: UpdateRules, page_numel: Callable[[Sequence[Chunk]], int]
    ) -> None:
        super().__init__(data)
        self.step = 0
        """Number of the last step that has begun to add gradients."""
        self.accepted: dict[int, int] = {}
        """Last step whose gradients were added, by chunk index."""
        self.records: list[UpdateRecord] = []
        """Updates that the log does not contain yet."""
        self.renewed: set[ManagedParam] = set()
        """Parameters with values that operators do not read yet."""
        self._update_rules, self._page_numel = update_rules, page_numel
        self._groups: dict[ManagedParam, Mapping[str, Any]] = {}
        """Param group of each parameter as it was in the last step in which it had a gradient."""
        self._pages: dict[int, list[BufferedPage]] = {}

    def pages(self, index: int) -> list[BufferedPage]:
        """Return the pages of a chunk."""
        if index not in self._pages:
            states = self.data.state_chunks(index)
            whole = states[0].numel
            numel = max(1, min(self._page_numel(states), whole))
            self._pages[index] = [
                BufferedPage(index, first, min(numel, whole - first), number)
                for number, first in enumerate(range(0, whole, numel))
            ]
        return self._pages[index]

    def pages_of(self, managed: ManagedParam) -> Iterator[tuple[BufferedPage, slice]]:
        """Yield the pages with elements of a parameter, and these elements."""
        for page in self.pages(managed.location.chunk):
            if (part := page.part(managed)) is not None:
                yield page, part

    def pending(self, index: int | None = None) -> list[BufferedPage]:
        """Return the pages, of one chunk or of all, with gradients that no update has used."""
        indices = [each for each in self._pages if each in self.data.by_chunk] if index is None else [index]
        return [page for each in indices for page in self.pages(each) if page.pending]

    def pages_in(self, updates: Iterable[Update]) -> list[BufferedPage]:
        """Return the pages that updates have yet to update."""
        return [self._page(each.index, page.first) for each in updates for page in each.pages[each.updated :]]

    def describe(self) -> Pages:
        """Return the pages as the log describes them, in the types that JSON has."""
        return {
            str(index): {
                "page_numel": self.pages(index)[0].numel if self.pages(index) else 0,
                "params": [
                    [each.name, each.location.offset, each.location.numel, *([each.shard_start] * each.chunk.sharded)]
                    for each in managed_params
                ],
            }
            for index, managed_params in self.data.by_chunk.items()
            if managed_params[0].schema.trained
        }

    def fill(self, managed: ManagedParam) -> None:
        """Fill the buffer of a parameter, whose updates were not lock-free before, with its present values."""
        for page, _ in self.pages_of(managed):
            page.updates[managed] = managed.steps
        if managed.schema.splits:
            return  # the buffer has them, as the upper halves of masters
        self.data.ensure_local(managed)
        newest = self.data.manager[BUFFERED16, managed.location.chunk]
        managed.flat(newest).copy_(managed.flat(managed.shard_chunk))
        self.data.manager.mark_written(newest, on_device=False)
        if managed.shard_chunk.device.valid:
            nbytes = managed.location.numel * managed.shard_chunk.dtype.itemsize
            self.data.manager.count_transfer(nbytes, to_device=False)

    def add(self, managed: ManagedParam, group: Mapping[str, Any], scales: Sequence[float]) -> None:
        """Add the gradient of a parameter, multiplied by `scales`, to the sums.

        Args:
            group: Options of its param group, which do not change any more.
        """
        self._groups[managed] = group
        kind, index = BUFFERED_GRAD, managed.location.chunk
        for elements, gradient in self._gradient(managed):
            sums = managed.flat(self.data.manager[kind, index])  # reading the gradient may have moved it
            for page, part in self.pages_of(managed):
                first, stop = max(part.start, elements.start), min(part.stop, elements.stop)
                if first < stop:
                    within = slice(first - elements.start, stop - elements.start)
                    value = _on_host(gradient.page(within), sums.device).scaled(scales)
                    total = sums[first:stop]
                    total.copy_(value.add_(total) if managed in page.pending else value)
        for page, _ in self.pages_of(managed):
            page.oldest = page.oldest if page.pending else self.step
            page.pending[managed] = page.pending.get(managed, 0) + 1
        self.data.manager.mark_written(self.data.manager[kind, index], on_device=False)
        self._count_copies(managed)

    def _count_copies(self, managed: ManagedParam) -> None:
        """Count the copies of the parts of a gradient that are on the device."""
        sources = [managed.shard_chunk] if managed.overlays_shard else []
        sources += self.data.gradient_sums(managed.location.chunk) if managed.state.accumulated else []
        for chunk in sources:
            if chunk.device.valid:
                self.data.manager.count_transfer(managed.location.numel * chunk.dtype.itemsize, to_device=False)

    def _gradient(self, managed: ManagedParam) -> Iterator[tuple[slice, Gradient]]:
        """Yield the gradient of a parameter in parts."""
        if managed.overlays_shard:
            self.data.ensure_local(managed)
        if self.data.gradient_on_disk(managed):
            yield from self.data.gradient_parts(managed)
        else:
            yield slice(0, managed.location.numel), self.data.gradient(managed)

    def renew(self, managed: ManagedParam) -> None:
        """Make the newest values of a parameter those that operators read."""
        self.renewed.discard(managed)
        self.data.ensure_local(managed)
        self.data.renew(managed)

    @property
    def staleness(self) -> tuple[float, int]:
        """Number of gradients that no update has used: mean over the elements of trained parameters, and maximum."""
        trained = sum(managed.location.numel for managed in self.data.managed_params if managed.schema.trained)
        waiting, most = 0, 0
        for page in self.pending():
            for managed, count in page.pending.items():
                part = page.part(managed)
                assert part is not None, f"{managed.name} has no elements on page {page.number} of chunk {page.index}"
                waiting += count * (part.stop - part.start)
                most = max(most, count)
        return waiting / max(1, trained), most

    def rules(self, pages: Sequence[BufferedPage]) -> dict[ManagedParam, Rule]:
        """Return the rules of the next update of pages."""
        return {managed: self._rule(page, managed) for page in pages for managed in page.pending}

    def _rule(self, page: BufferedPage, managed: ManagedParam) -> Rule:
        count = page.updates.get(managed, managed.steps) + 1
        return self._update_rules.rule(managed, self._groups[managed], count)

    # The home of updates

    def target(self, index: int) -> Chunk:
        """Return the chunk of the newest parameters."""
        return self.data.manager[BUFFERED16, index]

    def waiting(self, index: int) -> Chunk | None:
        """Return None: whoever adds gradients ends the updates of the last step before."""
        return None

    def used(self, index: int) -> list[Chunk]:
        """Return the chunks of masters and states, and of both buffers."""
        return [*self.written(index), self.data.manager[BUFFERED_GRAD, index]]

    def lists(self, index: int) -> list[Chunk]:
        """Return the chunks of masters and states."""
        return self.data.state_chunks(index)

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update with the sums of a parameter."""
        master, *states = self._states(managed, part)
        grad = Gradient(self._elements(managed, BUFFERED_GRAD, part), None, managed.full_dtype)
        newest = self._elements(managed, BUFFERED16, part)
        upper = newest if managed.schema.splits else None
        return Span(newest, grad, master, tuple(states), rule, name=managed.name, upper=upper)

    def spans(self, page: Page, rules: Rules, lists: Mapping[str, torch.Tensor], in_order: bool = False) -> list[Span]:
        """Return the tensors that the update of a page reads and writes, with all gradients of its sums by now."""
        pending = self._page(page.index, page.first)
        rules = {managed: self._rule(pending, managed) for managed in pending.pending}
        return super().spans(page, rules, lists, in_order)

    def whole(self, update: Update, *, beside: bool, waits: bool) -> list[Span]:
        """Return the tensors of an update in memory, page by page."""
        chunks = self.data.state_chunks(update.index)
        states = ((page, {chunk.kind: chunk.flat(page.first, page.numel) for chunk in chunks}) for page in update.pages)
        return [span for page, views in states for span in self.spans(page, {}, views)]

    def compute(self, kernels: Kernels, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update at once, with copies of what is not on the tier of the states."""
        compute_beside(self.data, kernels, spans, scales)

    def finish(self, update: Update) -> None:
        """Wait for an update in memory, and note it. Raises its error."""
        if update.running is not None:
            update.running.wait()
        for page in update.pages:
            self.note_update(update.index, page.first)

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write back a page set that has been updated, and note it."""
        super().end_page(pages, pool)
        self.note_update(pages.index, pages.first)

    def note_update(self, index: int, first: int) -> None:
        """Note that a page has been updated with all gradients in its sums."""
        page = self._page(index, first)
        for managed in page.pending:
            page.updates[managed] += 1
            managed.steps, managed.observed = max(managed.steps, page.updates[managed]), True
            self.renewed.add(managed)
        page.used = page.oldest, self.accepted[index]
        self.records.append(UpdateRecord(index, page.number, *page.used))
        page.pending.clear()

    def forget_updates(self) -> None:
        """Forget which gradients the last updates have used: a flush has published their results."""
        for pages in self._pages.values():
            for page in pages:
                page.used = (0, 0)

    def forget(self, rules: Iterable[ManagedParam]) -> None:
        """Drop the gradients of parameters whose update has failed."""
        for managed in rules:
            self.renewed.discard(managed)
            for page, _ in self.pages_of(managed):
                page.pending.pop(managed, None)

    def _page(self, index: int, first: int) -> BufferedPage:
        pages = self.pages(index)
        return pages[first // pages[0].numel]


class InBuffer(InPlace):
    """The buffer of newest values, if they are the upper halves of masters, before updates are lock-free.

    Gradients are in place of the parameters, which are a copy of the newest values then, too.
    """

    uploads = False

    def written(self, index: int) -> list[Chunk]:
        """Return the chunks that an update writes, with that of the newest values."""
        return [*super().written(index), self.data.manager[BUFFERED16, index]]

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update that writes the newest values."""
        newest = self._elements(managed, BUFFERED16, part)
        return replace(super().span(managed, rule, part), param=newest, upper=newest)

    def compute(self, kernels: Kernels, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update at once, with copies of what is not on the tier of the states."""
        compute_beside(self.data, kernels, spans, scales)

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write back a page set that has been updated."""
        pool.write(pages, self.data.state_chunks(pages.index))

    def end(self, rules: Rules) -> None:
        """Replace the gradients by the newest values, and let operators read these."""
        for managed in rules:
            self.data.renew(managed)
        super().end(rules)


def compute_beside(data: LocalShards, kernels: Kernels, spans: Sequence[Span], scales: Sequence[float]) -> None:
    """Update at once, with copies of newest values, and of gradients, that are not on the tier of the states."""
    for span in spans:
        device = span.master.device
        if span.param.device == device:
            kernels.update([span], scales)
            continue
        grad = replace(span.grad, latest=span.grad.latest.to(device))
        param = torch.empty_like(span.param, device=device) if span.upper is None else span.param.to(device)
        kernels.update([replace(span, grad=grad, param=param, upper=None if span.upper is None else param)], scales)
        span.param.copy_(param)
        copied = [source for source in (span.grad.latest, span.upper) if source is not None and source.device != device]
        data.manager.count_transfer(sum(source.nbytes for source in copied), to_device=True)
        data.manager.count_transfer(param.nbytes, to_device=False)


def _on_host(gradient: Gradient, host: torch.device) -> Gradient:
    """Copy a gradient to the host before it is scaled: its parts have fewer bytes than the result."""
    accumulated = None if gradient.accumulated is None else gradient.accumulated.to(host)
    return Gradient(gradient.latest.to(host), accumulated, gradient.dtype)


def by_chunk(pages: Iterable[BufferedPage]) -> dict[int, list[BufferedPage]]:
    """Return pages by their chunk index."""
    found: dict[int, list[BufferedPage]] = {}
    for page in pages:
        found.setdefault(page.index, []).append(page)
    return found
