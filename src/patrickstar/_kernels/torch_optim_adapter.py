"""Optimizers of `torch.optim`, and others of its kind, run over chunks where they are element-wise."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from patrickstar._kernels.update_rule import Rule
from patrickstar.errors import ConfigError

# [Note: what is element-wise]
# Chunk lists hold states that are as long as the parameter, results may not depend on what else an update looks at, and
# an optimizer lives for one update of one parameter here. Whether a class goes along with that can be seen: it updates
# a matrix in the usual way, and each element of it in this way, with the same gradients. Where the two disagree (norms
# of layers or of all parameters, factored moments, orthogonal updates, steps counted elsewhere than in the states), or
# one can't be done at all, it is refused.

PROBE_SHAPE = (4, 6)
PROBE_STEPS = 3


ON_HOST = torch.device("cpu")
"""Where optimizers keep their counts. PyTorch's make them on the default device, which a user may have changed."""


@dataclass(frozen=True)
class TorchOptimRule(Rule):
    """One update by an optimizer class. `memory` holds what it keeps of a parameter beside the lists `names`."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(hash=False)
    group: Mapping[str, Any] = field(hash=False)
    names: tuple[str, ...]
    memory: dict[str, Any] = field(hash=False)
    step: int

    by_pages: ClassVar = False  # PyTorch's vector code treats the end of a tensor in its own way

    @property
    def kinds(self) -> tuple[str, ...]:
        """The states that are as long as the parameter."""
        return self.names

    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Let the optimizer update the master, on states that lie in chunks."""
        param = torch.nn.Parameter(master)
        param.grad = grad
        optimizer = self.kind([dict(self.group) | {"params": [param]}], **self.options)
        views = dict(zip(self.names, states, strict=True))
        if self.step > 1:
            optimizer.state[param] = self.memory | views
        with ON_HOST:
            optimizer.step()
        after = dict(optimizer.state[param])
        for name, view in views.items():
            value = after.pop(name, None)
            if value is not None and value is not view:
                view.copy_(value)
        for name, value in after.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise ConfigError(
                    f"{self.kind.__name__} keeps {name!r} of {tuple(value.shape)}, which its first steps did not show; "
                    f"give all param groups the options that make it, or none"
                )
        self.memory.clear()
        self.memory.update(after)


def probe(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the states that are as long as the parameter. Raises ConfigError for what is not element-wise."""
    generator = torch.Generator().manual_seed(0)
    value, *grads = (
        torch.randn(PROBE_SHAPE, generator=generator, dtype=torch.float64, device="cpu") for _ in range(1 + PROBE_STEPS)
    )
    whole = torch.nn.Parameter(value.clone())
    try:
        optimizer = kind([whole], **options)
        for grad in grads:
            whole.grad = grad.clone()
            with ON_HOST:
                optimizer.step()
        state = optimizer.state[whole]
        shaped = (name for name, item in state.items() if isinstance(item, torch.Tensor) and item.shape == PROBE_SHAPE)
        names = tuple(shaped)
        elements = value.reshape(-1, 1).clone()
        for number, element in enumerate(elements):
            _update_alone(kind, options, names, element, [grad.reshape(-1, 1)[number] for grad in grads])
    except _REFUSALS as error:
        raise ConfigError(
            f"{kind.__name__}({_spelt(options)}) can't update a parameter by its elements: {error}"
        ) from error
    if not torch.allclose(whole.detach().view(-1, 1), elements, rtol=1e-9, atol=0):
        raise ConfigError(
            f"{kind.__name__} is not element-wise: it treats a matrix otherwise than its elements one by one, so "
            f"chunks can't hold it; use one that is, such as ps.AdamW"
        )
    return names


_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ConfigError)
"""What a class may raise for a parameter that it can't update."""


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
    """What such an optimizer's param groups hold beside their parameters."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    return {name: item for name, item in optimizer.param_groups[0].items() if name != "params"}


def one_by_one(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and `foreach` off unless it was asked for: it would hold temporaries for all parameters at once."""
    known = inspect.signature(kind).parameters
    return ({"foreach": False} if "foreach" in known and not options.get("fused") else {}) | dict(options)


def _spelt(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
