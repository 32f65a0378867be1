"""Interface of collectives on chunks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from patrickstar._distributed.process_group import RankGroup, World
from patrickstar._hardware.transfer import Transfer

# [Note: summation order]
# With gloo, gradients are sent in their own dtype; each owner sums its shard in fp32 (fp64 for fp64), from +0, in rank
# order, and rounds once. gloo's own reduce-scatter sends everything twice and rounds at every hop: with two processes
# 2.00 times the bytes, measured on the loopback device. On an accelerator it is `reduce_scatter_tensor`, with the order
# and rounding of NCCL or its counterpart. In both cases the optimizer step divides the sum by the number of processes
# in fp32.
#
# In two levels, the gradients of one replica's processes are summed as above, but not rounded: these partial sums are
# sent in fp32 (fp64) and summed from +0 in the order of replicas, and the total is rounded once. On an accelerator
# `reduce_scatter_tensor` has rounded the partial sums.

Bounds = tuple[int, ...]
"""Start of each process's shard, in elements, and the end of the last."""


class Levels(NamedTuple):
    """Two levels of the processes that share a chunk: HSDP's shard and replicate dimensions."""

    shard: RankGroup
    """Processes of this replica, in the order of their shards."""
    replicate: RankGroup
    """Processes with this process's shard, in the order of replicas."""

    def shard_bounds(self, bounds: Bounds) -> Bounds:
        """Return the bounds of a replica's shards, given those of all processes' parts of a chunk."""
        return bounds[:: self.replicate.size]

    def part_bounds(self, bounds: Bounds) -> Bounds:
        """Return the bounds of all replicas' parts of this process's shard, from its start."""
        first = self.shard.rank * self.replicate.size
        parts = bounds[first : first + self.replicate.size + 1]
        return tuple(bound - parts[0] for bound in parts)


class Collectives(ABC):
    """Starts collectives of groups of processes; all members of a group start the same ones in the same order.

    Ranks are numbers of members of the group.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    @staticmethod
    def shard(whole: torch.Tensor, bounds: Bounds, rank: int) -> torch.Tensor:
        """Return the shard of one process."""
        return whole[bounds[rank] : bounds[rank + 1]]

    @abstractmethod
    def begin_after(self, read: Transfer) -> None:
        """Let the next collective begin after a read from disk, and raise its error."""

    @abstractmethod
    def all_gather(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds, *, in_order: bool = False
    ) -> Transfer:
        """All-gather the processes' shards into `whole`. Each may be on the host.

        `in_order`: an earlier collective may still write `own`, which stays unchanged until this one has ended.
        """

    @abstractmethod
    def gather_to(
        self,
        group: RankGroup,
        own: torch.Tensor,
        whole: torch.Tensor | None,
        bounds: Bounds,
        ranks: Sequence[int],
        *,
        in_order: bool = False,
    ) -> Transfer:
        """Gather the shards into `whole` on these ranks; the other ranks only send. `in_order`: see `all_gather`."""

    @abstractmethod
    def reduce_scatter(
        self,
        group: RankGroup,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
    ) -> Transfer:
        """Sum `whole` over these ranks; each process gets its shard in `target`, in the dtype of `target`."""

    @abstractmethod
    def hierarchical_reduce_scatter(
        self,
        levels: Levels,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        replicas: Sequence[int],
    ) -> Transfer:
        """Sum `whole` in each replica, then the partial sums in fp32 (fp64) over replicas; see `reduce_scatter`.

        Args:
            bounds: Bounds of the processes' parts; those of one shard follow each other, in the order of replicas.
            ranks: Members of this replica that have gradients.
            replicas: Replicas with such members.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop; no collective may be started afterwards."""

    @staticmethod
    def even(bounds: Bounds) -> bool:
        """Return True if all shards have the same size."""
        return len(set(shard_sizes(bounds))) == 1

    @staticmethod
    def owner(bounds: Bounds) -> int:
        """Return the rank of the only process with a non-empty shard."""
        return next(rank for rank, size in enumerate(shard_sizes(bounds)) if size)


def shard_sizes(bounds: Bounds) -> list[int]:
    """Return the elements of each shard."""
    return [end - begin for begin, end in pairwise(bounds)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finish(works: Sequence[Any]) -> None:
    """Wait for operations of torch.distributed; None stands for one that was not needed."""
    for work in works:
        if work is not None:
            work.wait()
