"""Adapter that runs `torch.optim.Optimizer` classes on chunks."""

import importlib
import inspect
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from patrickstar._kernels.update_rule import Rule
from patrickstar.errors import ConfigError

# [Note: optimizers of torch]
# Chunk lists hold states of the parameter's length, and an optimizer object exists here for a single update of a single
# parameter. `probe` tests whether a class works this way: one optimizer updates two matrices as usual, and the adapter
# updates each element separately with the same gradients. If the results agree, the class is element-wise, and
# parameters may be cut between processes. If not, the adapter updates each matrix separately: if those results agree
# (norms of layers, factored moments, orthogonal updates), the class needs whole parameters. If they differ too (norms
# of all parameters, a step count kept outside the states), or an update raises, the class is rejected.

PROBE_SHAPES = (4, 6), (5, 3)
PROBE_STEPS = 3

COUNTER_DEVICE = torch.device("cpu")
"""Device of optimizers' step counts. PyTorch creates them on the default device, which users may change."""


@dataclass(frozen=True)
class TorchOptimRule(Rule):
    """One update by an optimizer class. `memory` holds its state entries other than the chunk lists `names`."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(hash=False)
    group: Mapping[str, Any] = field(hash=False)
    names: tuple[str, ...]
    memory: dict[str, Any] = field(hash=False)
    step: int
    whole: bool = False
    """True if the class needs whole parameters."""
    shape: tuple[int, ...] = ()
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
        return replace(self, shape=shape, strides=strides) if self.needs_shape else self

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update the master with a temporary optimizer whose states are views of chunks."""
        if self.needs_shape:
            master, grad, *states = (each.as_strided(self.shape, self.strides) for each in (master, grad, *states))
        param = torch.nn.Parameter(master)
        param.grad = grad
        optimizer = self.kind([dict(self.group) | {"params": [param]}], **self.options)
        views = dict(zip(self.names, states, strict=True))
        if self.step > 1:
            optimizer.state[param] = {name: _on_device(it, master.device) for name, it in self.memory.items()} | views
        with COUNTER_DEVICE:
            optimizer.step()
        after = dict(optimizer.state[param])
        for name, view in views.items():
            value = after.pop(name, None)
            if value is not None and value is not view:
                view.copy_(value)
        for name, value in after.items():
            if not self.needs_shape and isinstance(value, torch.Tensor) and value.numel() > 1:
                raise ConfigError(
                    f"{self.kind.__name__} created the state {name!r} of shape {tuple(value.shape)} after its first "
                    f"steps; set the options that create it in all param groups, or in none"
                )
        self.memory.clear()
        self.memory.update(after)


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


def probe(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the states of the parameter's length, and whether the class needs whole parameters.

    See [Note: optimizers of torch].

    Raises:
        ConfigError: The class can't update parameters separately.
    """
    import_compiler()
    generator = torch.Generator().manual_seed(0)
    values, *grads = (
        [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in PROBE_SHAPES]
        for _ in range(1 + PROBE_STEPS)
    )
    together = [torch.nn.Parameter(value.clone()) for value in values]
    try:
        optimizer = kind(together, **options)
        for step_grads in grads:
            for param, grad in zip(together, step_grads, strict=True):
                param.grad = grad.clone()
            with COUNTER_DEVICE:
                optimizer.step()
        first = together[0]
        state = optimizer.state[first]
        names = tuple(
            name for name, item in state.items() if isinstance(item, torch.Tensor) and item.shape == first.shape
        )
    except _PROBE_ERRORS as error:
        raise ConfigError(
            f"{kind.__name__}({_format_options(options)}) can't update a matrix: {error}; use an optimizer such as "
            f"ps.AdamW"
        ) from error
    expected = [param.detach() for param in together]
    for needs_shape in (False, True):
        try:
            separately = [
                _update_alone(kind, options, names, value, [each[number] for each in grads], needs_shape)
                for number, value in enumerate(values)
            ]
        except _PROBE_ERRORS as error:
            if needs_shape:
                raise ConfigError(
                    f"{kind.__name__}({_format_options(options)}) can't update parameters separately: {error}"
                ) from error
            continue
        if all(torch.allclose(*pair, rtol=1e-9, atol=0) for pair in zip(expected, separately, strict=True)):
            return names, needs_shape
    raise ConfigError(
        f"{kind.__name__} updates parameters differently together and separately, so it can't run on chunks, of which "
        f"only some are in memory at a time; use an optimizer such as ps.AdamW"
    )


_PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ConfigError)
"""Errors that a class may raise for a parameter that it can't update."""


def _update_alone(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    names: tuple[str, ...],
    value: torch.Tensor,
    grads: Sequence[torch.Tensor],
    needs_shape: bool,
) -> torch.Tensor:
    """Return the updated value of one parameter; without `needs_shape` each of its elements is updated separately."""
    group, parts = defaults_of(kind, options), [slice(None)]
    flat = value.reshape(-1).clone()
    if not needs_shape:
        parts = [slice(number, number + 1) for number in range(flat.numel())]
    for part in parts:
        memory, states = dict[str, Any](), [torch.zeros_like(flat[part]) for _ in names]
        for step, grad in enumerate(grads, start=1):
            rule = TorchOptimRule(kind, options, group, names, memory, step, needs_shape, value.shape, value.stride())
            rule.apply(flat[part], grad.reshape(-1)[part].clone(), states)
    return flat.view(value.shape)


def defaults_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default param group options of an optimizer class."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **options)
    return {name: item for name, item in optimizer.param_groups[0].items() if name != "params"}


def one_by_one(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `foreach` off unless requested: it needs temporaries for all parameters at once."""
    accepted = inspect.signature(kind).parameters
    return ({"foreach": False} if "foreach" in accepted and not options.get("fused") else {}) | dict(options)


def _format_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
