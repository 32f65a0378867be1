"""Adapter that runs element-wise `torch.optim.Optimizer` classes on chunks."""

import importlib
import inspect
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from patrickstar._kernels.update_rule import Rule
from patrickstar.errors import ConfigError

# [Note: element-wise optimizers]
# Chunk lists hold states of the parameter's length, a result must not depend on other elements or parameters, and an
# optimizer object exists here for a single update of a single parameter. `probe` tests whether a class works this way:
# one optimizer updates a matrix as usual, and the adapter updates each of its elements separately with the same
# gradients. If the results differ (norms of layers or of all parameters, factored moments, orthogonal updates, a step
# count kept outside the states), or if either update raises, the class is rejected.

PROBE_SHAPE = (4, 6)
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

    by_pages: ClassVar = False  # PyTorch's vector code computes the end of a tensor differently

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.names

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update the master with a temporary optimizer whose states are views of chunks."""
        param = torch.nn.Parameter(master)
        param.grad = grad
        optimizer = self.kind([dict(self.group) | {"params": [param]}], **self.options)
        views = dict(zip(self.names, states, strict=True))
        if self.step > 1:
            optimizer.state[param] = self.memory | views
        with COUNTER_DEVICE:
            optimizer.step()
        after = dict(optimizer.state[param])
        for name, view in views.items():
            value = after.pop(name, None)
            if value is not None and value is not view:
                view.copy_(value)
        for name, value in after.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise ConfigError(
                    f"{self.kind.__name__} created the state {name!r} of shape {tuple(value.shape)} after its first "
                    f"steps; set the options that create it in all param groups, or in none"
                )
        self.memory.clear()
        self.memory.update(after)


def import_compiler() -> None:
    """Import `torch._dynamo` in a thread of its own, before the constructor of `torch.optim.Optimizer` imports it.

    The import leaves reference cycles that keep every frame of the importing stack, with its variables, until a garbage
    collection: the memory of an engine that such a frame refers to would outlive `close`.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="import torch._dynamo")
        thread.start()
        thread.join()


def probe(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the states of the parameter's length. Raises ConfigError unless `kind` is element-wise."""
    import_compiler()
    generator = torch.Generator().manual_seed(0)
    value, *grads = (
        torch.randn(PROBE_SHAPE, generator=generator, dtype=torch.float64, device="cpu") for _ in range(1 + PROBE_STEPS)
    )
    whole = torch.nn.Parameter(value.clone())
    try:
        optimizer = kind([whole], **options)
        for grad in grads:
            whole.grad = grad.clone()
            with COUNTER_DEVICE:
                optimizer.step()
        state = optimizer.state[whole]
        shaped = (name for name, item in state.items() if isinstance(item, torch.Tensor) and item.shape == PROBE_SHAPE)
        names = tuple(shaped)
        elements = value.reshape(-1, 1).clone()
        for number, element in enumerate(elements):
            _update_alone(kind, options, names, element, [grad.reshape(-1, 1)[number] for grad in grads])
    except _PROBE_ERRORS as error:
        raise ConfigError(
            f"{kind.__name__}({_format_options(options)}) can't update the elements of a parameter separately: {error}"
        ) from error
    if not torch.allclose(whole.detach().view(-1, 1), elements, rtol=1e-9, atol=0):
        raise ConfigError(
            f"{kind.__name__} is not element-wise: it updates a matrix differently from its separate elements, so it "
            f"can't run on chunks; use an element-wise optimizer such as ps.AdamW"
        )
    return names


_PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ConfigError)
"""Errors that a class may raise for a parameter that it can't update."""


def _update_alone(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    names: tuple[str, ...],
    element: torch.Tensor,
    grads: Sequence[torch.Tensor],
) -> None:
    group, memory = defaults_of(kind, options), dict[str, Any]()
    states = [torch.zeros_like(element) for _ in names]
    for step, grad in enumerate(grads, start=1):
        TorchOptimRule(kind, options, group, names, memory, step).apply(element, grad.clone(), states)


def defaults_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default param group options of an optimizer class."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    return {name: item for name, item in optimizer.param_groups[0].items() if name != "params"}


def one_by_one(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `foreach` off unless requested: it needs temporaries for all parameters at once."""
    accepted = inspect.signature(kind).parameters
    return ({"foreach": False} if "foreach" in accepted and not options.get("fused") else {}) | dict(options)


def _format_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
