"""Optimizers: their options, the chunk lists of their states, and their update rules."""

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator

from patrickstar._kernels import torch_optim_adapter
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.schema import EMA as EMA_STATE
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._options import Options

RESERVED = (PARAM16, PARAM32, GRAD32, "step")
"""Names that a custom optimizer state can't have."""

ParamGroups = Callable[[torch.nn.Module], Iterable[dict[str, Any]]]


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

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a param group: every field except `param_groups`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "param_groups"}

    @property
    def counts_itself(self) -> bool:
        """True if `memory` includes the step count."""
        return False

    @property
    def needs_count(self) -> bool:
        """True if saved states can be loaded only with their step count."""
        return True

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the chunk lists beside `param16` and the master, with one element per element of the parameter."""
        return self.states_for(self.defaults())

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that a param group needs.

        Args:
            group: Options of the param group.

        Returns:
            Names of chunk lists, in the order in which the rule takes them.
        """
        return self.rule(group, 1, {}).kinds

    @model_validator(mode="after")
    def _listable(self) -> "Optimizer":
        names = self.states
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the kinds of the rule must be a tuple of strings, got {names!r}")
        invalid = [name for name in names if name in RESERVED or names.count(name) > 1]
        if invalid:
            raise ValueError(f"the kinds of the rule are {names}: {invalid[0]!r} is duplicated or a reserved name")
        return self


def _not_negative(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"must not be negative, got {value}")
    return value


def _below_one(value: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"must be in [0, 1), got {value}")
    return value


class Adam(Optimizer):
    """Adam with L2 weight decay, as `torch.optim.Adam`: 14 bytes of model data per parameter."""

    lr: float = 1e-3
    """Learning rate. Default 1e-3."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the running averages of gradient and squared gradient. Default (0.9, 0.999)."""
    eps: float = 1e-8
    """Term added to the denominator. Default 1e-8."""
    weight_decay: float = 0.0
    """Weight decay coefficient. Default 0.0."""

    _checked = field_validator("lr", "eps", "weight_decay")(_not_negative)
    _checked_betas = field_validator("betas")(_below_one)

    @property
    def decoupled(self) -> bool:
        """True if weight decay is decoupled from the gradient, as in AdamW."""
        return False

    def defaults(self) -> dict[str, Any]:
        """Return the default options, with those of torch's Adam, so that either can load the other's state."""
        off = dict(amsgrad=False, maximize=False, capturable=False, differentiable=False, foreach=None, fused=None)
        return super().defaults() | {"decoupled_weight_decay": self.decoupled} | off

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> AdamRule:
        """Return the rule of one Adam update; see `Optimizer.rule`."""
        return AdamRule(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            step=step,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: 14 bytes of model data per parameter."""

    weight_decay: float = 1e-2
    """Weight decay coefficient. Default 1e-2."""

    @property
    def decoupled(self) -> bool:
        """True if weight decay is decoupled from the gradient, as in AdamW."""
        return True


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`: 6 bytes of model data per parameter, 10 with momentum."""

    lr: float = 1e-3
    """Learning rate. Default 1e-3."""
    momentum: float = 0.0
    """Momentum factor. Default 0.0: no momentum."""
    dampening: float = 0.0
    """Dampening of the momentum. Default 0.0."""
    weight_decay: float = 0.0
    """L2 weight decay coefficient. Default 0.0."""
    nesterov: bool = False
    """Use Nesterov momentum, which needs momentum and no dampening. Default False."""

    _checked = field_validator("lr", "momentum", "weight_decay")(_not_negative)

    @property
    def needs_count(self) -> bool:
        """Always False: only the first step differs, and torch's SGD saves no step count."""
        return False

    @model_validator(mode="after")
    def _nesterov(self) -> "SGD":
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov=True needs momentum, and dampening=0")
        return self

    def defaults(self) -> dict[str, Any]:
        """Return the default options, with those of torch's SGD."""
        return super().defaults() | dict(maximize=False, foreach=None, differentiable=False, fused=None)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> SGDRule:
        """Return the rule of one SGD update; see `Optimizer.rule`."""
        return SGDRule(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            step=step,
        )


class Lion(Optimizer):
    """Lion, the evolved sign momentum (Chen et al. 2023): 10 bytes of model data per parameter."""

    lr: float = 1e-4
    """Learning rate. Default 1e-4."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Interpolation factor of the update, and decay rate of the momentum. Default (0.9, 0.99)."""
    weight_decay: float = 0.0
    """Decoupled weight decay coefficient. Default 0.0."""

    _checked = field_validator("lr", "weight_decay")(_not_negative)
    _checked_betas = field_validator("betas")(_below_one)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> LionRule:
        """Return the rule of one Lion update; see `Optimizer.rule`."""
        return LionRule(float(group["lr"]), group["betas"][0], group["betas"][1], group["weight_decay"])


class TorchOptimizer(Optimizer):
    """Adapter for an element-wise subclass of `torch.optim.Optimizer`.

    The class runs unchanged, on one parameter at a time, with its states in chunks. An update allocates temporaries of
    the parameter's size.

    Raises:
        ConfigError: The class is not element-wise, or does not accept the options.
    """

    kind: type[torch.optim.Optimizer]
    """Optimizer class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. Default: none."""

    @classmethod
    def wrapping(cls, value: Any) -> "TorchOptimizer | None":
        """Wrap an optimizer class, or a `functools.partial` of one with keyword arguments.

        Args:
            value: Class or partial.

        Returns:
            The adapter, or None for any other value.

        Raises:
            ConfigError: The class is not element-wise, or does not accept the options.
        """
        bound = isinstance(value, functools.partial)
        kind, options = (value.func, value.keywords) if bound else (value, {})
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or (bound and value.args):
            return None
        return cls(kind=kind, options=options)

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
        """States of the parameter's shape, found by updating a small matrix."""
        return torch_optim_adapter.probe(self.kind, self._all_options)

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that a param group needs, found by updating a small matrix with its options.

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
            self._states_by_options[key] = torch_optim_adapter.probe(self.kind, self._all_options | changed)
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
        return torch_optim_adapter.TorchOptimRule(self.kind, self._all_options, options, self.states, memory, step)


class EMA(Optimizer):
    """Optimizer that also keeps an exponential moving average of the parameters: 4 more bytes per parameter.

    The average has the precision of the masters, lies with the other states on any tier, and moves in the pass of each
    update; the first update of a parameter sets it. `engine.averaged()` evaluates and saves the average. A parameter
    without a gradient is not updated, and its average stays as it is.
    """

    def __init__(self, optimizer: Any = None, decay: float = 0.999, **options: Any) -> None:
        super().__init__(**options | {"optimizer": AdamW() if optimizer is None else optimizer, "decay": decay})

    optimizer: Optimizer
    """Optimizer that updates the parameters: one of this package, or a class of `torch.optim`. Default `AdamW()`."""
    decay: float = 0.999
    """Fraction of the average that each update keeps. Default 0.999."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _inner(cls, value: Any) -> Any:
        chosen = TorchOptimizer.wrapping(value) or value
        if not isinstance(chosen, Optimizer) or isinstance(chosen, EMA):
            raise ValueError(f"{value!r} is not an optimizer that can be averaged: use ps.AdamW(lr=...)")
        return chosen

    @field_validator("decay")
    @classmethod
    def _fraction(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError(f"must be in [0, 1), got {value}")
        return value

    @model_validator(mode="after")
    def _take_groups(self) -> "EMA":
        if self.param_groups is None and self.optimizer.param_groups is not None:
            self.__dict__["param_groups"] = self.optimizer.param_groups
        return self

    def defaults(self) -> dict[str, Any]:
        """Return the default options of the inner optimizer, and `ema_decay`, which a param group can change."""
        return self.optimizer.defaults() | {"ema_decay": self.decay}

    @property
    def counts_itself(self) -> bool:
        """True if the inner optimizer counts its steps."""
        return self.optimizer.counts_itself

    @property
    def needs_count(self) -> bool:
        """True if saved states of the inner optimizer need their step count."""
        return self.optimizer.needs_count

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states of the inner optimizer, and the average; see `Optimizer.states_for`."""
        return (*self.optimizer.states_for(group), EMA_STATE)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> AveragedRule:
        """Return the inner rule with the average; see `Optimizer.rule`."""
        weight = 1.0 if step == 1 else 1.0 - group["ema_decay"]
        return AveragedRule(self.optimizer.rule(group, step, memory), weight)
