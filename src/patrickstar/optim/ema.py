"""Moving average of the parameters."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator
from torch import nn

from patrickstar._kernels.averaged import AveragedRule
from patrickstar._layout.schema import EMA as EMA_STATE
from patrickstar.optim.adam import AdamW
from patrickstar.optim.optimizer import Optimizer
from patrickstar.optim.schedule_free import ScheduleFreeAdamW
from patrickstar.optim.torch_optimizer import TorchOptimizer


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
        if not isinstance(chosen, Optimizer) or isinstance(chosen, EMA | ScheduleFreeAdamW):
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

    @property
    def splits_masters(self) -> bool:
        """True if the inner optimizer's masters may be split."""
        return self.optimizer.splits_masters

    @property
    def states(self) -> tuple[str, ...]:
        """States of the inner optimizer, and the average."""
        return (*self.optimizer.states, EMA_STATE)

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Dtypes of states of the inner optimizer; see `Optimizer.state_dtypes`."""
        return self.optimizer.state_dtypes

    def states_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states of the inner optimizer, and the average; see `Optimizer.states_for`."""
        return (*self.optimizer.states_for(group), EMA_STATE)

    @property
    def _grouped(self) -> Optimizer:
        """The inner optimizer with the param groups of this one: how it divides them is its own affair."""
        return self.optimizer.model_copy(update={"param_groups": self.param_groups})

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return the param groups of the inner optimizer; see `Optimizer.groups`."""
        return self._grouped.groups(module)

    def default_rules(self) -> tuple[AveragedRule, ...]:
        """Return the inner rules with the average; see `Optimizer.default_rules`."""
        return tuple(AveragedRule(rule, 1.0) for rule in self.optimizer.default_rules())

    def lists_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the chunk lists of the inner optimizer, and the average; see `Optimizer.lists_for`."""
        return (*self.optimizer.lists_for(group), EMA_STATE)

    def lists_by_param(self, module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
        """Return the chunk lists of the inner optimizer, and the average; see `Optimizer.lists_by_param`."""
        return {param: (*kinds, EMA_STATE) for param, kinds in self._grouped.lists_by_param(module).items()}

    def whole_params(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that the inner optimizer needs whole."""
        return self._grouped.whole_params(module)

    def written_options(self, group: Mapping[str, Any], updated: bool) -> dict[str, Any]:
        """Return the options that the inner optimizer writes; see `Optimizer.written_options`."""
        options = {name: value for name, value in group.items() if name != "ema_decay"}
        return self.optimizer.written_options(options, updated)

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> AveragedRule:
        """Return the inner rule with the average; see `Optimizer.rule`."""
        weight = 1.0 if step == 1 else 1.0 - group["ema_decay"]
        return AveragedRule(self.optimizer.rule(group, step, memory), weight)
