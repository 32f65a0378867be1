"""Mixed-precision rules shared by the engine and by the plain PyTorch reference it must match bit for bit."""

import copy
import dataclasses
import math
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from patrickstar.errors import ConfigError, ModelError


def compute_dtypes(module: nn.Module, compute: torch.dtype, keep_fp32: Sequence[str] = ()) -> dict[str, torch.dtype]:
    """Return the compute dtype of each parameter by name.

    If all floating-point parameters share one dtype, they are cast to `compute`, except those that match a pattern of
    `keep_fp32` or of the model's own (`fp32_patterns`). If the model mixes dtypes, each of the others keeps its own. A
    norm with running statistics keeps its parameters in the dtype of these statistics, since PyTorch supports no other
    combination.

    Raises:
        ConfigError: A pattern of `keep_fp32` matches no parameter.
        ModelError: A parameter is complex.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)  # a tied parameter has several
    for pattern in keep_fp32:
        if not any(matches(name, pattern) for tied in names.values() for name in tied):
            example = next(iter(names.values()))[0]
            raise ConfigError(f"keep_fp32: no parameter of the model has {pattern!r} in its name, as in {example!r}")
    patterns = (*keep_fp32, *fp32_patterns(module, compute))
    floating = {p.dtype for p in module.parameters() if p.is_floating_point()}
    dtypes = {}
    for name, param in module.named_parameters():
        if param.is_complex():
            raise ModelError(f"parameter {name!r} is complex ({param.dtype}); chunks support real dtypes only")
        keeps_dtype = len(floating) > 1 or not param.is_floating_point()
        dtypes[name] = param.dtype if keeps_dtype else compute
        if param.is_floating_point() and any(matches(tied, pattern) for tied in names[param] for pattern in patterns):
            dtypes[name] = torch.float32
    for prefix, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.running_mean is not None:
            for name, _ in child.named_parameters(prefix=prefix, recurse=False):
                if name in dtypes:
                    dtypes[name] = child.running_mean.dtype
    return dtypes


def matches(name: str, pattern: str) -> bool:
    """Return whether consecutive parts of a parameter's dotted name match a pattern such as "router.*.weight"."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def fp32_patterns(module: nn.Module, compute: torch.dtype) -> tuple[str, ...]:
    """Return patterns of the parameters that a model of transformers computes with in fp32 for this dtype.

    transformers keeps `_keep_in_fp32_modules_strict` in fp32 beside either 16-bit dtype and `_keep_in_fp32_modules`
    beside fp16. A router with a `router_dtype` casts its own classifier in its forward.
    """
    if compute not in (torch.float16, torch.bfloat16):
        return ()
    patterns = {*(getattr(module, "_keep_in_fp32_modules_strict", None) or ())}
    if compute == torch.float16:
        patterns |= {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
    if getattr(getattr(module, "config", None), "router_dtype", None) == "float32":
        patterns.add("router.classifier")
    return tuple(sorted(patterns))


def cast_inputs(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the inputs on `device`, floating-point tensors cast to `dtype`, container types preserved."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, nn.utils.rnn.PackedSequence):
        packed: Any = value  # its own `to` keeps the batch sizes on the CPU, as PyTorch requires
        return packed.to(device, dtype) if packed.data.is_floating_point() else packed.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_inputs(item, dtype, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_inputs(item, dtype, device) for item in value)
    result: Any
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = cast_inputs(item, dtype, device)
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            # A frozen dataclass rejects plain assignment; `replace` rejects fields with init=False.
            object.__setattr__(result, field.name, cast_inputs(getattr(value, field.name), dtype, device))
        return result
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested containers, dataclasses and plain objects."""
    tensors: list[torch.Tensor] = []
    _collect(value, tensors, set())
    return tensors


WITHOUT_TENSORS = (str, int, float, bool, type, type(None), torch.dtype, torch.device)


def _collect(value: Any, tensors: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return
    if isinstance(value, WITHOUT_TENSORS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, set)):
        items: Any = value
    elif isinstance(value, Mapping):
        items = value.values()
    else:
        items = getattr(value, "__dict__", {}).values()
    for item in items:
        _collect(item, tensors, seen)


class LossScaler:
    """Loss scaler for fp16, as `torch.amp.GradScaler`: doubles after a run of good steps, halves on overflow."""

    INITIAL_SCALE = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = self.INITIAL_SCALE if enabled else 1.0
        self.good_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the state to save; empty if loss scaling is disabled."""
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; an empty state changes nothing."""
        if self.enabled and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step. `overflow`: its gradients contained an infinity or a NaN."""
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
    """Return the total norm in fp32 and the gradient factor, with the arithmetic of `clip_grad_norm_` in PyTorch."""
    if math.isnan(norm):
        return math.nan, math.nan
    total = torch.tensor(norm, dtype=torch.float32, device="cpu")
    return float(total), float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
