"""Bytes that one process sends in the collectives of a step, with ring algorithms."""

from patrickstar._perf_model.mesh import DataParallelGroup
from patrickstar._perf_model.transformer_shape import HALF, SINGLE

GATHERS = 2
"""All-gathers of each parameter per step: for forward and for backward."""


def shard_bytes(numel: int, shards: int, gathers: int = GATHERS, itemsize: float = HALF) -> float:
    """Return the bytes sent inside a replica: `gathers` all-gathers, one reduce-scatter (PatrickStar §7: 6(p-1)/p)."""
    return (gathers + 1) * itemsize * (shards - 1) / shards * numel


def replica_bytes(numel: int, group: DataParallelGroup, itemsize: float = HALF) -> float:
    """Return the bytes sent between replicas: sums of gradients are reduced, updated parameters gathered.

    The sums are in fp32, which preserves the bits of a sum over all processes in rank order.

    Args:
        numel: Elements of the parameters that the group shares; each process exchanges those of its shard.
        itemsize: Bytes of an element of the parameters.
    """
    return (itemsize + SINGLE) * (group.replicas - 1) / group.replicas * (numel / group.shards)


def all_reduce_bytes(elements: int, processes: int) -> float:
    """Return the bytes sent in an all-reduce of 16-bit elements: a reduce-scatter and an all-gather."""
    return 2 * HALF * (processes - 1) / processes * elements


def exchange_bytes(tokens: float, hidden: int, processes: int) -> float:
    """Return the bytes sent in an all-to-all, if a process's routed 16-bit tokens go to all processes evenly."""
    return HALF * (processes - 1) / processes * (tokens * hidden)
