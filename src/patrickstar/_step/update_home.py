"""Homes of an update: where it finds the gradients, and where the new values go."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import DELAYED16, GRAD32, PARAM16
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._tiers.chunk import Chunk

# [Note: homes of an update]
# What an update computes depends neither on its time nor on the tier that it runs on. Its home says which memory it
# uses beside masters and states: gradients in place of the parameters, which the new ones overwrite (`InPlace`), or
# stay beside results in spare pages until the step decides (`SparePages`); lists that operators do not read, so that an
# update may run beside them (`DelayedList`, `GradientBuffer`); the gradient list alone (`GradientList`). Whoever runs
# an update asks its home for the tensors.

Rules = Mapping[ManagedParam, Rule]


@dataclass(eq=False)
class Page:
    """Elements `first` to `first + numel` of the chunks of an index."""

    index: int
    first: int
    numel: int

    def part(self, managed: ManagedParam) -> slice | None:
        """Return the elements of a parameter that are on the page; None if there are none."""
        offset, end = managed.location.offset, managed.location.offset + managed.location.numel
        begin, stop = max(self.first, offset), min(self.first + self.numel, end)
        return slice(begin - offset, stop - offset) if begin < stop else None


class Part(NamedTuple):
    """Elements of one parameter that an update takes, all by default; `in_order`: see `Chunk.flat`."""

    elements: slice | None = None
    views: Mapping[str, torch.Tensor] = {}
    """These elements of the lists that are on a page; other lists are in memory."""
    in_order: bool = False


WHOLE, WHOLE_IN_ORDER = Part(), Part(in_order=True)


class Home:
    """Memory that updates use beside masters and states. See [Note: homes of an update]."""

    late = False
    """True if operators go on reading the parameters while an update runs."""
    speculative = False
    """True if results may be given up at any time. See [Note: speculation]."""

    def __init__(self, data: LocalShards) -> None:
        self.data = data

    @property
    def is_current(self) -> bool:
        """True if the gradients have not changed since the update was started."""
        return True

    def lists(self, index: int) -> list[Chunk]:
        """Return the chunks whose pages an update on disk reads."""
        sums = [chunk for chunk in self.data.gradient_sums(index) if not chunk.in_memory]
        return [*self._own_lists(index), *sums]

    def _own_lists(self, index: int) -> list[Chunk]:
        return self.data.state_chunks(index)

    def waiting(self, index: int) -> Chunk | None:
        """Return the chunk that waits for the update, whose gradients it holds; None: none does."""
        return None

    def chunks(self, index: int, lists: Collection[Chunk]) -> list[Chunk]:
        """Return the chunks in memory that an update uses, besides `lists`."""
        return [sums for sums in self.data.gradient_sums(index) if sums not in lists]

    def begin(self, rules: Rules) -> None:
        """Note that an update of these parameters begins."""

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors that the update of a parameter reads and writes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what an update accesses")

    def spans(self, page: Page, rules: Rules, lists: Mapping[str, torch.Tensor], in_order: bool = False) -> list[Span]:
        """Return the tensors that the update of a page reads and writes. `lists`: the page of each list on it."""
        spans = []
        for managed, rule in rules.items():
            if (elements := page.part(managed)) is not None:
                begin = managed.location.offset + elements.start - page.first
                views = {kind: view[begin : begin + elements.stop - elements.start] for kind, view in lists.items()}
                spans.append(self.span(managed, rule, Part(elements, views, in_order)))
        return spans

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write back a page set that has been updated."""
        pool.write(pages, [chunk for chunk in pages.lists if chunk.kind != GRAD32])

    def end(self, rules: Rules) -> None:
        """End an update of these parameters."""

    def give_up(self, rules: Rules) -> None:
        """Forget an update of these parameters, which has failed."""

    def _states(self, managed: ManagedParam, part: Part) -> list[torch.Tensor]:
        return [self._elements(managed, spec.kind, part) for spec in managed.schema.state_lists]

    def _elements(self, managed: ManagedParam, kind: str, part: Part) -> torch.Tensor:
        if kind in part.views:
            return part.views[kind]
        chunk = managed.shard_chunk if kind == PARAM16 else self.data.manager[kind, managed.location.chunk]
        flat = managed.flat(chunk, in_order=part.in_order)
        return flat if part.elements is None else flat[part.elements]


class InPlace(Home):
    """The place of the parameters: gradients are there, and the new parameters overwrite them."""

    def waiting(self, index: int) -> Chunk | None:
        """Return the chunk of the parameters, unless results may be given up."""
        return None if self.speculative else self.data.by_chunk[index][0].shard_chunk

    def chunks(self, index: int, lists: Collection[Chunk]) -> list[Chunk]:
        """Return the chunk of the parameters, and the sums of gradients."""
        return [self.data.by_chunk[index][0].shard_chunk, *super().chunks(index, lists)]

    def begin(self, rules: Rules) -> None:
        """Let whoever needs the parameters wait for the update."""
        for managed in rules:
            managed.begin_update()

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update in place."""
        param, dtype = self._elements(managed, PARAM16, part), getattr(torch, managed.schema.master_dtype)
        if managed.state.accumulated:
            sums = self._elements(managed, GRAD32, part)
            grad = Gradient(param, sums, dtype) if managed.overlays_shard else Gradient(sums, None, dtype)
        else:
            grad = Gradient(param, None, dtype)
        master, *states = self._states(managed, part)
        return Span(param, grad, master, tuple(states), rule, name=managed.name)

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Mark the parameters on a page as written, and start to write back the page set."""
        param16 = pages.owner.param16
        self.data.manager.mark_written(param16, on_device=param16.device.valid)
        super().end_page(pages, pool)

    def end(self, rules: Rules) -> None:
        """Let operators read the new parameters."""
        self.data.end_update(rules)

    def count_transfers(self, managed: ManagedParam, numel: int, *, upload: bool, by_kernel: bool) -> int:
        """Count, and return, the bytes of an update on the host of elements that are on the device.

        Their gradient is copied down, and the new parameters up, if `upload`.
        """
        nbytes = numel * managed.shard_chunk.dtype.itemsize
        directions = [*([False] if managed.overlays_shard else []), *([True] if upload else [])]
        for to_device in directions:
            self.data.manager.count_transfer(nbytes, to_device=to_device, by_kernel=by_kernel)
        return nbytes * len(directions)


class SparePages(InPlace):
    """Spare pages of the disk: old values and gradients stay where they are."""

    speculative = True

    def __init__(self, data: LocalShards, index: int) -> None:
        super().__init__(data)
        chunks = data.by_chunk[index][0].shard_chunk, *data.gradient_sums(index)
        self._versions = {chunk: chunk.version for chunk in chunks}

    @property
    def is_current(self) -> bool:
        """True if the gradients are in memory and have not changed."""
        return all(chunk.in_memory and chunk.version == version for chunk, version in self._versions.items())

    def begin(self, rules: Rules) -> None:
        """Do nothing: the step decides."""

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update whose new parameters go to a page of their own."""
        read = {kind: view for kind, view in part.views.items() if kind != PARAM16}
        return replace(super().span(managed, rule, part._replace(views=read)), param=part.views[PARAM16])

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write a page set to spare pages."""
        pool.write_spare(pages, pages.owner.param16)

    def end(self, rules: Rules) -> None:
        """Do nothing: the step decides."""


class DelayedList(Home):
    """The list `delayed16`, where the gradients of the last step are. See [Note: delayed updates].

    Args:
        listed: Parameters whose gradients are in the gradient list.
    """

    late = True

    def __init__(self, data: LocalShards, listed: Collection[ManagedParam]) -> None:
        super().__init__(data)
        self._listed = listed

    def _own_lists(self, index: int) -> list[Chunk]:
        return self.data.optimizer_chunks(index)

    def waiting(self, index: int) -> Chunk | None:
        """Return the chunk of the list."""
        return self.data.manager[DELAYED16, index]

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of a delayed update."""
        param = self._elements(managed, DELAYED16, part)
        latest = self._elements(managed, GRAD32, part) if managed in self._listed else param
        grad = Gradient(latest, None, getattr(torch, managed.schema.master_dtype))
        master, *states = self._states(managed, part)
        return Span(param, grad, master, tuple(states), rule, name=managed.name)

    def give_up(self, rules: Rules) -> None:
        """Do not count the update."""
        for managed in rules:
            managed.steps -= 1


class GradientList(Home):
    """The gradient list, of updates of all parameters together; the parameters are rounded after them."""

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update of masters and states."""
        master, *states = self._states(managed, part)
        grad = self._elements(managed, GRAD32, part) if managed.has_gradient else master
        return Span(master, Gradient(grad), master, tuple(states), rule, name=managed.name)
