"""Functions that expose the memory of a tensor outside PyTorch, exchange it, or write into it unnoticed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from patrickstar._params.precision import tensors_in
from patrickstar.errors import ModelError

_TENSOR = torch.Tensor
_INTERFACE: Any = _TENSOR.__dict__["__cuda_array_interface__"].__get__
EXPOSING = {_TENSOR.numpy, _TENSOR.__array__, _TENSOR.__dlpack__, _INTERFACE}
UNVERSIONED = {_TENSOR.apply_, _TENSOR.map_, _TENSOR.map2_}
"""In-place functions that leave the version counter as it is."""
REPLACING = {_TENSOR.set_, _TENSOR.resize_, _TENSOR.resize_as_, _TENSOR.share_memory_}
"""Functions that exchange the memory of a tensor."""
_RESHAPING = "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_"
RESHAPING = {getattr(_TENSOR, name) for name in _RESHAPING.split()}
"""In-place functions that change the shape of a tensor and leave its memory."""


def expose(
    func: Callable[..., Any], name: str, copied: Callable[[], torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function that exposes memory on a copy; an array that others could write into is read-only.

    Args:
        func: One of `EXPOSING`.
        name: Description of the tensor, for the error.
        copied: Returns the copy.
        args, kwargs: Further arguments of the function.

    Raises:
        ModelError: The function shares memory that can't be read-only.
    """
    shares = func is _TENSOR.__dlpack__ and kwargs.get("copy") is not True
    if shares or func == _INTERFACE:
        raise ModelError(
            f"{name} can't share its memory with another library, since its chunk moves: pass clone() of it, and write "
            f"results back with copy_()"
        )
    tensor = copied()
    result = func(tensor, *args, **kwargs)
    if isinstance(result, np.ndarray) and tensor.device.type == "cpu" and not result.flags.owndata:
        result.flags.writeable = False
    return result


def versioned(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return an in-place function that counts its write in the tensor's version."""

    def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # These functions take no tensor whose class has operators of its own.
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        func(plain, *args, **kwargs)
        torch.autograd.graph.increment_version(tensor)
        return tensor

    return write


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function may write in place, by its schema, its name or an option."""
    if isinstance(func, torch._ops.OpOverload):
        known = func._schema.arguments
        values = [kwargs.get(each.name, args[at] if at < len(args) else None) for at, each in enumerate(known)]
        writes = [each.alias_info is not None and each.alias_info.is_write for each in known]
        return tensors_in([value for value, write in zip(values, writes, strict=True) if write])
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    if in_place or (any(each is True for each in (*args, *kwargs.values())) and _has_option(func)):
        return tensors_in([*args[:1], *([] if args else kwargs.values())])
    return tensors_in([kwargs.get("out")])


@cache
def _has_option(func: Any) -> bool:
    """Return whether a function has the option `inplace`."""
    try:
        return "inplace" in inspect.signature(func).parameters
    except (TypeError, ValueError):  # it is built in
        return False
