"""Exchange the values of a Parameter while it stays the same object."""

import torch
from torch import nn

from patrickstar._distributed.param_sharding import is_dtensor


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
