"""Adapter that runs `torch.optim.Optimizer` classes on chunks."""

import copy
import importlib
import inspect
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from patrickstar._kernels.update_rule import Rule
from patrickstar.errors import ConfigError

# [Note: optimizers of torch]
# Chunk lists hold states of the parameter's length, and an optimizer object updates a single parameter at a time, with
# the options that its param group had when the step began. What a class writes into its group, such as a step count,
# it writes once per step: it updates a small tensor of its own, and the group takes over what that has written. So the
# writes need no parameter in memory and wait for no update. `probe` refuses classes for which this is another
# algorithm; that each parameter has written the same is checked in every update, because a class may change its ways
# after more steps than a probe can make.

SCALARS = (bool, int, float, str, type(None))
"""Types of options that no class can change in place."""


def frozen(value: Any) -> Hashable:
    """Return a copy of plain data to compare: tensors by their bits, parameters and other objects by identity."""
    if isinstance(value, SCALARS):
        return type(value), repr(value)  # in which NaN equals NaN
    if type(value) is torch.Tensor:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, torch.Generator):
        return frozen(value.get_state())
    if isinstance(value, Mapping):
        return tuple((frozen(key), frozen(item)) for key, item in value.items())
    if isinstance(value, Sequence | Set):
        return tuple(frozen(item) for item in value)
    return id(value)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or that only one of them has."""
    return [
        key
        for key in {**one, **other}
        if not (key in one and key in other) or (one[key] is not other[key] and frozen(one[key]) != frozen(other[key]))
    ]


def construct(kind: type[torch.optim.Optimizer], params: Any, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Create an optimizer, in training mode if its class has modes, as schedule-free ones do."""
    optimizer = kind(params, **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


class Instances:
    """Optimizer objects of one class, each of which updates one parameter at a time, in any thread.

    Args:
        kind: The class.
        options: Keyword arguments of its constructor.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, options
        self._idle: list[torch.optim.Optimizer] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Instances, (self.kind, self.options)

    def step(
        self, param: torch.nn.Parameter, group: Mapping[str, Any], state: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Update a parameter by its gradient.

        Args:
            group: Options of the param group; left as they are.
            state: State of the parameter; None before its first update.

        Returns:
            State and options after the update.
        """
        options = {key: value if isinstance(value, SCALARS) else copy.deepcopy(value) for key, value in group.items()}
        if state is None:  # the constructor may create states
            optimizer = construct(self.kind, [options | {"params": [param]}], self.options)
        else:
            optimizer = self._take()
            optimizer.state[param] = state
        optimizer.param_groups[0] = options | {"params": [param]}
        with counter_device():
            optimizer.step()
        after, states = optimizer.param_groups[0], dict(optimizer.state[param])
        del after["params"]
        if state is not None:
            optimizer.state = defaultdict(dict)
            self._idle.append(optimizer)
        return states, after

    def options_after(
        self, group: Mapping[str, Any], updated: bool, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Return the options of a param group after a step.

        Args:
            group: Options before it.
            updated: A parameter of the group had a gradient.
            dtype: Dtype of the master parameters.
        """
        param = torch.nn.Parameter(torch.ones(WRITER_SHAPE, dtype=dtype, device="cpu"))
        param.grad = torch.ones_like(param) if updated else None
        return self.step(param, group, None)[1]

    def _take(self) -> torch.optim.Optimizer:
        try:
            return self._idle.pop()
        except IndexError:
            return construct(self.kind, [torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], self.options)


WRITER_SHAPE = 4, 4
"""Shape of the tensor whose update tells what a class writes into its param group."""


def counter_device() -> AbstractContextManager[Any]:
    """Return a context with the device of step counts. PyTorch creates them on the default device."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu  # a context makes every operator slower


@dataclass(frozen=True)
class TorchOptimRule(Rule):
    """One update by an optimizer class. `memory` holds its state entries other than the chunk lists `names`."""

    instances: Instances = field(hash=False)
    group: Mapping[str, Any] = field(hash=False)
    names: tuple[str, ...]
    memory: dict[str, Any] = field(hash=False)
    step: int
    whole: bool = False
    """True if the class needs whole parameters."""
    after: Mapping[str, Any] | None = field(default=None, hash=False)
    """Options of the group after the step. None: those before it."""
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    by_pages: ClassVar = False  # PyTorch's vector code computes the end of a tensor differently

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.names

    @property
    def needs_shape(self) -> bool:  # type: ignore[override]
        """True if the class needs whole parameters."""
        return self.whole

    def for_param(self, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> "TorchOptimRule":
        """Return the rule for one parameter; see `Rule.for_param`."""
        return replace(self, shape=shape, strides=strides)

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update the master with an optimizer whose states are views of chunks."""
        if self.shape is not None and math.prod(self.shape) == master.numel():  # else a part, between processes
            master, grad, *states = (each.as_strided(self.shape, self.strides) for each in (master, grad, *states))
        param = torch.nn.Parameter(master)
        param.grad = grad
        views = dict(zip(self.names, states, strict=True))
        known = {name: _on_device(it, master.device) for name, it in self.memory.items()} | views
        after, written = self.instances.step(param, self.group, known if self.step > 1 else None)
        take_listed(self.instances.kind, after, views)
        for name, value in after.items():
            if not self.needs_shape and isinstance(value, torch.Tensor) and value.numel() > 1:
                raise ConfigError(
                    f"{self._kind} created the state {name!r} of shape {tuple(value.shape)} after its first "
                    f"steps; set the options that create it in all param groups, or in none"
                )
        self.memory.clear()
        self.memory.update(after)
        if changed := differing(self.group if self.after is None else self.after, written):
            raise ConfigError(
                f"{self._kind} has written {', '.join(changed)} into its param group, to other values than other "
                f"parameters would: it couples parameters, of which only some are in memory at a time; use an "
                f"optimizer such as ps.AdamW"
            )

    @property
    def _kind(self) -> str:
        return self.instances.kind.__name__


def take_listed(kind: type[torch.optim.Optimizer], state: dict[str, Any], views: Mapping[str, torch.Tensor]) -> None:
    """Move the states of a parameter that have a chunk list out of `state`, into their views of chunks.

    Raises:
        ConfigError: A state is not of the parameter's shape and dtype.
    """
    for name, view in views.items():
        value = state.pop(name, None)
        if value is None or value is view:
            continue
        if not is_listed(value, view):
            raise ConfigError(
                f"{kind.__name__} keeps the state {name!r} of a parameter of shape {tuple(view.shape)} as "
                f"{_describe(value)}, and that of others as {_describe(view)}, so it can't be stored in chunks; "
                f"use an optimizer such as ps.AdamW"
            )
        view.copy_(value)


def is_listed(value: Any, param: torch.Tensor) -> bool:
    """Return True if a state of a parameter can be stored in a chunk list: a plain tensor of its shape and dtype."""
    return type(value) is torch.Tensor and value.shape == param.shape and value.dtype == param.dtype


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {value.dtype}, {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind


def _on_device(value: Any, device: torch.device) -> Any:
    """Return a state on the tier of this update, which may not be that of the last. Step counts stay on the host."""
    return value.to(device) if isinstance(value, torch.Tensor) and value.numel() > 1 else value


def import_compiler() -> None:
    """Import `torch._dynamo` in a thread of its own, before the constructor of `torch.optim.Optimizer` imports it.

    The import leaves reference cycles that keep every frame of the importing stack, with its variables, until a garbage
    collection: the memory of an engine that such a frame refers to would outlive `close`.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="import torch._dynamo")
        thread.start()
        thread.join()


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a param group has beside its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def defaults_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default param group options of an optimizer class."""
    optimizer = construct(kind, [torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], options)
    return options_of(optimizer.param_groups[0])


def one_by_one(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `foreach` off for classes of torch, unless requested.

    Their default depends on the device, and a parameter may be updated on another one than the last time.
    """
    chooses = kind.__module__.startswith("torch.optim.") and "foreach" in inspect.signature(kind).parameters
    return ({"foreach": False} if chooses and not options.get("fused") else {}) | dict(options)
