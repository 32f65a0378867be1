"""Base class of optimizers: their options, the chunk lists of their states, and their update rules."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import model_validator
from torch import nn

from patrickstar._kernels.torch_optim_group import GroupOptimizer
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.schema import GRAD32, LOW16, PARAM16, PARAM32
from patrickstar._options import Options

RESERVED = (PARAM16, PARAM32, LOW16, GRAD32, "step")
"""Names that a custom optimizer state can't have."""

ParamGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]


class Optimizer(Options):
    """Base class of optimizers. A custom optimizer is a subclass: its fields are the options, `rule` is the update.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """

    param_groups: ParamGroups | None = None
    """Function from the model to param groups, as `torch.optim` takes them: dictionaries with `params` and the options
    that differ. Default None: one group with all parameters."""

    @abstractmethod
    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> Rule:
        """Return the update rule for one update of one parameter. Some calls only read its `kinds`.

        Args:
            group: Options of the parameter's param group.
            step: Number of this update of the parameter, counted from 1.
            memory: Small state of this parameter, kept between steps and saved in checkpoints: a few numbers. States
                with a value per element belong in chunk lists. The engine reserves the key "step".

        Returns:
            The rule; its `kinds` name the states that it needs.
        """

    @property
    def updates_together(self) -> bool:
        """True if an update needs all parameters at once, in host memory."""
        return False

    def group_optimizer(self) -> GroupOptimizer | None:
        """Return a new optimizer object over all parameters if `updates_together`, else None."""
        return None

    def written_options(self, group: Mapping[str, Any], updated: bool) -> dict[str, Any]:
        """Return the options that a step writes into a param group, such as a step count; by default none.

        Args:
            group: Options of the param group before the step.
            updated: A parameter of the group has been updated.
        """
        return {}

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a param group: every field except `param_groups`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "param_groups"}

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    @property
    def counts_itself(self) -> bool:
        """True if `memory` includes the step count."""
        return False

    @property
    def needs_count(self) -> bool:
        """True if saved states can be loaded only with their step count."""
        return True

    @property
    def splits_masters(self) -> bool:
        """True if masters may be split: the rule is Adam's, whose second moment is never negative."""
        return False

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the chunk lists beside `param16` and the master, with one element per element of the parameter."""
        return self.states_for(self.defaults())

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Dtypes of those `states` that do not have the master's dtype, such as "uint8"."""
        return {}

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that a param group needs.

        Args:
            group: Options of the param group.

        Returns:
            Names of chunk lists, in the order in which the rule takes them.
        """
        return self.rule(group, 1, {}).kinds

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return the param groups of a model: those of `param_groups`, or one with all parameters.

        Args:
            module: The model.

        Returns:
            Dictionaries as `torch.optim` takes them, with the options that differ from `defaults`.
        """
        if self.param_groups is None:
            return [{"params": list(module.parameters())}]
        return [dict(group) for group in self.param_groups(module)]

    def default_rules(self) -> tuple[Rule, ...]:
        """Return the rules with default options: one, unless parameters have different rules."""
        return (self.rule(self.defaults(), 1, {}),)

    def average_weights(self, group: Mapping[str, Any]) -> tuple[str, float, float] | None:
        """Return how `engine.averaged()` computes the average of the parameters of a group; None if there is none.

        Args:
            group: Options of the param group.

        Returns:
            Name of a state, and the fractions by which parameters move towards it, to become the average and back.
        """
        return None

    def lists_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the chunk lists of the states of a param group: by default those of all parameters, `states`.

        They include all that `states_for` returns, whatever options a scheduler changes.

        Args:
            group: Options of the param group.
        """
        return self.states

    def lists_by_param(self, module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
        """Return the chunk lists of states of the parameters for which they are not `states`.

        Args:
            module: The model.
        """
        return {}

    @property
    def may_multiply(self) -> bool:
        """True if updates may run products of matrices: those that need whole parameters may."""
        return any(rule.needs_shape for rule in self.default_rules())

    def whole_params(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that no two processes may share, since their update needs all elements.

        Args:
            module: The model.
        """
        return set(module.parameters()) if self.default_rules()[0].needs_shape else set()

    @model_validator(mode="after")
    def _listable(self) -> "Optimizer":
        names = self.states
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the kinds of the rule must be a tuple of strings, got {names!r}")
        invalid = [name for name in names if name in RESERVED or names.count(name) > 1]
        if invalid:
            raise ValueError(f"the kinds of the rule are {names}: {invalid[0]!r} is duplicated or a reserved name")
        return self


def not_negative(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"must not be negative, got {value}")
    return value


def below_one(value: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"must be in [0, 1), got {value}")
    return value
