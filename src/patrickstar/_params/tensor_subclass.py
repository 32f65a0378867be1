"""Parameters, and views of them, whose operators announce themselves before they run."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from patrickstar._params.managed_param import ManagedParam

# [Note: parameters that announce themselves]
# A managed Parameter stays the user's object; only its class changes, to one with `__torch_function__`. Every operator
# that takes it, from wherever it is called (its module, a parent, the user's own loss, a recompute inside backward, a
# custom Function), comes by here first. Operators without a parameter cost nothing, which a TorchFunctionMode can't
# offer, and no module needs a hook. A view of a parameter (`weight.t()`, `.detach()`, `.chunk(3)`) that outlives its
# operator is classed likewise, so that its later uses announce themselves too.

_GETTERS = """
    shape dtype device requires_grad is_leaf grad_fn layout ndim _version _base is_cuda is_cpu is_meta is_sparse
    is_quantized is_nested is_mkldnn itemsize nbytes output_nr retains_grad _backward_hooks name
    _post_accumulate_grad_hooks
"""
_METHODS = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_signed data_ptr untyped_storage
    get_device is_shared requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__
    __len__ _is_view storage_offset is_set_to  _typed_storage is_pinned is_inference
"""


def descriptor(name: str) -> Any:
    """An attribute of tensors as `__torch_function__` is told of it. Its wrappers are made anew: compare with ==."""
    return getattr(torch.Tensor, name)


_PASS = {descriptor(name).__get__ for name in _GETTERS.split()}
_PASS |= {descriptor(name) for name in _METHODS.split()}
_PASS |= {descriptor(name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")}
_PASS |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.autograd.grad, torch.autograd.backward}
_PASS |= {torch._has_compatible_shallow_copy_type}
"""What tells something about a parameter without reading it."""


class Operate(Protocol):
    """Who is told of an operator: runs it with the parameters in place."""

    def operate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        """Run `func`, whose managed arguments are `tensors`."""
        ...


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    clone: torch.Tensor = torch.Tensor.clone(tensor.detach())
    return clone


def _announce(
    cls: type, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return _dispatch(func, args, kwargs or {})


class ChunkView(torch.Tensor):
    """A tensor that views a parameter's payload. Operators that take it announce themselves like the parameter's."""

    _managed_params: tuple[ManagedParam, ...]
    _interceptor: Operate

    __torch_function__: ClassVar[Any] = classmethod(_announce)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        twin: torch.Tensor = memo.setdefault(id(self), _plain_tensor(self))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_tensor(self).__reduce_ex__(protocol)


class ChunkParameter(nn.Parameter):
    """The user's own Parameter while it is managed. See [Note: parameters that announce themselves]."""

    _managed_params: tuple[ManagedParam, ...]
    _interceptor: Operate

    __torch_function__: ClassVar[Any] = classmethod(_announce)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        twin: nn.Parameter = memo.setdefault(id(self), nn.Parameter(_plain_tensor(self), self.requires_grad))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_plain_tensor(self), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"ChunkParameter({self._managed_params[0].name!r}, {_plain_tensor(self)!r})"


def _managed(values: Any, found: list[Any]) -> list[Any]:
    """The managed tensors among arguments, containers included."""
    for value in values:
        if isinstance(value, ChunkParameter | ChunkView):
            found.append(value)
        elif isinstance(value, list | tuple):
            _managed(value, found)
        elif isinstance(value, dict):
            _managed(value.values(), found)
    return found


def _dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func in _PASS:
            return func(*args, **kwargs)
        tensors = _managed(args, [])
        if kwargs:
            _managed(kwargs.values(), tensors)
        if not tensors:
            return func(*args, **kwargs)
        return tensors[0]._interceptor.operate(func, args, kwargs, tensors)


def adopt_parameter(managed: ManagedParam, interceptor: Operate) -> None:
    """Have the parameter of a slot announce itself."""
    param: Any = managed.param
    param.__class__, param._managed_params, param._interceptor = ChunkParameter, (managed,), interceptor


def release_parameter(managed: ManagedParam) -> None:
    """Make it an ordinary parameter again."""
    param: Any = managed.param
    param.__class__ = nn.Parameter
    del param._managed_params, param._interceptor


def adopt_view(tensor: Any, managed_params: tuple[ManagedParam, ...], interceptor: Operate) -> None:
    """Have a view of parameters announce itself like them."""
    tensor.__class__, tensor._managed_params, tensor._interceptor = ChunkView, managed_params, interceptor


def managed_param_of(tensor: Any) -> ManagedParam | None:
    """The slot of a managed parameter; None for any other tensor."""
    return tensor._managed_params[0] if isinstance(tensor, ChunkParameter) else None
