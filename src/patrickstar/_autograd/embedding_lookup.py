"""Embedding lookups on managed weights, on the device or on the host.

[Note: lookups on the host]
Beside an accelerator, a lookup on the host has a gradient with the bits of a lookup on the device: the device's own
kernel computes it, for the rows that were looked up. Each index is replaced by the position of its first occurrence, so
that the kernel adds the same gradients in the same order, and only as many rows as indices are copied to the host. All
other rows are zero: the first gradient of a backward is written into the chunk without a whole one beside it, whose new
pages alone would take 0.2 s per GiB. The gradient goes to the chunk from the device's thread; autograd's node of the
weight, which would run in another thread, gets none. So a weight with hooks of the user is looked up on the device.

Rows of a weight that other operators read, too, such as a tied head, are looked up in the copy on the host that stays
while these have the weight on the device. Autograd adds the gradients, in its order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.row_gradient import RowGradient


@dataclass(frozen=True)
class _Lookup:
    """Arguments of `F.embedding`, by its names and with its defaults."""

    input: torch.Tensor
    weight: torch.Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False


def can_look_up_on_host(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], managed: ManagedParam
) -> bool:
    """Return whether an operator on an embedding's weight can run on the host."""
    if func is not F.embedding:
        return False
    weight: Any = managed.param
    hooks = len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks or ())
    lookup = _Lookup(*args, **kwargs)
    return hooks <= 1 and lookup.max_norm is None and not lookup.sparse  # one hook is the engine's


def embedding_lookup(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    managed: ManagedParam,
    manager: ChunkManager,
    gradient_hooks: GradientHooks,
    in_copy: bool = False,
) -> torch.Tensor:
    """Run `F.embedding`; if the weight is on the host, look up there and transfer the output instead of the weight.

    `in_copy`: look up in the copy on the host of a weight that is tied, wherever else it is.
    """
    out: torch.Tensor
    if not in_copy and not managed.stays_on_host:
        out = F.embedding(*args, **kwargs)
    else:
        if in_copy or manager.hardware.has_gpu:
            lookup = _Lookup(*args, **kwargs)
            options = lookup.padding_idx, lookup.scale_grad_by_freq
            out = _HostLookup.apply(  # type: ignore[no-untyped-call]
                lookup.weight, lookup.input, options, managed, manager, gradient_hooks
            )
        else:
            host = manager.hardware.host_device
            host_args: Any = [value.to(host) if isinstance(value, torch.Tensor) else value for value in args]
            out = F.embedding(*host_args, **kwargs).to(manager.device)
        manager.count_transfer(out.nbytes, to_device=True)
    if out.requires_grad:
        managed.lookup_bytes += out.nbytes
        managed.lookups_in_graph_bytes += out.nbytes
    return out


class _HostLookup(torch.autograd.Function):
    """Lookup on the host whose backward runs on the device. See [Note: lookups on the host]."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        options: tuple[int | None, bool],
        managed: ManagedParam,
        manager: ChunkManager,
        gradient_hooks: GradientHooks,
    ) -> torch.Tensor:
        host_ids = ids.to(manager.hardware.host_device)
        ctx.save_for_backward(ids)
        ctx.host_ids, ctx.options = host_ids, options
        ctx.managed, ctx.manager, ctx.gradient_hooks = managed, manager, gradient_hooks
        return F.embedding(host_ids, managed.chunk.on_host(managed.region), options[0]).to(manager.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,), (padding, scale), host_ids = ctx.saved_tensors, ctx.options, ctx.host_ids.flatten()
        count = ctx.managed.shape[0]
        padding = -1 if padding is None else padding % count
        if ctx.managed.tied:
            return torch.ops.aten.embedding_dense_backward(grad, ids, count, padding, scale), *(None,) * 5
        if ids.numel() < count:
            rows = _rows_of_gradient(grad, ids, scale).masked_fill_((ids.flatten() == padding)[:, None], 0)
            full: torch.Tensor | RowGradient = RowGradient(host_ids, rows.to(host_ids.device), count)
        else:
            rows = torch.ops.aten.embedding_dense_backward(grad, ids, count, padding, scale)
            full = rows.to(host_ids.device)
        ctx.manager.count_transfer(rows.nbytes, to_device=False)
        ctx.gradient_hooks.on_lookup_gradient(ctx.managed, full, grad.nbytes)
        return (None,) * 6


def _rows_of_gradient(grad: torch.Tensor, ids: torch.Tensor, scale: bool) -> torch.Tensor:
    """Return the gradient of each looked-up row, at the position of its index's first occurrence; zeros elsewhere."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ordered, positions = flat[order], torch.arange(flat.numel(), device=flat.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    starts = torch.where(begins, positions, 0).cummax(0).values
    first = torch.empty_like(order)
    first[order] = order[starts]
    rows: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad.reshape(flat.numel(), -1), first, flat.numel(), -1, scale
    )
    return rows
