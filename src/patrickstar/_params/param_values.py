"""Exchange the values of a Parameter while it stays the same object, and let masters follow them."""

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


def follow_written(
    master: torch.Tensor, written: torch.Tensor, *, exactly: bool = False, before: torch.Tensor | None = None
) -> None:
    """Copy changed elements of a rounded copy of `master` into it; unchanged ones keep their full precision.

    Args:
        exactly: `written` has full precision itself, so copy all elements.
        before: The rounded copy before the write, on the device of `master`, if `master` is restored from `written`.
    """
    written = written.to(master.device)
    if exactly:
        master.copy_(written)
        return
    if before is None:
        same = master.to(written.dtype) == written
    else:
        same = before.view(torch.int16) == written.view(torch.int16)
    master.copy_(torch.where(same, master, written.to(master.dtype)))
