"""Groups of processes that communicate."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from patrickstar._distributed.deadlock_watch import DeadlockWatch

COLLECTIVE_POLL_S = 50e-6
"""Seconds between checks of a pending all-gather."""


class Ranks(Protocol):
    """All processes."""

    rank: int
    watch: DeadlockWatch

    def explain_peer_failure(self) -> AbstractContextManager[None]:
        """Replace PyTorch's error for a lost process by one that names the process."""


class RankGroup:
    """Processes of the world that share chunks, or that coordinate.

    Attributes:
        ranks: Their ranks in the world; members are numbered in this order.
        rank: Number of this process.
        control: Process group for messages on the host.
        data: Process group for chunks, of the compute device's backend.
    """

    def __init__(
        self, world: Ranks, ranks: Sequence[int], control: dist.ProcessGroup | None, data: dist.ProcessGroup | None
    ) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self.control, self.data = control, data

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather flat tensors of one size from all members, in their order; raise PeerError if a process has ended.

        The wait is in Python, so that Ctrl-C can interrupt it.
        """
        if self.size == 1:
            return own.view(1, -1)
        gathered = torch.empty(self.size * own.numel(), dtype=own.dtype, device="cpu")
        with self.world.explain_peer_failure():
            work = gather_into(gathered, own, self.control, async_op=True)
            with self.world.watch.waiting() as wait:
                while not work.is_completed():
                    time.sleep(COLLECTIVE_POLL_S)
                    wait.check()
            work.wait()
        return gathered.view(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Broadcast a tensor on the host from a member, given by its number."""
        if self.size > 1:
            with self.world.explain_peer_failure():
                dist.broadcast(tensor, group_src=rank, group=self.control)


def gather_into(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Call `all_gather_into_tensor`, by its name in this version of PyTorch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=async_op)
