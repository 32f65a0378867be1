"""Logits that are not computed: `cross_entropy` of them is computed tile by tile instead."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from patrickstar._hardware.compute_device import autocast_dtype, autocast_to
from patrickstar._layout.byte_size import format_size
from patrickstar._params.tensor_subclass import METADATA, descriptor
from patrickstar.errors import ConfigError, ModelError
from patrickstar.functional import linear_cross_entropy

# [Note: uncomputed logits]
# With `Config(tiled_loss=True)` the output layer of a model of transformers returns, in place of logits, a tensor
# without elements that knows the layer's input. What models and losses do between the layer and `cross_entropy` is
# noted: another shape, rows of it, fp32, a factor, a soft cap. `cross_entropy` then calls `linear_cross_entropy`. Any
# other operator gets the logits, computed at that moment as the layer would have computed them. So no model's code is
# replaced, and a loss in the user's loop is tiled as well. Operands that have changed since are noticed by their
# version.
#
# Factors and soft caps are applied in fp32, also where a model would apply them to 16-bit logits.


@dataclass(frozen=True, eq=False)
class _Form:
    """Logits as a function of the output layer's input."""

    output: "TiledOutput"
    hidden: torch.Tensor
    """Input of shape (..., features)."""
    versions: tuple[int, ...]
    """Versions of the layer's operands when it was called."""
    autocast: torch.dtype | None
    recorded: bool
    """Gradients were recorded when the layer was called."""
    wide: bool = False
    """Converted to fp32."""
    scale: float = 1.0
    divisor: float | None = None
    """Divided by this after the scale: the first part of a soft cap."""
    bounded: bool = False
    """The hyperbolic tangent of that: the second part."""
    softcap: float | None = None
    """Multiplied by this: the third part."""


class UncomputedLogits(torch.Tensor):
    """Logits that are computed when an operator reads them. See [Note: uncomputed logits]."""

    form: _Form

    @staticmethod
    def of(form: _Form) -> "UncomputedLogits":
        """Return the logits of this form."""
        hidden, shape = form.hidden, (*form.hidden.shape[:-1], form.output.layer.weight.shape[0])
        dtype = torch.float32 if form.wide else form.autocast or hidden.dtype
        made: Any = torch.Tensor._make_wrapper_subclass(UncomputedLogits, shape, dtype=dtype, device=hidden.device)
        made.form = form
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD:
            form = args[0].form
            return form.recorded and (form.hidden.requires_grad or form.output.layer.weight.requires_grad)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        note = _NOTED.get(func)
        noted = note(*args, **kwargs) if note is not None and isinstance(args[0], UncomputedLogits) else None
        return noted if noted is not None else _with_logits(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the logits that native code reads."""
        return _with_logits(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"UncomputedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def checked(self) -> _Form:
        """Return the form. Raises ModelError if an operand has changed since the layer was called."""
        form = self.form
        if form.versions != form.output.versions(form.hidden):
            raise ModelError(
                "logits were not computed in the forward (tiled_loss=True), and the output layer's weight or input has "
                "changed since: read outputs.logits before backward, or set tiled_loss=False"
            )
        return form

    def computed(self, reader: str) -> torch.Tensor:
        """Return the logits for an operator of this name."""
        form, layer = self.checked(), self.form.output.layer
        recorded = form.recorded and torch.is_grad_enabled()
        if recorded:
            form.output.notice(reader, self.shape, self.dtype)
        with torch.set_grad_enabled(recorded), autocast_to(self.device, form.autocast):
            logits = functional.linear(form.hidden, layer.weight, layer.bias)
            logits = logits.float() if form.wide else logits
            logits = logits if form.scale == 1.0 else logits * form.scale
            logits = logits if form.divisor is None else logits / form.divisor
            logits = logits.tanh() if form.bounded or form.softcap is not None else logits
            return logits if form.softcap is None else logits * form.softcap


def _with_logits(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with computed logits."""
    name = getattr(func, "__name__", str(func))
    args, kwargs = tree_map_only(UncomputedLogits, lambda logits: logits.computed(name), (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)


class TiledOutput:
    """Forward of an output layer that returns uncomputed logits. See [Note: uncomputed logits].

    Args:
        layer: The output layer.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self._noticed = False

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        state = self.versions(hidden), autocast_dtype(hidden.device), torch.is_grad_enabled()
        return UncomputedLogits.of(_Form(self, hidden, *state))

    def versions(self, hidden: torch.Tensor) -> tuple[int, ...]:
        """Return the versions of the layer's operands, of which each write makes a new one."""
        operands = hidden, self.layer.weight, self.layer.bias
        return tuple(each._version for each in operands if each is not None and not each.is_inference())

    def notice(self, reader: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Say once that an operator reads logits while gradients are recorded."""
        if not self._noticed:
            self._noticed = True
            nbytes = format_size(shape.numel() * dtype.itemsize)
            warnings.warn(
                f"tiled_loss=True, but {reader} reads the logits, so {nbytes} of them are computed and stored: compute "
                f"the loss by cross_entropy of outputs.logits, or read them under torch.no_grad()",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the ordinary forward of the copied layer, which no engine manages."""
        copied = deepcopy(self.layer, memo)
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self.layer, "forward")


def tiled_output(model: nn.Module) -> TiledOutput:
    """Return the forward of a model's output layer that leaves logits to a tiled loss.

    Raises:
        ConfigError: The model has no output layer of a kind that can be tiled.
    """
    advice = "call ps.functional.linear_cross_entropy in your loss, or leave tiled_loss out"
    for module in model.modules():
        if callable(get := getattr(module, "get_output_embeddings", None)) and (layer := get()) is not None:
            if type(layer) is not nn.Linear or isinstance(layer.weight, DTensor):
                weight = " over a DTensor" if type(layer) is nn.Linear else ""
                raise ConfigError(f"tiled_loss=True: the output layer is a {type(layer).__name__}{weight}: {advice}")
            return TiledOutput(layer)
    raise ConfigError(
        f"tiled_loss=True: {type(model).__name__} is no language model of transformers, with get_output_embeddings(): "
        f"{advice}"
    )


# What is noted. Each function returns None where it cannot note what is asked.


def _loss(
    logits: UncomputedLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
    **deprecated: Any,
) -> torch.Tensor | None:
    """Return the loss that `functional.cross_entropy` would return."""
    form = logits.form
    if (
        weight is not None
        or reduction not in ("mean", "sum")
        or any(value is not None for value in deprecated.values())
    ):
        return None
    if target.dim() != 1 or target.shape != logits.shape[:-1] or target.is_floating_point() or form.bounded:
        return None
    layer, scale = logits.checked().output.layer, form.scale
    if form.divisor is not None and form.softcap is None:
        scale /= form.divisor
    loss = linear_cross_entropy(
        form.hidden,
        layer.weight,
        target,
        layer.bias,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        scale=scale,
        softcap=form.softcap,
    )
    return loss.to(logits.dtype)


def _noted(logits: UncomputedLogits, **changes: Any) -> UncomputedLogits:
    """Return the same logits, transformed."""
    return UncomputedLogits.of(replace(logits.form, **changes))


def _to(logits: UncomputedLogits, *args: Any, **options: Any) -> UncomputedLogits | None:
    if options or len(args) != 1 or args[0] not in (torch.float32, logits.dtype):
        return None
    return logits if args[0] == logits.dtype else _float(logits)


def _float(logits: UncomputedLogits, **options: Any) -> UncomputedLogits | None:
    return None if options or logits.dtype == torch.float64 else _noted(logits, wide=True)


def _contiguous(logits: UncomputedLogits, **options: Any) -> UncomputedLogits | None:
    return None if options else logits


def _shaped(logits: UncomputedLogits, *shape: Any) -> UncomputedLogits | None:
    """Note another shape with the same last dimension."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] != logits.shape[-1]:
        return None
    hidden = logits.form.hidden
    return _noted(logits, hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _rows(logits: UncomputedLogits, index: Any) -> UncomputedLogits | None:
    """Note slices of all dimensions but the last."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    if not all(isinstance(part, int | slice) or part is Ellipsis for part in parts):
        return None
    last_is_given = Ellipsis in parts[:-1] or len(parts) == logits.dim()
    if (last_is_given and parts[-1] != whole) or len(parts) > logits.dim():
        return None
    return _noted(logits, hidden=logits.form.hidden[index])


def _multiplied(logits: UncomputedLogits, factor: Any) -> UncomputedLogits | None:
    form = logits.form
    if not isinstance(factor, int | float) or form.softcap is not None:
        return None
    if form.bounded:
        return _noted(logits, bounded=False, softcap=factor) if factor == form.divisor else None
    return _noted(logits, scale=form.scale * factor) if form.divisor is None else None


def _divided(logits: UncomputedLogits, divisor: Any) -> UncomputedLogits | None:
    form = logits.form
    if not isinstance(divisor, int | float) or form.divisor is not None:
        return None
    return _noted(logits, divisor=float(divisor))


def _bounded(logits: UncomputedLogits) -> UncomputedLogits | None:
    form = logits.form
    return _noted(logits, bounded=True) if form.divisor and not form.bounded and form.softcap is None else None


_REQUIRES_GRAD = descriptor("requires_grad").__get__
_NOTED: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _loss,
    torch.Tensor.to: _to,
    torch.Tensor.float: _float,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.__getitem__: _rows,
    torch.Tensor.tanh: _bounded,
    torch.tanh: _bounded,
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape, torch.reshape), _shaped),
    **dict.fromkeys((torch.Tensor.mul, torch.mul), _multiplied),
    **dict.fromkeys((torch.Tensor.div, torch.div), _divided),
}
"""Functions that note an operator, in place of computing logits for it."""
