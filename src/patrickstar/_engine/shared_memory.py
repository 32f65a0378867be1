"""Refusal of models whose parameters share memory with other tensors of the model."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import nn

from patrickstar._distributed.param_sharding import local_part
from patrickstar.errors import ModelError


class _Extent(NamedTuple):
    """Bytes of a storage from the first to the last element of a tensor."""

    start: int
    stop: int
    name: str
    tensor: torch.Tensor
    is_param: bool


def check_memory(module: nn.Module) -> None:
    """Raise ModelError if a parameter shares elements with another parameter, a buffer or an attribute of a module.

    Each parameter gets memory of its own in a chunk, and no other tensor would follow its changes. One Parameter under
    several names is one tensor; parameters that are different parts of one buffer share no element.
    """
    by_storage: defaultdict[int, list[_Extent]] = defaultdict(list)
    for name, tensor, is_param in _tensors(module):
        if tensor.layout is torch.strided and tensor.numel():
            storage = tensor.untyped_storage()
            last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.itemsize
            extent = _Extent(start, start + (last + 1) * tensor.itemsize, name, tensor, is_param)
            by_storage[storage.data_ptr() or storage._cdata].append(extent)
    for extents in by_storage.values():
        extents.sort(key=lambda extent: extent.start)
        for position, first in enumerate(extents):
            for second in extents[position + 1 :]:
                if second.start >= first.stop:
                    break
                if (first.is_param or second.is_param) and _overlap(first, second):
                    raise ModelError(
                        f"{first.name} and {second.name} share memory, and would no longer do so in chunks: make them "
                        f"one nn.Parameter that both modules use, or clone() one of them before ps.initialize"
                    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield parameters, then buffers and other attributes that are tensors; with a description of each."""
    params = dict(module.named_parameters())
    for name, param in params.items():
        yield f"parameter {name!r}", local_part(param), True
    known = {id(param) for param in params.values()}
    for prefix, child in module.named_modules():
        for name, value in (*child._buffers.items(), *vars(child).items()):
            if isinstance(value, torch.Tensor) and id(value) not in known:
                yield f"tensor {f'{prefix}.{name}'.lstrip('.')!r}", local_part(value), False


def _overlap(first: _Extent, second: _Extent) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    memory = as_strided(np.empty(1, np.uint8), (max(first.stop, second.stop),), (1,))  # only for its addresses
    return np.shares_memory(_elements(first, memory), _elements(second, memory))


def _elements(extent: _Extent, memory: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the bytes of a tensor as a view of its storage's bytes."""
    itemsize = extent.tensor.itemsize
    strides = [int(stride) * itemsize for stride in extent.tensor.stride()]
    return as_strided(memory[extent.start :], (*extent.tensor.shape, itemsize), (*strides, 1))
