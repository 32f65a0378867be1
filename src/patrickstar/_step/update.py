"""Update of one chunk, and its home: where it finds the gradients, and where the new values go."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import DELAYED16, GRAD32, PARAM16, SHARD16
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._tiers.chunk import Chunk, Copy

# [Note: homes of an update]
# What an update computes depends neither on its time nor on the tier that it runs on. Its home says which memory it
# uses beside masters and states: gradients in place of the parameters, which the new ones overwrite (`InPlace`), unless
# these go to the chunk's host copy (`InHostCopy`); or gradients that stay beside results in spare memory until the step
# decides (`SpareBlocks`, `SparePages`); lists that operators do not read, so that an update may run beside them
# (`DelayedList`, `GradientBuffer`); the gradient list alone (`GradientList`). Whoever runs an update asks its home for
# the tensors.

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


@dataclass(eq=False)
class Update:
    """Update of the parameters of one chunk by their rules. It multiplies their gradients by `scales` in order."""

    index: int
    rules: Rules
    scales: Sequence[float]
    home: "Home"
    pages: Sequence[Page] = ()
    """Pages that it updates, in their order; on disk by default all that have parameters."""
    lists: list[Chunk] = field(default_factory=list)
    """Chunks whose pages it reads, if their states are on disk."""
    updated: int = 0
    """Number of pages updated so far."""
    running: Transfer | None = None
    """What runs beside the training thread, if its states are in memory."""
    given_up: bool = False
    """True if it gives no result, and is in the queue for who asks about it: a speculative one until the step decides,
    others after a loss of chunk data."""

    @property
    def param16(self) -> Chunk:
        """Chunk of the parameters, or of the gradients in their place."""
        return next(iter(self.rules)).shard_chunk

    @property
    def reads_memory(self) -> bool:
        """True if it reads gradients in place of parameters in memory, and not on its pages."""
        return not self.home.late and self.param16 not in self.lists

    @property
    def complete(self) -> bool:
        """True once all pages are updated."""
        return self.updated == len(self.pages)

    def give_up(self, error: BaseException) -> None:
        """Give the update up, which has failed."""
        self.home.forget(self.rules)
        give_up(self.home.data, self.rules, error)


def give_up(data: LocalShards, failed: Collection[ManagedParam], error: BaseException) -> None:
    """Reset the parameters of failed updates to the rounded masters, updated or not, and name them in the error.

    After a loss of chunk data nothing is reset: the engine will close, and read back what it can.
    """
    chunks: dict[int, list[str]] = {}
    for managed in failed:
        chunks.setdefault(managed.location.chunk, []).append(managed.name)
        if data.manager.io_dispatch.failed is None:
            data.give_up(managed)
    if chunks:
        names = ", ".join(f"chunk {index} ({', '.join(names)})" for index, names in chunks.items())
        error.add_note(
            f"The optimizer step failed while updating {names}. These parameters may be updated in part, and their "
            f"gradients are lost. Load a checkpoint before training on."
        )


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

    # What an update uses

    def target(self, index: int) -> Chunk:
        """Return the chunk that gets the new parameters."""
        raise NotImplementedError(f"{type(self).__name__} does not say where new parameters go")

    def waiting(self, index: int) -> Chunk | None:
        """Return the chunk that waits for the update, whose gradients it holds; None: none does."""
        return self.target(index)

    def written(self, index: int) -> list[Chunk]:
        """Return the chunks that an update writes."""
        return [self.target(index), *self.data.state_chunks(index)]

    def used(self, index: int) -> list[Chunk]:
        """Return the chunks that an update reads or writes."""
        return [*self.written(index), *self.data.gradient_sums(index)]

    def copies(self, chunks: Sequence[Chunk]) -> list[Copy]:
        """Return the copies of these chunks that an update uses."""
        return [chunk.in_use for chunk in chunks]

    def lists(self, index: int) -> list[Chunk]:
        """Return the chunks whose pages an update on disk reads."""
        sums = [chunk for chunk in self.data.gradient_sums(index) if not chunk.in_memory]
        return [*self._own_lists(index), *sums]

    def _own_lists(self, index: int) -> list[Chunk]:
        return self.data.state_chunks(index)

    @property
    def is_current(self) -> bool:
        """True if the gradients have not changed since the update was started."""
        return True

    # Its tensors

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors that the update of a parameter reads and writes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what an update accesses")

    def whole(self, update: Update, *, beside: bool, waits: bool) -> list[Span]:
        """Return the tensors of an update in memory, and count what it copies.

        Args:
            beside: It runs on the host beside operators.
            waits: It waits for the copies of its chunks itself.
        """
        return self._whole(update.rules, WHOLE_IN_ORDER if beside else WHOLE)

    def _whole(self, rules: Rules, part: Part) -> list[Span]:
        return [self.span(managed, rule, part) for managed, rule in rules.items()]

    def spans(self, page: Page, rules: Rules, lists: Mapping[str, torch.Tensor], in_order: bool = False) -> list[Span]:
        """Return the tensors that the update of a page reads and writes. `lists`: the page of each list on it."""
        spans = []
        for managed, rule in rules.items():
            if (elements := page.part(managed)) is not None:
                begin = managed.location.offset + elements.start - page.first
                views = {kind: view[begin : begin + elements.stop - elements.start] for kind, view in lists.items()}
                spans.append(self.span(managed, rule, Part(elements, views, in_order)))
        return spans

    def count_transfers(self, managed: ManagedParam, numel: int, *, by_kernel: bool) -> int:
        """Count, and return, the bytes that an update on the host of elements of a parameter copies."""
        return 0

    def _states(self, managed: ManagedParam, part: Part) -> list[torch.Tensor]:
        return [self._elements(managed, spec.kind, part) for spec in managed.schema.state_lists]

    def _elements(self, managed: ManagedParam, kind: str, part: Part) -> torch.Tensor:
        if kind in part.views:
            return part.views[kind]
        chunk = managed.shard_chunk if kind == PARAM16 else self.data.manager[kind, managed.location.chunk]
        flat = managed.flat(chunk, in_order=part.in_order)
        return flat if part.elements is None else flat[part.elements]

    # Its course

    def begin(self, rules: Rules) -> None:
        """Note that an update of these parameters begins."""

    def compute(self, kernels: Kernels, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update at once."""
        kernels.update(spans, scales)

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write back a page set that has been updated."""
        pool.write(pages, [chunk for chunk in pages.lists if chunk.kind != GRAD32])

    def finish(self, update: Update) -> None:
        """Wait for an update in memory, and end it. Raises its error."""
        if update.running is not None:
            update.running.wait()
        self.end(update.rules)

    def end(self, rules: Rules) -> None:
        """End an update of these parameters."""

    def forget(self, rules: Collection[ManagedParam]) -> None:
        """Forget an update of these parameters, which has failed."""


class InPlace(Home):
    """The place of the parameters: gradients are there, and the new parameters overwrite them."""

    uploads = True
    """True if an update on the host copies new parameters to the device, if these are there."""

    def target(self, index: int) -> Chunk:
        """Return the chunk of the parameters."""
        return self.data.by_chunk[index][0].shard_chunk

    def _own_lists(self, index: int) -> list[Chunk]:
        target = self.target(index)
        on_disk = target.kind == SHARD16 and not target.in_memory  # its gradients, which new parameters overwrite
        return [*super()._own_lists(index), *([target] if on_disk else [])]

    def begin(self, rules: Rules) -> None:
        """Let whoever needs the parameters wait for the update."""
        for managed in rules:
            managed.begin_update()

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update in place."""
        param, dtype = self._elements(managed, PARAM16, part), getattr(torch, managed.schema.master_dtype)
        upper = param if managed.schema.gradients_beside else None
        if managed.state.accumulated:
            sums = self._elements(managed, GRAD32, part)
            grad = Gradient(param, sums, dtype) if managed.overlays_shard else Gradient(sums, None, dtype)
        else:
            grad = Gradient(param, None, dtype)
        master, *states = self._states(managed, part)
        return Span(param, grad, master, tuple(states), rule, name=managed.name, upper=upper)

    def whole(self, update: Update, *, beside: bool, waits: bool) -> list[Span]:
        """Return the tensors of an update in memory, whose gradients are settled unless it waits for them itself."""
        if not waits:
            self.data.manager.transfers.settle(update.param16)
        spans = self._whole(update.rules, WHOLE_IN_ORDER if waits else WHOLE)
        if not self.data.state_chunks(update.index)[0].device.valid:
            for managed in update.rules:
                managed.chunk.transferred_bytes += self.count_transfers(
                    managed, managed.location.numel, by_kernel=beside
                )
        return spans

    def count_transfers(self, managed: ManagedParam, numel: int, *, by_kernel: bool) -> int:
        """Count, and return, the bytes of an update on the host of elements of a parameter.

        On the device, their gradient, or the parameter with a split master, is copied down, and the new values up.
        """
        if not managed.shard_chunk.device.valid:
            return 0
        nbytes = numel * managed.shard_chunk.dtype.itemsize
        down = managed.overlays_shard or (managed.schema.gradients_beside and self.uploads)
        directions = [*([False] if down else []), *([True] if self.uploads else [])]
        for to_device in directions:
            self.data.manager.count_transfer(nbytes, to_device=to_device, by_kernel=by_kernel)
        return nbytes * len(directions)

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Mark the parameters on a page as written, and start to write back the page set."""
        param16 = pages.owner.param16
        if param16 not in pages.lists:
            self.data.manager.mark_written(param16, on_device=param16.device.valid)
        super().end_page(pages, pool)

    def end(self, rules: Rules) -> None:
        """Let operators read the new parameters."""
        self.data.end_update(rules)

    def _renew(self, chunk: Chunk, *, urgent: bool) -> None:
        """Make the host copy of a chunk, which an update has written, the valid one."""
        self.data.manager.cache.withdraw_hold(chunk)  # its device memory is filled anew, or freed
        self.data.manager.transfers.host_renewed(chunk, urgent)


class InHostCopy(InPlace):
    """The host copy of a chunk that is on the device, for updates of all parameters in it on the host.

    Both copies are valid once it has been copied to the device, and an eviction needs no copy.
    """

    uploads = False

    def copies(self, chunks: Sequence[Chunk]) -> list[Copy]:
        """Return the copies that an update uses: the host copy of the parameters, and that with their gradients."""
        beside = self.data.by_chunk[chunks[0].index][0].schema.gradients_beside
        return [*super().copies(chunks[1:] if beside else chunks), chunks[0].host]

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update that writes the host copy."""
        param = managed.shard_chunk.flat_on_host(managed.location.offset, managed.location.numel)
        upper = param if managed.schema.gradients_beside else None
        return replace(super().span(managed, rule, part), param=param, upper=upper)

    def end(self, rules: Rules) -> None:
        """Let operators read the new parameters, which are copied to the device."""
        self._renew(next(iter(rules)).shard_chunk, urgent=True)
        super().end(rules)
        self.data.update_param_views()


class SpareHome(InPlace):
    """Spare memory: old values and gradients stay where they are until the step decides. See [Note: speculation]."""

    speculative = True
    uploads = False

    def __init__(self, data: LocalShards, index: int) -> None:
        super().__init__(data)
        self.inputs = self.used(index)
        """Chunks that the update reads: `param16`, masters and states, sums of gradients."""
        self._versions = [chunk.version for chunk in self.inputs]

    def waiting(self, index: int) -> Chunk | None:
        """Return None: the update may be dropped."""
        return None

    def reads_present(self, index: int) -> bool:
        """Return whether an update of now would read what this one has read."""
        inputs = self.used(index)
        return inputs == self.inputs and self._versions == [chunk.version for chunk in inputs]

    def begin(self, rules: Rules) -> None:
        """Do nothing: the step decides."""


class DelayedList(Home):
    """The list `delayed16`, where the gradients of the last step are. See [Note: delayed updates].

    Args:
        listed: Parameters whose gradients are in the gradient list.
    """

    late = True

    def __init__(self, data: LocalShards, listed: Collection[ManagedParam]) -> None:
        super().__init__(data)
        self.listed = listed

    def target(self, index: int) -> Chunk:
        """Return the chunk of the list."""
        return self.data.manager[DELAYED16, index]

    def _own_lists(self, index: int) -> list[Chunk]:
        return self.data.optimizer_chunks(index)

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of a delayed update."""
        param = self._elements(managed, DELAYED16, part)
        latest = self._elements(managed, GRAD32, part) if managed in self.listed else param
        grad = Gradient(latest, None, getattr(torch, managed.schema.master_dtype))
        master, *states = self._states(managed, part)
        return Span(param, grad, master, tuple(states), rule, name=managed.name)

    def forget(self, rules: Collection[ManagedParam]) -> None:
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
