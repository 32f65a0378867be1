"""Tensors among values that processes exchange as JSON."""

from typing import Any

import torch


def to_json(values: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors by JSON values with their dtype and shape."""
    return {
        key: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
        if isinstance(value, torch.Tensor)
        else value
        for key, value in values.items()
    }


def from_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that `to_json` was given."""
    return {
        key: torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device="cpu")
        if isinstance(value, dict)
        else value
        for key, value in values.items()
    }
