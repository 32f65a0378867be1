"""The optimizers that users may choose: their options, which chunk lists they need, and their rule."""

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator

from patrickstar._kernels import torch_optim_adapter as foreign
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._options import Options

RESERVED = (PARAM16, PARAM32, GRAD32, "step")
"""Names that a state of a user's own can't have."""

ParamGroups = Callable[[torch.nn.Module], Iterable[dict[str, Any]]]


class Optimizer(Options):
    """What all optimizers have in common. Yours is a subclass: its options are fields, and `rule` makes the update.

    `param_groups` makes torch's list of groups from the model: dictionaries with `params` and what differs in them.
    """

    param_groups: ParamGroups | None = None

    @abstractmethod
    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> Rule:
        """The update of a parameter of a param group that is its `step`-th, counted from 1.

        `memory` is the parameter's own, outlives the step, and is saved with the states, but for "step", which is the
        engine's: for numbers, as what has a number per element is a list. This is also called to ask for `kinds` alone.
        """

    def defaults(self) -> dict[str, Any]:
        """What a param group holds beside its parameters, unless it says otherwise."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "param_groups"}

    @property
    def counts_itself(self) -> bool:
        """Whether the number of a step is in `memory` too."""
        return False

    @property
    def needs_count(self) -> bool:
        """Whether saved states are of no use without the number of their step."""
        return True

    @property
    def states(self) -> tuple[str, ...]:
        """The chunk lists of a parameter, beyond `param16` and the master. Each is as long as the parameter."""
        return self.states_for(self.defaults())

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those that a param group asks for."""
        return self.rule(group, 1, {}).kinds

    @model_validator(mode="after")
    def _listable(self) -> "Optimizer":
        names = self.states
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the kinds of its rule must be a tuple of names, and {names!r} is not")
        bad = [name for name in names if name in RESERVED or names.count(name) > 1]
        if bad:
            raise ValueError(f"the kinds of its rule are {names}: {bad[0]!r} is there twice, or has another meaning")
        return self


def _not_negative(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"must not be negative, and {value} is")
    return value


def _below_one(value: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"must lie in [0, 1), and {value} do not")
    return value


class Adam(Optimizer):
    """Adam with L2 weight decay, as `torch.optim.Adam`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    _checked = field_validator("lr", "eps", "weight_decay")(_not_negative)
    _checked_betas = field_validator("betas")(_below_one)

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is AdamW's."""
        return False

    def defaults(self) -> dict[str, Any]:
        """With what torch's own Adam keeps in its groups, so that either can load the other's state."""
        off = dict(amsgrad=False, maximize=False, capturable=False, differentiable=False, foreach=None, fused=None)
        return super().defaults() | {"decoupled_weight_decay": self.decoupled} | off

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> AdamRule:
        """One update of Adam."""
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
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    weight_decay: float = 1e-2

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is AdamW's."""
        return True


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`: 6 bytes of model data per parameter, 10 with momentum."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    _checked = field_validator("lr", "momentum", "weight_decay")(_not_negative)

    @property
    def needs_count(self) -> bool:
        """Only the first step differs, and torch's own saves no number."""
        return False

    @model_validator(mode="after")
    def _nesterov(self) -> "SGD":
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov=True needs momentum, and dampening=0")
        return self

    def defaults(self) -> dict[str, Any]:
        """With what torch's own SGD keeps in its groups."""
        return super().defaults() | dict(maximize=False, foreach=None, differentiable=False, fused=None)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> SGDRule:
        """One update of SGD."""
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
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    _checked = field_validator("lr", "weight_decay")(_not_negative)
    _checked_betas = field_validator("betas")(_below_one)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> LionRule:
        """One update of Lion."""
        return LionRule(float(group["lr"]), group["betas"][0], group["betas"][1], group["weight_decay"])


class TorchOptimizer(Optimizer):
    """An optimizer class of `torch.optim`, or one like them, if it is element-wise. Raises ConfigError if it is not.

    It runs as it is, one parameter at a time, on states that lie in chunks; on the way it takes temporaries as long as
    the parameter. `options` are the keyword arguments of the class.
    """

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def wrapping(cls, value: Any) -> "TorchOptimizer | None":
        """A class, or a `functools.partial` of one with keyword arguments; None for anything else."""
        bound = isinstance(value, functools.partial)
        kind, options = (value.func, value.keywords) if bound else (value, {})
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or (bound and value.args):
            return None
        return cls(kind=kind, options=options)

    @property
    def counts_itself(self) -> bool:
        """As classes of torch do."""
        return True

    @property
    def needs_count(self) -> bool:
        """What the class needs it keeps itself."""
        return False

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """What a trial on a small matrix shows to be as long as the parameter."""
        return foreign.probe(self.kind, self._all_options)

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What a trial with the group's own options shows. Learning rates, which schedules change, make no states."""
        given, defaults = inspect.signature(self.kind).parameters, self._defaults
        known = {key: value for key, value in group.items() if key in given and key != "params" and "lr" not in key}
        own = {key: value for key, value in known.items() if repr(value) != repr(defaults.get(key))}
        if not own:
            return self.states
        key = repr(sorted(own.items()))
        if key not in self._trials:
            self._trials[key] = foreign.probe(self.kind, self._all_options | own)
        return self._trials[key]

    @functools.cached_property
    def _trials(self) -> dict[str, tuple[str, ...]]:
        return {}

    @functools.cached_property
    def _all_options(self) -> dict[str, Any]:
        return foreign.one_by_one(self.kind, self.options)

    def over(self, params: Any) -> torch.optim.Optimizer:
        """The optimizer as plain PyTorch would make it, over ordinary tensors."""
        return self.kind(params, **self._all_options)

    def defaults(self) -> dict[str, Any]:
        """What the class itself puts into its groups."""
        return dict(self._defaults)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return foreign.defaults_of(self.kind, self._all_options)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> foreign.TorchOptimRule:
        """One update by the class."""
        own = {name: value for name, value in group.items() if name != "params"}
        return foreign.TorchOptimRule(self.kind, self._all_options, own, self.states, memory, step)
