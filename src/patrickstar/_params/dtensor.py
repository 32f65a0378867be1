"""Parameters that are DTensors: their local tensor is in the chunks (tensor and expert parallelism)."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from patrickstar._params.tensor_subclass import ManagedTensor, intercepted, plain_tensor

# [Note: DTensor parameters]
# Chunks hold the local tensor of a parameter that is a DTensor. The DTensor remains the user's object; only the local
# tensor in it is exchanged as the chunk moves. Three of its methods are Python methods, which `__torch_function__` does
# not see: they are overridden. Assigning `_local_tensor` does not move the version counter of the DTensor, as
# assigning `data` of a plain Parameter does not either.


def like(param: Any, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the mesh, placements and shape of another one."""
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    # The constructor, unlike `from_local`, leaves the tensor where it is.
    return DTensor(local, DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta), requires_grad=False)


def replace_local(param: Any, local: torch.Tensor) -> None:
    """Exchange the local tensor of a DTensor for one of another dtype or device; the DTensor stays the same object."""
    replacement = like(param, local)
    if param.is_meta != local.is_meta:
        torch.utils.swap_tensors(param, nn.Parameter(replacement, param.requires_grad))
        return
    param.data = replacement
    param._local_tensor, param._spec = replacement._local_tensor, replacement._spec


def local_gradient(param: Any, grad: Any) -> torch.Tensor:
    """Return the local part of a DTensor's gradient in the placements of the parameter; may be a collective.

    Operators choose the placements of a gradient: replicated for an embedding that is sharded by rows, partial sums for
    a norm over a sharded sequence.
    """
    part: torch.Tensor = grad.redistribute(param.device_mesh, param.placements).to_local()
    return part.wait() if hasattr(part, "wait") else part


def _to_local(tensor: Any, **options: Any) -> Any:
    return DTensor.to_local(tensor, **options)


def _redistribute(tensor: Any, *args: Any, **options: Any) -> Any:
    # A collective in the background could read the chunk after it has been evicted.
    return DTensor.redistribute(tensor, *args, **{**options, "async_op": False})


def _full_tensor(tensor: Any, **options: Any) -> Any:
    return DTensor.full_tensor(tensor, **options)


class _InterceptedDTensor(ManagedTensor, DTensor):
    """DTensor whose operators are intercepted."""

    __slots__ = ()

    def to_local(self, **options: Any) -> torch.Tensor:
        local: torch.Tensor = intercepted(_to_local, (self,), options)
        return local

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        other: DTensor = intercepted(_redistribute, (self, *args), options)
        return other

    def full_tensor(self, **options: Any) -> torch.Tensor:
        full: torch.Tensor = intercepted(_full_tensor, (self,), options)
        return full


class ChunkDTensorView(_InterceptedDTensor):
    """DTensor whose local tensor is a view of a parameter's payload."""

    ordinary_class: ClassVar[type[torch.Tensor]] = DTensor


class ChunkDTensor(_InterceptedDTensor):
    """Class of a parameter that is a DTensor while it is managed. See [Note: DTensor parameters]."""

    _is_whole = True

    def _ordinary(self) -> nn.Parameter:
        """Return an ordinary parameter with this process's part in full precision, on the host."""
        managed = self._managed_params[0]
        local = managed.local(self._interceptor.full_precision(managed))
        return nn.Parameter(like(self, local), self.requires_grad)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"ChunkDTensor({self._managed_params[0].name!r}, {plain_tensor(self)!r})"
