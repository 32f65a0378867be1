"""Rules of the next updates of parameters, and the workspace of those updates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.schema import ParamSchema
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.chunk import Chunk
from patrickstar.optim import Optimizer

GroupOf = Callable[[ManagedParam], Mapping[str, Any] | None]


class UpdateRules:
    """Creates update rules by the optimizer's options and the param groups.

    Args:
        device: Compute device.
    """

    def __init__(self, optimizer: Optimizer, kernels: Kernels, device: torch.device) -> None:
        self._optimizer, self._kernels, self._device = optimizer, kernels, device
        self._updated: set[int] = set()
        """Identities of the param groups of which the present step updates a parameter."""

    def rule(self, managed: ManagedParam, group: Mapping[str, Any], step: int) -> Rule:
        """Return the rule of one update of a parameter.

        Args:
            group: Options of its param group.
            step: Number of the update, counted from 1.
        """
        rule = self._optimizer.rule(group, step, managed.optimizer_extra)
        return rule.for_param(managed.shape, managed.region.strides, self._device)

    def next(self, managed_params: Sequence[ManagedParam], group_of: GroupOf) -> dict[ManagedParam, Rule]:
        """Return the rule of the next update of each parameter that has a gradient and a param group."""
        groups = {managed: group_of(managed) for managed in managed_params if managed.has_gradient}
        return {
            managed: self.rule(managed, group, managed.steps + 1)
            for managed, group in groups.items()
            if group is not None
        }

    def note_updates(self, data: LocalShards, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """Note the param groups of which the step that begins, or the backward before it, updates a parameter."""
        for managed, group in groups.items():
            if id(group) in self._updated:
                continue
            in_backward = managed.state.updated_in_backward == data.backward_id > 0
            if in_backward or managed.in_next_step:
                self._updated.add(id(group))

    def end_step(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Let the optimizer write into param groups, such as a step count; none if the step has been skipped."""
        for group in param_groups:
            group.update(self._optimizer.written_options(group, id(group) in self._updated))
        self._updated.clear()

    def workspace_bytes(self, rules: Mapping[ManagedParam, Rule]) -> int:
        """Return the largest workspace of the updates of parameters on the device, in bytes."""
        sizes = (self._workspace_bytes(each.schema, each.location.numel, rule) for each, rule in rules.items())
        return max(sizes, default=0)

    def _workspace_bytes(self, schema: ParamSchema, numel: int, rule: Rule) -> int:
        dtype = getattr(torch, schema.master_dtype)
        return self._kernels.workspace_bytes(rule, self._device, dtype, numel, splits=schema.splits)

    def make_room(
        self, data: LocalShards, rules: Mapping[ManagedParam, Rule], used: Sequence[Chunk], *, on_device: bool = False
    ) -> None:
        """Make room on the device for the workspace of updates that need whole parameters, and of those on the device.

        For the latter parameters are evicted as far as they can be, if no kernel updates without a workspace.

        Args:
            used: Chunks that have to stay.
            on_device: Masters and states are on the device.

        Raises:
            BudgetError: The device budget is too small for updates that need whole parameters.
        """
        whole = {managed: rule for managed, rule in rules.items() if rule.needs_shape}
        if whole:
            data.manager.cache.make_room(self.workspace_bytes(whole), used)
        elif on_device and data.manager.hardware.has_gpu and (nbytes := self.workspace_bytes(rules)):
            data.manager.cache.evict_idle(nbytes, used)
        else:
            return
        data.update_param_views()

    def default_workspace_bytes(self, managed_params: Sequence[ManagedParam]) -> int:
        """Return the largest workspace of updates on the device with default options, in bytes."""
        rules = {rule.kinds: rule for rule in self._optimizer.default_rules()}
        first = next(iter(rules.values()))
        trained = [managed for managed in managed_params if managed.schema.trained]
        return self.workspace_bytes({managed: rules.get(managed.state_kinds, first) for managed in trained})
