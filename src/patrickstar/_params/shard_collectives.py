"""Collectives over per-parameter data of all ranks: optimizer scalars, shards of a tensor, gradient statistics."""

from collections.abc import Sequence
from typing import Any

import torch

from patrickstar._distributed.process_group import Processes
from patrickstar._params.managed_param import ManagedParam


def share_optimizer_extra(managed_params: Sequence[ManagedParam], world: Processes) -> None:
    """Copy `optimizer_extra` of each parameter from the lowest rank that owns a shard of it to ranks without one."""
    own = {
        managed.name: _to_json(managed.optimizer_extra)
        for managed in managed_params
        if managed.location.numel and managed.optimizer_extra
    }
    merged: dict[str, Any] = {}
    for extra_by_name in reversed(world.all_gather_object(own)):
        merged |= extra_by_name
    for managed in managed_params:
        if not managed.location.numel and managed.name in merged:
            managed.optimizer_extra = _from_json(merged[managed.name])


def _to_json(extra: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors by JSON values with their dtype and shape."""
    return {
        key: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
        if isinstance(value, torch.Tensor)
        else value
        for key, value in extra.items()
    }


def _from_json(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device="cpu")
        if isinstance(value, dict)
        else value
        for key, value in extra.items()
    }


def add_over_ranks(values: Sequence[float], world: Processes) -> list[float]:
    """Return the element-wise sums over all ranks in fp64, added in rank order."""
    row = torch.tensor(values, dtype=torch.float64, device="cpu")
    rows = world.all_gather(row)
    total = torch.zeros_like(row)
    for rank_row in rows:
        total += rank_row
    sums: list[float] = total.tolist()
    return sums
