"""Embedding lookups on managed weights, on the device or on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._params.managed_param import ManagedParam


def embedding_lookup(
    args: Sequence[Any], kwargs: dict[str, Any], managed: ManagedParam, manager: ChunkManager
) -> torch.Tensor:
    """Run `F.embedding`; if the weight is on the host, look up there and transfer the output instead of the weight."""
    if not managed.stays_on_host:
        out = F.embedding(*args, **kwargs)
    else:
        host = manager.hardware.host_device
        host_args: Any = [value.to(host) if isinstance(value, torch.Tensor) else value for value in args]
        out = F.embedding(*host_args, **kwargs).to(manager.device)
        manager.count_transfer(out.nbytes, to_device=True)
    if out.requires_grad:
        managed.lookup_bytes += out.nbytes
        managed.lookups_in_graph_bytes += out.nbytes
    return out
