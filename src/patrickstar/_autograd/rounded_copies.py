"""Copies of parameters on another device, which hold the rounded values that operators compute with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.param_attributes import WRITERS, check_written_precision
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import ManagedTensor, OrdinaryCopies

MOVING = frozenset((torch.Tensor.to, torch.Tensor.cpu))
"""Functions that copy a tensor to another device."""


class RoundedCopy(OrdinaryCopies, torch.Tensor):
    """Rounded values of a trained parameter in RAM, from which no average in full precision may be computed.

    `torch.optim.swa_utils.AveragedModel` moves parameters to the device of its copies before it adds them. Once it has
    been written, it is a tensor of its own.
    """

    _managed_params: tuple[ManagedParam, ...]
    _copied_version: int

    @classmethod
    def of(cls, values: torch.Tensor, managed_params: tuple[ManagedParam, ...], version: int) -> Any:
        """Return the same values as a copy of a parameter."""
        copy: Any = values.as_subclass(cls)
        copy._managed_params, copy._copied_version = managed_params, version
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for source in (*args[1:], *(kwargs or {}).values()) if func in WRITERS else ():
                if isinstance(source, cls) and source._version == source._copied_version:
                    check_written_precision(func, args, source)
            out = func(*args, **kwargs or {})
            if func is torch.Tensor.detach:  # nn.Parameter expects its class
                return cls.of(out, args[0]._managed_params, args[0]._copied_version)
            return out

    def _ordinary(self) -> torch.Tensor:
        values = super()._ordinary()
        return nn.Parameter(values, self.requires_grad) if getattr(self, "_is_param", False) else values


def rounded_copy(out: Any, source: Any) -> Any:
    """Return the result of moving `source`; if that is a rounded parameter, and the result in RAM, as `RoundedCopy`."""
    managed = source._managed_params[0] if isinstance(source, ManagedTensor) else None
    if managed is None or not managed.schema.trained or type(out) is not torch.Tensor:
        return out
    to_ram = out.device.type == "cpu" and managed.chunk.compute_device != out.device
    is_rounded = out.dtype.itemsize < managed.full_dtype.itemsize
    return RoundedCopy.of(out, source._managed_params, out._version) if to_ram and is_rounded else out
