"""Start and stop the interception of operators on a parameter or on a view of one."""

from typing import Any

from torch import nn

from patrickstar._distributed.param_sharding import is_dtensor
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import (
    ChunkParameter,
    ChunkView,
    DetachedView,
    FormerDetachedView,
    OperatorInterceptor,
)


def adopt_parameter(managed: ManagedParam, interceptor: OperatorInterceptor) -> None:
    """Start to intercept operators on a managed parameter."""
    param: Any = managed.param
    managed.original_class = type(param)
    intercept_parameter(managed)
    param._managed_params, param._interceptor = (managed,), interceptor


def intercept_parameter(managed: ManagedParam) -> None:
    """Give a parameter the class whose operators are intercepted."""
    param: Any = managed.param
    if managed.is_dtensor:
        from patrickstar._params.dtensor import ChunkDTensor

        param.__class__ = ChunkDTensor
    else:
        param.__class__ = ChunkParameter


def let_through(managed: ManagedParam) -> None:
    """Let the operators of a parameter run without interception until `intercept_parameter`."""
    param: Any = managed.param
    param.__class__ = managed.original_class if managed.is_dtensor else nn.Parameter


def release_parameter(managed: ManagedParam) -> None:
    """Turn a managed parameter back into a Parameter of its own class."""
    param: Any = managed.param
    if hasattr(param, "_managed_params"):  # otherwise `module.float()` or the like has exchanged it
        param.__class__ = managed.original_class
        del param._managed_params, param._interceptor


def adopt_view(tensor: Any, managed_params: tuple[ManagedParam, ...], interceptor: OperatorInterceptor) -> None:
    """Start to intercept operators on a view of managed parameters."""
    if isinstance(tensor, DetachedView):
        return
    if is_dtensor(tensor):
        from patrickstar._params.dtensor import ChunkDTensorView

        tensor.__class__ = ChunkDTensorView
    else:
        tensor.__class__ = DetachedView if isinstance(tensor, FormerDetachedView) else ChunkView
    tensor._managed_params, tensor._interceptor = managed_params, interceptor
    for managed in managed_params:
        managed.views[id(tensor)] = tensor


def release_view(tensor: Any) -> None:
    """Turn a view of managed parameters into an ordinary tensor."""
    tensor.__class__ = tensor.ordinary_class
    del tensor._managed_params, tensor._interceptor
