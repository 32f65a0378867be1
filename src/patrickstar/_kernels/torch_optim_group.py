"""One optimizer object of a class of `torch.optim.Optimizer` over all parameters."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patrickstar._kernels.torch_optim_adapter import (
    construct,
    counter_device,
    differing,
    frozen,
    is_listed,
    options_of,
    take_listed,
)
from patrickstar.errors import ConfigError

# [Note: all parameters together]
# A class that couples parameters, draws random numbers in their order, or keeps something on the object is run as it
# is: one object over all parameters updates them once per step. Parameters, gradients and states of chunk lists are
# views of chunks in host memory, which are others in each step: the object's Parameters are pointed at them before the
# step and at nothing after it. What the object keeps beside the states of parameters stays in it; a checkpoint saves
# the entries of its `state` under keys of its own, and the attributes that have changed since its constructor. A probe
# compares such a run, which is saved and resumed halfway, with a usual one.
#
# The object is created in the first step, with the options that the param groups had at first: some constructors derive
# attributes from them, and a scheduler changes them before the first step. A frozen parameter has no master, so the
# object sees one without values, which it may not read.

PARAMETER, GENERATOR, ITEMS = "patrickstar.parameter", "patrickstar.generator", "patrickstar.items"
"""Keys of saved values that stand for a parameter by its name, a generator by its state, and a dictionary by items."""


@dataclass(eq=False)
class Member:
    """A parameter in one step."""

    name: str
    value: torch.Tensor
    """Values in full precision; on the meta device if it is frozen."""
    grad: torch.Tensor | None
    memory: dict[str, Any] = field(default_factory=dict)
    """States that are in no chunk list."""
    views: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """States in chunk lists."""
    has_state: bool = False
    """True if `memory` and `views` hold its state; False before its first update."""


class GroupOptimizer:
    """An optimizer object over all parameters. See [Note: all parameters together].

    Args:
        kind: The class.
        options: Keyword arguments of its constructor.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, options
        self._optimizer: torch.optim.Optimizer | None = None
        self._first_groups: list[dict[str, Any]] = []
        self._params: dict[str, nn.Parameter] = {}
        self._absent: dict[str, list[str]] = {}
        """States in chunk lists that a parameter does not have, or in another shape, though it has others."""
        self._attributes: Mapping[str, Any] = {}
        """Attributes of the object after its constructor."""
        self._saved: Mapping[str, Any] = {}
        """State and attributes for the object, which does not exist yet."""

    def begin(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note the options of the param groups as the constructor is to see them."""
        self._first_groups = [copy.deepcopy(options_of(group)) for group in groups]

    def step(self, groups: Sequence[dict[str, Any]], members: Sequence[Sequence[Member]]) -> None:
        """Update all parameters that have gradients, their states and the options of their param groups.

        Args:
            groups: Param groups; their parameters are ignored.
            members: The parameters of each group.

        Raises:
            ConfigError: The class reads a frozen parameter, or changes one without a gradient.
        """
        every = [member for group in members for member in group]
        params = [[self._param(member) for member in group] for group in members]
        optimizer = self._prepared(groups, params)
        for member in every:
            state = self._state_of(member)
            if state:
                optimizer.state[self._params[member.name]] = state
        versions = {member.name: self._params[member.name]._version for member in every if member.grad is None}
        try:
            with counter_device():
                optimizer.step()
            for member in every:
                self._take(optimizer, member, versions, every)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in f"{error}":
                raise
            raise ConfigError(self._reads_frozen(every)) from error
        finally:
            for param in self._params.values():
                param.grad, param.data = None, param.data.new_empty(0)
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            for name in options_of(group).keys() - own.keys():
                del group[name]
            group.update(options_of(own))

    def _param(self, member: Member) -> nn.Parameter:
        param = self._params.get(member.name)
        if param is None or param.device != member.value.device:  # it was unfrozen
            # A view of a chunk would share its version counter.
            empty = member.value.new_empty(0)
            param = self._params[member.name] = nn.Parameter(empty, requires_grad=not empty.is_meta)
        param.data, param.grad = member.value, member.grad
        return param

    def _prepared(
        self, groups: Sequence[Mapping[str, Any]], params: Sequence[list[nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return the object with the options of this step."""
        optimizer = self._optimizer
        if optimizer is None:
            first = [group | {"params": each} for group, each in zip(self._first_groups, params, strict=False)]
            optimizer = self._optimizer = construct(self.kind, copy.copy(first), self.options)
            self._attributes = attributes_of(optimizer)
            optimizer.state.update(self._decoded(self._saved.get("state", {})))
            vars(optimizer).update(self._decoded(self._saved.get("attributes", {})))
        for number, (group, each) in enumerate(zip(groups, params, strict=True)):
            if number == len(optimizer.param_groups):
                optimizer.add_param_group(options_of(group) | {"params": each})
            own = optimizer.param_groups[number]
            own.clear()
            own.update(options_of(group) | {"params": each})
        return optimizer

    def _state_of(self, member: Member) -> dict[str, Any]:
        absent = self.absent(member.name)
        listed = {name: view for name, view in member.views.items() if name not in absent}
        return member.memory | listed if member.has_state else {}

    def _take(
        self,
        optimizer: torch.optim.Optimizer,
        member: Member,
        versions: Mapping[str, int],
        every: Sequence[Member],
    ) -> None:
        """Take the state of a parameter, one of `every`, out of the object."""
        param = self._params[member.name]
        if member.grad is None and param._version != versions[member.name]:
            raise ConfigError(
                f"{self.kind.__name__} has changed {member.name!r}, which "
                f"{'is frozen' if member.value.is_meta else 'has no gradient'}; use an optimizer such as ps.AdamW"
            )
        if member.value.is_meta:
            return
        state = dict(optimizer.state.pop(param, {}))
        if any(isinstance(item, torch.Tensor) and item.is_meta for item in state.values()):
            raise ConfigError(self._reads_frozen(every))
        member.has_state = bool(state)
        self._absent.pop(member.name, None)
        listed = {name: view for name, view in member.views.items() if is_listed(state.get(name), view)}
        if absent := [name for name in member.views if name not in listed]:
            self._absent[member.name] = absent
        take_listed(self.kind, state, listed)
        member.memory.clear()
        member.memory.update(state)

    def _reads_frozen(self, members: Sequence[Member]) -> str:
        names = [member.name for member in members if member.value.is_meta]
        return (
            f"{self.kind.__name__} reads parameters that are frozen, of which there are {len(names)} in its param "
            f"groups ({', '.join(names[:3])}): leave them out of the groups"
        )

    # Saving

    def absent(self, name: str) -> Sequence[str]:
        """Return the states that have a chunk list in which a parameter has no value."""
        return self._absent.get(name, ())

    def saved(self) -> dict[str, Any]:
        """Return what the object keeps beside the states of parameters, for `restore`: plain data, if it is that."""
        if self._optimizer is None:
            return copy.deepcopy(dict(self._saved))
        optimizer = self._optimizer
        own = {key: item for key, item in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        attributes = {name: vars(optimizer)[name] for name in self._own_attributes()}
        names = {id(param): name for name, param in self._params.items()}
        return {
            "state": _encoded(own, names),
            "attributes": _encoded(attributes, names),
            "absent": {name: list(absent) for name, absent in self._absent.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` has returned, with a new object."""
        self._optimizer, self._saved = None, copy.deepcopy(dict(saved))
        self._params.clear()
        self._absent = {name: list(absent) for name, absent in self._saved.get("absent", {}).items()}

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if PARAMETER in value:
                return self._params[value[PARAMETER]]
            if GENERATOR in value:
                generator = torch.Generator(device="cpu")
                generator.set_state(value[GENERATOR])
                return generator
            items = value.get(ITEMS, value.items())
            return {self._decoded(key): self._decoded(item) for key, item in items}
        return type(value)(map(self._decoded, value)) if type(value) in (list, tuple, set) else value

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that the object keeps beside the states of parameters."""
        if self._optimizer is None:
            return 0
        own = [item for key, item in self._optimizer.state.items() if not isinstance(key, torch.Tensor)]
        return tensor_bytes(own) + tensor_bytes([vars(self._optimizer)[name] for name in self._own_attributes()])

    def _own_attributes(self) -> list[str]:
        """Return the names of the attributes that have changed since the constructor."""
        changed = differing(self._attributes, attributes_of(self._optimizer))
        return [name for name in changed if name in vars(self._optimizer)]


def attributes_of(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return copies of the attributes of an optimizer and of its classes, without states and param groups."""
    classes = [each for each in type(optimizer).__mro__ if each not in torch.optim.Optimizer.__mro__]
    attributes = {name: item for each in reversed(classes) for name, item in vars(each).items()} | vars(optimizer)
    return {name: frozen(item) for name, item in attributes.items() if name not in ("state", "param_groups")}


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_meta else value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple | set) else 0


def _encoded(value: Any, names: Mapping[int, str]) -> Any:
    """Return a copy of a value with stand-ins for parameters and generators: see `PARAMETER`."""
    if id(value) in names:
        return {PARAMETER: names[id(value)]}
    if isinstance(value, torch.Generator):
        return {GENERATOR: value.get_state()}
    if type(value) is dict:
        items = [[_encoded(key, names), _encoded(item, names)] for key, item in value.items()]
        return dict(items) if all(isinstance(key, str) for key in value) else {ITEMS: items}
    if type(value) in (list, tuple, set):
        return type(value)(_encoded(item, names) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value
