"""Exchange the values of a Parameter while it stays the same object."""

from typing import Any

import torch
from torch import nn

from patrickstar._distributed.param_sharding import is_dtensor
from patrickstar._params.managed_param import ManagedParam


def set_data(managed: ManagedParam, view: torch.Tensor) -> None:
    """Point a managed parameter, or the local tensor of a DTensor, at a tensor of its dtype and device."""
    if managed.is_dtensor:
        param: Any = managed.param
        param._local_tensor = view
    else:
        managed.param.data = view


def replace_data(param: torch.Tensor, data: torch.Tensor) -> None:
    """Set the data of a tensor, or of the local tensor of a DTensor, also to another device or dtype."""
    if is_dtensor(param):
        from patrickstar._params.dtensor import replace_local

        replace_local(param, data)
    elif param.is_meta and not data.is_meta:
        # A meta Parameter cannot point to real memory; `swap_tensors` gives its identity to another tensor.
        torch.utils.swap_tensors(param, nn.Parameter(data, requires_grad=param.requires_grad))
    else:
        param.data = data
