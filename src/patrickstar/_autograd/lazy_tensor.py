"""Tensors whose elements are read from chunks when an operator needs them, and written back when one changes them."""

from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from patrickstar._hardware.sigint_gate import managing
from patrickstar._hardware.vm_pool import advise_huge, private_memory
from patrickstar._params.memory_functions import EXPOSING, expose
from patrickstar._params.tensor_subclass import ADDRESSES, METADATA, descriptor
from patrickstar.errors import ModelError

# [Note: lazy tensors]
# `parameter.grad`, the entries of `module.state_dict()` and those of `optimizer.state` are in chunks, on any tier, and
# often in another precision than the tensor that an operator reads. They are handed out as tensors without elements: an
# operator that takes one gets a copy, read at that moment, and if it writes into the copy, the copy is written back.
# A view of a lazy tensor is lazy too, so that writes through it reach the chunk.
#
# Savers compare the addresses of storages to find tied parameters, and some then read the memory at the address of a
# tensor. The storage of a lazy tensor is therefore a range of reserved addresses. It takes no memory until the address
# of the tensor itself is asked for, when the elements are read to it; they stay there as long as the lazy tensor lives.
# What native code writes at an address is not seen.


class Elements(Protocol):
    """Store of the elements of a lazy tensor."""

    @property
    def name(self) -> str:
        """Description for errors."""

    @property
    def version(self) -> Hashable:
        """A value that differs after the elements have changed."""

    @property
    def lock(self) -> AbstractContextManager[None]:
        """Lock of the engine that stores the elements."""

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the elements as a plain tensor that has its own storage, or in `out`."""

    def write(self, value: torch.Tensor) -> None:
        """Store changed elements."""


class _KeptElements:
    """Elements in a tensor of their own, for a lazy tensor whose chunk has been given other values."""

    def __init__(self, before: Elements, value: torch.Tensor) -> None:
        self.name, self.lock, self._value = before.name, before.lock, value

    @property
    def version(self) -> Hashable:
        return self._value._version

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._value.clone() if out is None else out.copy_(self._value)

    def write(self, value: torch.Tensor) -> None:
        self._value.copy_(value)


class _Source:
    """Elements of a lazy tensor and of its views, with the addresses of their storage."""

    def __init__(
        self,
        elements: Elements,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.elements = elements
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        self.nbytes = extent * dtype.itemsize
        self._bytes: torch.Tensor | None = None
        self._at_address: torch.Tensor | None = None
        self._version: Hashable = None

    def read(self) -> torch.Tensor:
        """Return a copy of the elements."""
        with self.elements.lock, managing():
            if self._at_address is not None and self._version == self.elements.version:
                return self._at_address.clone()
            return self.elements.read()

    def reserve(self) -> torch.Tensor:
        """Return the bytes at the addresses of the storage, which take no memory until they are written."""
        if self._bytes is None:
            if self.device.type == "cpu":
                self._bytes = torch.frombuffer(private_memory(max(1, self.nbytes)), dtype=torch.uint8)
                advise_huge(self._bytes.data_ptr(), self.nbytes)
            else:
                self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._bytes

    def read_to_address(self) -> torch.Tensor:
        """Return the elements at the addresses of the storage."""
        with self.elements.lock, managing():
            version = self.elements.version
            if self._at_address is None or self._version != version:
                memory = self.reserve()[: self.nbytes].view(self.dtype)
                self._at_address = self.elements.read(torch.as_strided(memory, self.shape, self.strides))
                self._version = version
            return self._at_address


class LazyStorage:
    """Storage of a lazy tensor: its identity and size. Whatever else is asked of it reads the elements."""

    def __init__(self, source: _Source) -> None:
        self._source = source

    def data_ptr(self) -> int:
        """Return the first address, which no other storage has."""
        return self._source.reserve().data_ptr()

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._source.nbytes

    size = __len__ = nbytes

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self._source.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source.read_to_address().untyped_storage(), name)


_GRAD = descriptor("grad").__get__
_RAW_ACCESS = {descriptor("data_ptr"), descriptor("untyped_storage"), descriptor("_typed_storage")}
_METADATA = METADATA | (ADDRESSES - _RAW_ACCESS) | {descriptor("stride"), descriptor("is_contiguous"), _GRAD}
_UNCHANGED: dict[Any, Callable[..., bool]] = {
    descriptor("detach"): lambda tensor: True,
    descriptor("data").__get__: lambda tensor: True,
    descriptor("contiguous"): lambda tensor: tensor.is_contiguous(),
    descriptor("cpu"): lambda tensor: tensor.device.type == "cpu",
}
"""Functions that return a tensor with the same elements, under a condition on the tensor."""


class LazyTensor(torch.Tensor):
    """Tensor whose elements are in chunks. See [Note: lazy tensors]."""

    _source: _Source
    _strided: tuple[tuple[int, ...], tuple[int, ...], int]

    @staticmethod
    def __new__(
        cls,
        elements: Elements,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "LazyTensor":
        source = _Source(elements, shape, strides, dtype, device)
        return _lazy(source, shape, strides, 0, dtype)

    def stores_same(self, other: "LazyTensor") -> bool:
        """Return whether both tensors have the same elements in the same chunks."""
        return self._source.elements == other._source.elements and self._strided == other._strided

    def keep(self, value: torch.Tensor) -> None:
        """Store these elements in place of those in the chunks, from now on."""
        self._source.elements = _KeptElements(self._source.elements, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return _metadata(func, args, kwargs)
            first = args[0] if args else None
            if isinstance(first, LazyTensor):
                if func in _UNCHANGED and _UNCHANGED[func](first):
                    return first
                if func in _RAW_ACCESS:
                    return _raw_access(func, first)
                if func in EXPOSING:
                    copied = partial(_run, torch.Tensor.clone, (first,), {})
                    return expose(func, first._source.elements.name, copied, args[1:], kwargs)
            return _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return _run(func, args, kwargs, _written_sources(func, args, kwargs))


def _lazy(
    source: _Source, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype
) -> LazyTensor:
    tensor: Any = torch.Tensor._make_wrapper_subclass(
        LazyTensor, shape, strides=strides, storage_offset=offset, dtype=dtype, device=source.device
    )
    tensor._source, tensor._strided = source, (shape, strides, offset)
    lazy: LazyTensor = tensor
    return lazy


def _metadata(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func == descriptor("requires_grad_") and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
        raise ModelError(
            f"{args[0]._source.elements.name} is stored in chunks and can't become a parameter or require a gradient "
            f"itself; clone() it first"
        )
    return func(*args, **kwargs)


def _raw_access(func: Any, lazy: LazyTensor) -> Any:
    if func == descriptor("untyped_storage"):
        return LazyStorage(lazy._source)
    return func(_at(lazy._source.read_to_address(), lazy))


def _at(root: torch.Tensor, lazy: LazyTensor) -> torch.Tensor:
    """Return the plain tensor that a lazy one stands for, in the memory of `root`."""
    if lazy.dtype == root.dtype and lazy._strided == (tuple(root.shape), root.stride(), root.storage_offset()):
        return root
    plain = torch.empty(0, dtype=lazy.dtype, device=root.device)
    shape, strides, offset = lazy._strided
    return plain.set_(root.untyped_storage(), offset, shape, strides)


def _written_sources(func: Any, args: Any, kwargs: dict[str, Any]) -> set[_Source]:
    """Return the sources that an operator's schema says it writes to.

    Inside the dispatcher, version counters don't move.
    """
    arguments = func._schema.arguments
    values = [
        *zip(arguments, args, strict=False),
        *((arg, kwargs[arg.name]) for arg in arguments if arg.name in kwargs),
    ]
    written = [value for arg, value in values if arg.alias_info is not None and arg.alias_info.is_write]
    return {leaf._source for leaf in pytree.tree_leaves(written) if isinstance(leaf, LazyTensor)}


def _run(func: Any, args: Any, kwargs: dict[str, Any], written: Collection[_Source] = ()) -> Any:
    """Run a function on copies of the elements, and write back those that it changes, `written` in any case."""
    roots: dict[_Source, torch.Tensor] = {}
    unwrapped: list[tuple[LazyTensor, torch.Tensor, int]] = []

    def unwrap(leaf: Any) -> Any:
        if not isinstance(leaf, LazyTensor):
            return leaf
        if leaf._source not in roots:
            roots[leaf._source] = leaf._source.read()
        with managing():  # tensors of inference mode have no version counter
            plain = _at(roots[leaf._source], leaf)
        unwrapped.append((leaf, plain, plain._version))
        return plain

    out = func(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
    for source in {*written, *(lazy._source for lazy, plain, version in unwrapped if plain._version != version)}:
        source.elements.write(roots[source])
    sources = {root.untyped_storage()._cdata: source for source, root in roots.items()}
    lazies = {id(plain): lazy for lazy, plain, _ in unwrapped}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, LazyTensor):
            return leaf
        if id(leaf) in lazies:
            return lazies[id(leaf)]
        if leaf.layout is not torch.strided:
            return leaf
        source = sources.get(leaf.untyped_storage()._cdata)
        if source is None:
            return leaf
        return _lazy(source, tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()), leaf.dtype)

    return pytree.tree_map(wrap, out)
