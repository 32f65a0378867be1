"""The mixed-precision protocol, shared by the engine and by the plain reference it must equal."""

import copy
import dataclasses
import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from patrickstar.errors import ModelError


def compute_dtypes(module: nn.Module, compute: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype each parameter computes in, by name.

    A model whose floating parameters have one dtype is cast to `compute`. One that mixes dtypes has made its choice:
    each parameter keeps its own. A norm with running statistics keeps its parameters in the dtype of these
    (PyTorch computes it only so), which is how such a model asks for it.
    """
    floating = {p.dtype for p in module.parameters() if p.is_floating_point()}
    dtypes = {}
    for name, param in module.named_parameters():
        if param.is_complex():
            raise ModelError(f"parameter {name!r} is complex ({param.dtype}); chunks hold real numbers only")
        keeps_dtype = len(floating) > 1 or not param.is_floating_point()
        dtypes[name] = param.dtype if keeps_dtype else compute
    for prefix, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.running_mean is not None:
            for name, _ in child.named_parameters(prefix=prefix, recurse=False):
                if name in dtypes:
                    dtypes[name] = child.running_mean.dtype
    return dtypes


def cast_inputs(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Inputs on the compute device, floating tensors in the compute dtype, containers kept as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, nn.utils.rnn.PackedSequence):
        packed: Any = value  # whose own `to` leaves the batch sizes where PyTorch wants them
        return packed.to(device, dtype) if packed.data.is_floating_point() else packed.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_inputs(item, dtype, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_inputs(item, dtype, device) for item in value)
    twin: Any
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = cast_inputs(item, dtype, device)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            # A frozen dataclass refuses plain assignment, and `replace` the fields its constructor does not take.
            object.__setattr__(twin, field.name, cast_inputs(getattr(value, field.name), dtype, device))
        return twin
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in containers, dataclasses and plain objects."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, str | int | float | bool | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Any = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    else:
        inside = getattr(value, "__dict__", {}).values()
    for item in inside:
        _collect(item, found, seen)


class LossScaler:
    """Dynamic loss scaling for fp16, as `torch.amp.GradScaler`: double after a run of good steps, halve on overflow."""

    INITIAL_SCALE = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = self.INITIAL_SCALE if enabled else 1.0
        self.good_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """What a resumed run needs: nothing where the loss is not scaled."""
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was; an empty state changes nothing."""
        if self.enabled and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

    def update(self, overflow: bool) -> None:
        """Take note of a step: whether its gradients held an infinity or a NaN."""
        if not self.enabled:
            return
        if overflow:
            self.scale *= 0.5
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.scale *= 2.0
            self.good_steps = 0


def clip_coefficient(norm: float, max_norm: float) -> tuple[float, float]:
    """The total norm as fp32, and the factor for gradients, with `torch.nn.utils.clip_grad_norm_`'s arithmetic."""
    if math.isnan(norm):
        return math.nan, math.nan
    total = torch.tensor(norm, dtype=torch.float32, device="cpu")
    return float(total), float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
