"""Optimizers of this package in place of torch's: by class, and for an optimizer that already has parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from patrickstar.errors import ConfigError
from patrickstar.optim import SGD, Adam, AdamW, Muon, Optimizer, TorchOptimizer
from patrickstar.optim.muon import USE_MUON

ParamGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]

NATIVE_OPTIMIZERS: dict[type, type[Optimizer]] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
    torch.optim.Muon: Muon,
}
"""Optimizers with kernels that replace classes of torch."""
STATES_ENDED = "_patrickstar_states_ended"
"""Attribute of an optimizer of torch whose states were those of an engine that is closed."""
SPEED_ONLY = ("fused", "foreach")
"""Options of torch's optimizers that select an implementation, not the update rule."""


def convert(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """Return this package's optimizer with the options and param groups of an optimizer of torch.

    Args:
        optimizer: Optimizer over parameters of the model that has not taken a step.
        model: Model, whose parameters have their names.

    Returns:
        Options that `ps.Config` takes. They hold names instead of parameters.

    Raises:
        ConfigError: It has states or had them in an engine, has parameters that are not the model's, or does not
            update each parameter separately.
    """
    kind = type(optimizer)
    if hasattr(optimizer, STATES_ENDED):
        raise ConfigError(
            f"the {kind.__name__} has trained before, and its states ended with that engine: create a new optimizer "
            f"(Lightning: in configure_optimizers), and load a checkpoint to go on with the states"
        )
    if optimizer.state:
        raise ConfigError(
            f"the {kind.__name__} has states of {len(optimizer.state)} parameters from steps before: prepare it before "
            f"the first step, and load states afterwards"
        )
    names = {id(param): name for name, param in model.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        foreign = [param for param in group["params"] if id(param) not in names]
        if foreign:
            raise ConfigError(
                f"{len(foreign)} of {len(group['params'])} parameters in group {number} of the {kind.__name__} are not "
                f"parameters of the model, the first of shape {tuple(foreign[0].shape)}: create the optimizer from "
                f"the parameters of the model that is prepared with it"
            )
        settings = {key: value for key, value in group.items() if key != "params" and key not in SPEED_ONLY}
        if kind is torch.optim.Muon:
            settings[USE_MUON] = True
        groups.append((tuple(names[id(param)] for param in group["params"]), settings))
    defaults = {key: value for key, value in optimizer.defaults.items() if key not in SPEED_ONLY}
    by_name = partial(_groups_of_names, tuple(groups))
    # A scheduler may have set an option in the groups that needs a state, such as momentum.
    changed: dict[str, Any] = {}
    for options in (*(settings for _, settings in groups), defaults):
        changed |= _changed(kind, options)
    native = NATIVE_OPTIMIZERS.get(kind)
    if native is not None and changed.keys() <= native.model_fields.keys():
        used = {key: value for key, value in (defaults | changed).items() if key in native.model_fields}
        return native(**used, param_groups=by_name)
    return TorchOptimizer(kind=kind, options=changed, param_groups=by_name)


def _changed(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not those that the class has without arguments."""
    accepted = inspect.signature(kind).parameters
    return {
        key: value for key, value in options.items() if key in accepted and repr(value) != repr(accepted[key].default)
    }


def _groups_of_names(
    groups: Iterable[tuple[tuple[str, ...], dict[str, Any]]], model: nn.Module
) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    return [{"params": [params[name] for name in names], **options} for names, options in groups]


def end_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch never be converted again: the engine with its states is closed."""
    setattr(optimizer, STATES_ENDED, True)


def move_scheduler(
    scheduler: LRScheduler, before: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Let a scheduler that was created for one optimizer change the learning rates of another.

    Args:
        scheduler: Scheduler; also one that contains others.
        before: Its optimizer.
        optimizer: Optimizer with the same groups, including what the scheduler has added to them.

    Returns:
        Function that lets the scheduler be one of the optimizer before again.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    # A scheduler notices steps by a method that it puts in place of the optimizer's.
    LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    moved = [each for each in (scheduler, *getattr(scheduler, "_schedulers", ())) if each.optimizer is before]
    for each in moved:
        each.optimizer = optimizer

    def undo() -> None:
        for each in moved:
            each.optimizer = before

    return undo
