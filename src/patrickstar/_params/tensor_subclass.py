"""Tensor subclasses that intercept every operator on a managed parameter or on a view of one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar._params.managed_param import ManagedParam
from patrickstar.errors import ModelError

# [Note: operator interception]
# A managed Parameter remains the user's object; only its class changes, to one with `__torch_function__`. Every
# operator that takes the parameter is therefore dispatched here first, wherever it is called: in its module, a parent
# module, the user's loss, a recomputation inside backward, or a custom Function. Operators without a managed parameter
# cost nothing, unlike with a TorchFunctionMode, and no module needs a hook. A view of a parameter (`weight.t()`,
# `.detach()`, `.chunk(3)`) that outlives its operator gets such a class too, so that later uses of the view are
# intercepted as well.

_GETTERS = """
    shape dtype device requires_grad is_leaf grad_fn layout ndim _version _base is_cuda is_cpu is_meta is_sparse
    is_quantized is_nested is_mkldnn itemsize nbytes output_nr retains_grad _backward_hooks name
    _post_accumulate_grad_hooks
"""
_METHODS = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_signed
    get_device requires_grad_ register_hook retain_grad __hash__
    __len__ _is_view is_set_to is_inference
"""


def descriptor(name: str) -> Any:
    """Return a tensor attribute as `__torch_function__` receives it. Each access wraps it anew: compare with ==."""
    return getattr(torch.Tensor, name)


METADATA = {descriptor(name).__get__ for name in _GETTERS.split()}
METADATA |= {descriptor(name) for name in _METHODS.split()}
METADATA |= {descriptor(name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.autograd.grad, torch.autograd.backward}
METADATA |= {torch._has_compatible_shallow_copy_type}
"""Functions that query a parameter's metadata without reading its values."""
ADDRESSES = {
    descriptor(name)
    for name in ("data_ptr", "untyped_storage", "_typed_storage", "storage_offset", "is_shared", "is_pinned")
}
"""Functions whose results are about the memory of the values. See [Note: addresses of parameters]."""
_STRIDES = {torch.Tensor.stride, torch.Tensor.is_contiguous}


class OperatorInterceptor(Protocol):
    """Runs an operator while its parameters are on the device."""

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Any], native: bool = False) -> Any:
        """Run `func`, whose managed arguments are `tensors`. `native`: native code has called it, below autograd."""

    def full_precision(self, managed: ManagedParam) -> torch.Tensor:
        """Return a host copy of a parameter in full precision."""

    def accessed(self, managed: ManagedParam) -> AbstractContextManager[None]:
        """Hold a parameter on the device, as during an operator."""


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a managed tensor that is not intercepted."""
    clone: torch.Tensor = torch.Tensor.clone(tensor.detach())
    return clone


def _managed_tensors(values: Any, tensors: list[Any]) -> list[Any]:
    """Append the managed tensors among arguments and nested containers to `tensors`, and return it."""
    for value in values:
        kind = type(value)
        if kind in _LEAVES:
            continue
        if issubclass(kind, ManagedTensor):  # `isinstance` would call a Python method of nn.Parameter's metaclass
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _managed_tensors(value, tensors)
        elif isinstance(value, dict):
            _managed_tensors(value.values(), tensors)
    return tensors


def _torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func in METADATA:
            return func(*args, **kwargs or {})
        tensors = _managed_tensors(args, [])
        if kwargs:
            _managed_tensors(kwargs.values(), tensors)
        if not tensors:
            return func(*args, **kwargs or {})
        if func in _STRIDES:
            return func(tensors[0]._with_strides(), *args[1:], **kwargs or {})
        return tensors[0]._interceptor.operate(func, args, kwargs or {}, tensors)


def intercepted(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a Python function on tensors as if it were an operator."""
    return _torch_function(torch.Tensor, func, (), args, kwargs)


class OrdinaryCopies:
    """Base of the classes whose copies and pickles are ordinary tensors."""

    __slots__ = ()

    def _ordinary(self: Any) -> torch.Tensor:
        """Return an ordinary tensor with the values."""
        return plain_tensor(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self._ordinary())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)


class ManagedTensor(OrdinaryCopies):
    """Base of the classes whose operators are intercepted."""

    __slots__ = ()
    _managed_params: tuple[ManagedParam, ...]
    _interceptor: OperatorInterceptor
    _is_whole: ClassVar[bool] = False
    """True for a parameter, False for a view of one."""

    __torch_function__: ClassVar[Any] = classmethod(_torch_function)

    def _with_strides(self) -> Any:
        """Return a tensor of the same shape and strides."""
        return self

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Intercept the one method that does not pass through `__torch_function__`."""
        return intercepted(torch.Tensor.set_, (self, *args), kwargs)


class ChunkView(ManagedTensor, torch.Tensor):
    """View of a parameter's payload. Operators that take it are intercepted like those of the parameter."""

    ordinary_class: ClassVar[type[torch.Tensor]] = torch.Tensor
    """Class of a tensor that is no longer a view."""


def _torch_dispatch(
    cls: Any, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        tensors = _managed_tensors(args, [])
        if kwargs:
            _managed_tensors(kwargs.values(), tensors)
        managed_params = dict.fromkeys(managed for tensor in tensors for managed in tensor._managed_params)
        if all(managed.state.uses for managed in managed_params):  # an operator that Python called has fetched them
            out = func(*args, **kwargs or {})
        else:
            out = tensors[0]._interceptor.operate(func, args, kwargs or {}, tensors, native=True)
        return tree_map_only(ChunkView, detached_view, out)


class FormerDetachedView(OrdinaryCopies, torch.Tensor):
    """Tensor that was a `DetachedView` and has its own memory: PyTorch still dispatches its operators to its class."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs or {})


class DetachedView(ChunkView):
    """Result of `detach` on a parameter. Operators on it are intercepted below autograd, too.

    Transforms of torch.func wrap such tensors, as `functional_call` documents them for gradients of samples, and call
    operators on them that Python does not see.
    """

    ordinary_class: ClassVar[type[torch.Tensor]] = FormerDetachedView
    __torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = _torch_function(cls, func, types, args, kwargs)
        return tree_map_only(ChunkView, detached_view, out) if type(out) in (ChunkView, tuple, list) else out


def detached_view(view: Any) -> Any:
    """Return a view whose operators are intercepted wherever they are called; anything else as it is."""
    if type(view) is not ChunkView or view.requires_grad:  # a new leaf's views have a graph
        return view
    detached: Any = torch.Tensor._make_subclass(DetachedView, view)
    detached._managed_params, detached._interceptor = view._managed_params, view._interceptor
    for managed in view._managed_params:
        managed.views[id(detached)] = detached
    return detached


class ChunkParameter(ManagedTensor, nn.Parameter):
    """Class of the user's Parameter while it is managed. See [Note: operator interception]."""

    _is_whole = True

    def _with_strides(self) -> torch.Tensor:
        return self._managed_params[0].meta_tensor

    def _ordinary(self) -> nn.Parameter:
        """Return an ordinary Parameter with the values in full precision, on the host."""
        full = self._interceptor.full_precision(self._managed_params[0])
        return nn.Parameter(full, self.requires_grad)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"ChunkParameter({self._managed_params[0].name!r}, {plain_tensor(self)!r})"


_LEAVES = frozenset((torch.Tensor, nn.Parameter, int, float, bool, type(None)))
"""Frequent types of arguments that contain no other argument."""


def all_managed_params(tensors: Sequence[Any]) -> tuple[ManagedParam, ...]:
    """Return the parameters of an operator's managed tensors. Raises ModelError if one is another engine's."""
    for tensor in tensors:  # a loop, since this runs for most operators
        if tensor._interceptor is not tensors[0]._interceptor:
            raise ModelError(
                f"an operator combines parameter {tensors[0]._managed_params[0].name!r} with a parameter of another "
                f"engine; pass .detach().clone() of one of them"
            )
    return tuple(dict.fromkeys([managed for tensor in tensors for managed in tensor._managed_params]))


def managed_param_of(tensor: Any) -> ManagedParam | None:
    """Return the ManagedParam of a parameter, or None for any other tensor."""
    kind = type(tensor)
    return tensor._managed_params[0] if issubclass(kind, ManagedTensor) and kind._is_whole else None
