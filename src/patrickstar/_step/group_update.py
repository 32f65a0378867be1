"""Update of all parameters together, in host memory. See [Note: all parameters together]."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.rounding import canonical_nan_
from patrickstar._kernels.torch_optim_group import GroupOptimizer, Member, tensor_bytes
from patrickstar._kernels.update_rule import Span
from patrickstar._layout.schema import GRAD32, PARAM32
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar._schedule.placement import Tier
from patrickstar._step.update import GradientList, give_up
from patrickstar._step.update_rules import UpdateRules
from patrickstar._tiers.chunk import Chunk
from patrickstar.optim import Optimizer


class GroupUpdate:
    """Steps of an optimizer class that needs all parameters at once.

    Masters, states and gradients are in host memory at once: gradients in the chunks of the gradient list. What does
    not fit is refused before anything changes.
    """

    def __init__(self, data: LocalShards, kernels: Kernels, rules: UpdateRules, optimizer: GroupOptimizer) -> None:
        self.optimizer = optimizer
        self._data, self._kernels, self._rules = data, kernels, rules
        self._groups: list[dict[str, Any]] = []
        self._reserved_bytes = 0
        """Host memory of states that are in no chunk."""

    @classmethod
    def of(cls, optimizer: Optimizer, data: LocalShards, kernels: Kernels, rules: UpdateRules) -> "GroupUpdate | None":
        """Return the updates by an optimizer that needs all parameters at once, None for another one."""
        together = optimizer.group_optimizer()
        return None if together is None else cls(data, kernels, rules, together)

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """Keep the list of param groups, before anything changes their options."""
        self._groups = groups
        self.optimizer.begin(groups)

    def run(self, scales: Sequence[float]) -> None:
        """Update every parameter that has a gradient, and the param groups; multiply the gradients by `scales`.

        Raises:
            BudgetError: The host has no room; nothing has changed.
            ConfigError: See `GroupOptimizer.step`.
        """
        groups = [list(map(managed_param_of, group["params"])) for group in self._groups]
        every = [managed for group in groups for managed in group if managed is not None]
        trained = [managed for managed in every if managed.schema.trained]
        updated = [managed for managed in trained if managed.has_gradient]
        with self._on_host(dict.fromkeys(managed.location.chunk for managed in trained), updated):
            try:
                self._update(groups, trained, updated, scales)
            except BaseException as error:
                give_up(self._data, updated, error)
                raise
        self._reserve(trained)

    @contextmanager
    def _on_host(self, indices: Iterable[int], updated: Sequence[ManagedParam]) -> Iterator[None]:
        """Keep masters, states and gradient lists of these chunk indices in host memory."""
        data, manager = self._data, self._data.manager
        pinned: list[Chunk] = []
        try:
            chunks = [chunk for index in indices for chunk in (*data.state_chunks(index), *data.gradient_sums(index))]
            for chunk in chunks:
                manager.transfers.settle(chunk, in_order=True)
                chunk.pins += 1
                pinned.append(chunk)
            listed = {index for kind, index in manager.chunks if kind == GRAD32}
            lacking = {each.location.chunk: each for each in updated if each.location.chunk not in listed}
            needed_bytes = sum(chunk.nbytes for chunk in chunks if not chunk.host.present)
            manager.free_host(needed_bytes + sum(manager[PARAM32, index].nbytes for index in lacking))
            for chunk in chunks:
                manager.move_to_tier(chunk, Tier.HOST)
            for managed in lacking.values():
                chunk = data.add_gradient_list(managed, Tier.HOST)
                chunk.pins += 1
                pinned.append(chunk)
            data.update_param_views()
            yield
        finally:
            for chunk in pinned:
                chunk.pins -= 1

    def _update(
        self,
        groups: Sequence[Sequence[ManagedParam | None]],
        trained: Sequence[ManagedParam],
        updated: Sequence[ManagedParam],
        scales: Sequence[float],
    ) -> None:
        for managed in updated:
            self._data.scale_gradient(managed, scales)
        home, rule = GradientList(self._data), self._rules.rule
        spans = {managed: home.span(managed, rule(managed, {}, managed.steps + 1)) for managed in trained}
        members: dict[ManagedParam, Member] = {}

        def update() -> None:
            members.update({managed: self._member(managed, spans) for group in groups for managed in group if managed})
            self.optimizer.step(self._groups, [[members[each] for each in group if each] for group in groups])
            for span in spans.values():
                for values in (span.master, *span.states):
                    canonical_nan_(values)

        self._kernels.update_together(list(spans.values()), update)
        for index in dict.fromkeys(managed.location.chunk for managed in trained):
            for chunk in self._data.state_chunks(index):
                self._data.manager.mark_written(chunk, on_device=False)
        for managed in updated:
            self._data.restore_own(managed)
            managed.begin_update()
        self._data.end_update(updated)
        self._data.update_param_views()
        for managed in trained:
            if managed in members and members[managed].has_state:
                managed.steps = max(managed.steps, 1)

    @staticmethod
    def _member(managed: ManagedParam, spans: Mapping[ManagedParam, Span]) -> Member:
        span, shape, strides = spans.get(managed), managed.region.shape, managed.region.strides
        if span is None:
            return Member(managed.name, managed.meta_tensor, None)
        master, grad, *states = (
            each.as_strided(shape, strides) for each in (span.master, span.grad.latest, *span.states)
        )
        views = dict(zip(managed.state_kinds, states, strict=True))
        memory, has_state = managed.optimizer_extra, managed.steps > 0
        return Member(managed.name, master, grad if managed.has_gradient else None, memory, views, has_state)

    def _reserve(self, trained: Sequence[ManagedParam]) -> None:
        """Count states beside the chunks in the host budget; on a CPU its meter counts them as tensors."""
        host_tier = self._data.manager.host_tier
        if not self._data.manager.hardware.has_gpu:
            return
        nbytes = self.optimizer.kept_bytes + sum(tensor_bytes(managed.optimizer_extra) for managed in trained)
        if nbytes != self._reserved_bytes:
            host_tier.release_reservation(self._reserved_bytes)
            self._reserved_bytes = 0
            host_tier.reserve(nbytes, f"states of {self.optimizer.kind.__name__} that are not of a parameter's shape")
            self._reserved_bytes = nbytes
