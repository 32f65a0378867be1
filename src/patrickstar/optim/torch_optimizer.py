"""Adapter for optimizers of torch."""

import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import nn

from patrickstar._kernels.torch_optim_adapter import (
    Instances,
    TorchOptimRule,
    construct,
    defaults_of,
    differing,
    frozen,
    one_by_one,
    options_of,
)
from patrickstar._kernels.torch_optim_group import GroupOptimizer
from patrickstar._kernels.torch_optim_probe import Profile, probe
from patrickstar.errors import ConfigError
from patrickstar.optim.muon import Muon
from patrickstar.optim.optimizer import Optimizer


class TorchOptimizer(Optimizer):
    """Adapter for a subclass of `torch.optim.Optimizer`.

    The class runs unchanged, with its states in chunks: on one parameter at a time, or, if that would be another
    algorithm, on all parameters together, whose masters, states and gradients are then in host memory at once. An
    update allocates temporaries of the parameter's size. States that are not of the parameter's shape, such as factored
    moments, are kept beside the chunks, on the tier of the last update. What the class writes into its param groups,
    such as a step count, it writes once per step, as usual.

    Raises:
        ConfigError: The class can't run on chunks, or does not accept the options.
    """

    kind: type[torch.optim.Optimizer]
    """Optimizer class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. Default: none."""

    @classmethod
    def wrapping(cls, value: Any) -> Optimizer | None:
        """Wrap an optimizer class, or a `functools.partial` of one with keyword arguments.

        Args:
            value: Class or partial.

        Returns:
            The adapter, or `Muon` for `torch.optim.Muon`, which takes matrices only; None for any other value.

        Raises:
            ConfigError: The class can't run on chunks, or does not accept the options.
        """
        bound = isinstance(value, functools.partial)
        kind, options = (value.func, value.keywords) if bound else (value, {})
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or (bound and value.args):
            return None
        if kind is torch.optim.Muon:
            return Muon(**options)
        return cls(kind=kind, options=options)

    @property
    def name(self) -> str:
        """Name of the class, for messages."""
        return self.kind.__name__

    @property
    def counts_itself(self) -> bool:
        """Always True: the class keeps its own step count in `memory`."""
        return True

    @property
    def needs_count(self) -> bool:
        """Always False: the class keeps the state that it needs."""
        return False

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """States of the parameter's shape, found by updating small tensors."""
        return self._profile.names

    @functools.cached_property
    def _profile(self) -> Profile:
        return probe(self.kind, self._all_options)

    @property
    def updates_together(self) -> bool:
        """True if the class couples parameters, draws random numbers, or keeps something beside their states."""
        return self._profile.together

    def group_optimizer(self) -> GroupOptimizer | None:
        """Return a new object of the class over all parameters if `updates_together`, else None."""
        return GroupOptimizer(self.kind, self._all_options) if self._profile.together else None

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that a param group needs, found by updating small tensors with its options.

        Args:
            group: Options of the param group. Learning rates are ignored: schedulers change them, not the states.

        Returns:
            Names of chunk lists.

        Raises:
            ConfigError: With these options the class does not update each parameter separately, or needs whole
                parameters, and with its other options it does not.
        """
        accepted, defaults = inspect.signature(self.kind).parameters.keys(), self._defaults
        given = accepted - {"params", *self._profile.writes}
        known = {key: value for key, value in group.items() if key in given and "lr" not in key}
        changed = {key: value for key, value in known.items() if frozen(value) != frozen(defaults.get(key))}
        if not changed:
            return self.states
        key = repr(sorted((name, _switch(value)) for name, value in changed.items()))
        if key not in self._profiles:
            self._profiles[key] = probe(self.kind, self._all_options | changed)
        profile = self._profiles[key]
        own = self._profile
        needs_more = (profile.whole and not own.whole) or (profile.writes and not own.writes) or profile.together
        if needs_more and not own.together:
            raise ConfigError(
                f"a param group sets {', '.join(changed)}, with which {self.name} needs whole parameters, or all at "
                f"once, or writes into its param groups, and with its other options it does not: set them in the "
                f"options"
            )
        return profile.names

    @functools.cached_property
    def _profiles(self) -> dict[str, Profile]:
        """Profiles with options of param groups that are not those of the class."""
        return {}

    @functools.cached_property
    def _all_options(self) -> dict[str, Any]:
        return one_by_one(self.kind, self.options)

    @functools.cached_property
    def _instances(self) -> Instances:
        return Instances(self.kind, self._all_options)

    @functools.cached_property
    def _options_after(self) -> dict[Hashable, dict[str, Any]]:
        """Options of param groups after the present step, by those before it."""
        return {}

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return the param groups of a model, with what the class itself derives from their options.

        Args:
            module: The model.

        Returns:
            Dictionaries as `torch.optim` takes them.
        """
        groups = super().groups(module)
        if self.param_groups is None:
            return groups
        stand_ins = [
            [nn.Parameter(torch.zeros((1,) * param.dim(), device="cpu")) for param in group["params"]]
            for group in groups
        ]
        made = self.over([group | {"params": each} for group, each in zip(groups, stand_ins, strict=True) if each])
        options = iter(made.param_groups)
        return [group | (options_of(next(options)) if group["params"] else {}) for group in groups]

    def over(self, params: Any) -> torch.optim.Optimizer:
        """Create the wrapped optimizer over ordinary tensors.

        Args:
            params: Parameters or param groups, as the class takes them.

        Returns:
            An instance of the class with the options.
        """
        return construct(self.kind, params, self._all_options)

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a param group of the class."""
        return dict(self._defaults)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return defaults_of(self.kind, self._all_options)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> TorchOptimRule:
        """Return the rule of one update by the class; see `Optimizer.rule`."""
        options, profile, after = options_of(group), self._profile, None
        if profile.writes and not profile.together:
            key = frozen(options)
            if key not in self._options_after:
                self._options_after[key] = self._instances.options_after(options, updated=True)
            after = self._options_after[key]
        return TorchOptimRule(self._instances, options, profile.names, memory, step, profile.whole, after)

    def written_options(self, group: Mapping[str, Any], updated: bool) -> dict[str, Any]:
        """Return the options that the class writes into a param group; see `Optimizer.written_options`."""
        self._options_after.clear()
        if not self._profile.writes or self._profile.together:
            return {}
        after = self._instances.options_after(options_of(group), updated)
        return {name: after[name] for name in differing(options_of(group), after)}


def _switch(value: Any) -> Any:
    """Return what an option turns on: schedulers change numbers, and states depend on whether they are zero."""
    if isinstance(value, tuple | list):
        return [_switch(each) for each in value]
    return bool(value) if isinstance(value, float) else value
