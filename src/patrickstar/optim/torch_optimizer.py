"""Adapter for optimizers of torch."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from patrickstar._kernels import torch_optim_adapter
from patrickstar.optim.muon import Muon
from patrickstar.optim.optimizer import Optimizer


class TorchOptimizer(Optimizer):
    """Adapter for a subclass of `torch.optim.Optimizer`.

    The class runs unchanged, on one parameter at a time, with its states in chunks. An update allocates temporaries of
    the parameter's size. States that are not of the parameter's shape, such as factored moments, are kept beside the
    chunks, on the tier of the last update.

    Raises:
        ConfigError: The class does not update each parameter separately, or does not accept the options.
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
            ConfigError: The class does not update each parameter separately, or does not accept the options.
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
        """States of the parameter's shape, found by updating small matrices."""
        return self._probed[0]

    @functools.cached_property
    def _probed(self) -> tuple[tuple[str, ...], bool]:
        return torch_optim_adapter.probe(self.kind, self._all_options)

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that a param group needs, found by updating small matrices with its options.

        Args:
            group: Options of the param group. Learning rates are ignored: schedulers change them, not the states.

        Returns:
            Names of chunk lists.
        """
        accepted, defaults = inspect.signature(self.kind).parameters, self._defaults
        known = {key: value for key, value in group.items() if key in accepted and key != "params" and "lr" not in key}
        changed = {key: value for key, value in known.items() if repr(value) != repr(defaults.get(key))}
        if not changed:
            return self.states
        key = repr(sorted(changed.items()))
        if key not in self._states_by_options:
            self._states_by_options[key] = torch_optim_adapter.probe(self.kind, self._all_options | changed)[0]
        return self._states_by_options[key]

    @functools.cached_property
    def _states_by_options(self) -> dict[str, tuple[str, ...]]:
        return {}

    @functools.cached_property
    def _all_options(self) -> dict[str, Any]:
        return torch_optim_adapter.one_by_one(self.kind, self.options)

    def over(self, params: Any) -> torch.optim.Optimizer:
        """Create the wrapped optimizer over ordinary tensors.

        Args:
            params: Parameters or param groups, as the class takes them.

        Returns:
            An instance of the class with the options.
        """
        return self.kind(params, **self._all_options)

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a param group of the class."""
        return dict(self._defaults)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return torch_optim_adapter.defaults_of(self.kind, self._all_options)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> torch_optim_adapter.TorchOptimRule:
        """Return the rule of one update by the class; see `Optimizer.rule`."""
        options = {name: value for name, value in group.items() if name != "params"}
        names, needs_shape = self._probed
        return torch_optim_adapter.TorchOptimRule(
            self.kind, self._all_options, options, names, memory, step, needs_shape
        )
