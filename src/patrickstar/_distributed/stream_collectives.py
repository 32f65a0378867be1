"""Collectives of an accelerator on a separate stream."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from patrickstar._distributed.collectives import Bounds, Collectives, Levels, finish, sum_dtype
from patrickstar._distributed.process_group import RankGroup, World, gather_into
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.transfer import Transfer
from patrickstar._tiers.copy_streams import StreamTransfer
from patrickstar.errors import PeerError

CHECK_S = 1.0
"""Seconds between checks of the other processes while the host waits for a collective of the device."""


class StreamCollective(StreamTransfer):
    """Collective on a stream. The host waits for it only as long as all processes run."""

    def __init__(self, collectives: "StreamCollectives", event: torch.Event, label: str) -> None:
        super().__init__(collectives.accelerator, event, label)
        self.collectives = collectives

    def wait(self) -> None:
        self.collectives.wait(self.event)

    def cancel(self) -> None:
        """Wait for the end; ignore an error."""
        with suppress(PeerError):
            self.wait()


class StreamCollectives(Collectives):
    """Collectives of an accelerator (NCCL on CUDA) on a separate stream. Not yet run on a GPU."""

    def __init__(self, world: World, accelerator: TorchDevice) -> None:
        super().__init__(world)
        self.accelerator = accelerator
        self.stream = accelerator.new_stream()
        self._checked = 0.0
        """Time of the last check of the other processes."""

    def begin_after(self, read: Transfer) -> None:
        read.wait()

    def all_gather(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds, *, in_order: bool = False
    ) -> Transfer:
        with self._on_stream("an all-gather") as done:
            device = self.accelerator.device
            gathered = whole if whole.device == device else torch.empty_like(whole, device=device)
            part = self.shard(gathered, bounds, group.rank)
            part.copy_(own, non_blocking=True)
            if group.size > 1 and self.even(bounds):
                gather_into(gathered, part, group.data)
            elif group.size > 1:
                dist.broadcast(gathered, group_src=self.owner(bounds), group=group.data)
            if gathered is not whole:
                whole.copy_(gathered, non_blocking=True)
            return done()

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
        with self._on_stream("a gather onto some ranks") as done:
            own = own.to(self.accelerator.device, non_blocking=True)
            if whole is not None:
                self.shard(whole, bounds, group.rank).copy_(own)
            pairs = []
            for rank in range(group.size):
                if rank == group.rank:
                    continue
                if whole is not None and self.shard(whole, bounds, rank).numel():
                    part = self.shard(whole, bounds, rank)
                    pairs.append(dist.P2POp(dist.irecv, part, group=group.data, group_peer=rank))
                if rank in ranks and own.numel():
                    pairs.append(dist.P2POp(dist.isend, own, group=group.data, group_peer=rank))
            if pairs:
                finish(dist.batch_isend_irecv(pairs))
            return done()

    def reduce_scatter(
        self,
        group: RankGroup,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
    ) -> Transfer:
        with self._on_stream("a reduce-scatter") as done:
            own = self._reduce_scatter(group, self._gradients(whole, target, bounds), bounds)
            target.copy_(own, non_blocking=True)
            return done()

    def hierarchical_reduce_scatter(
        self,
        levels: Levels,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        replicas: Sequence[int],
    ) -> Transfer:
        with self._on_stream("a reduce-scatter in two levels") as done:
            gradients = self._gradients(whole, target, bounds)
            partial = self._reduce_scatter(levels.shard, gradients, levels.shard_bounds(bounds))
            partial = partial.to(sum_dtype(target.dtype))
            own = self._reduce_scatter(levels.replicate, partial, levels.part_bounds(bounds))
            target.copy_(own, non_blocking=True)
            return done()

    def _gradients(self, whole: torch.Tensor | None, target: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Return this process's gradients on the device, in the dtype of `target`; zeros if it has none."""
        if whole is None:
            return torch.zeros(bounds[-1], dtype=target.dtype, device=self.accelerator.device)
        return whole.to(self.accelerator.device, target.dtype)

    def _reduce_scatter(self, group: RankGroup, whole: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Sum `whole` over a group in place, and return this process's shard of the sum."""
        own = self.shard(whole, bounds, group.rank)
        if group.size > 1 and self.even(bounds):
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(own, whole, group=group.data)
        elif group.size > 1:
            dist.reduce(whole, group_dst=self.owner(bounds), group=group.data)
        return own

    def close(self) -> None:
        with suppress(PeerError):
            self.wait(self.accelerator.record(self.stream))

    def wait(self, event: torch.Event) -> None:
        """Block the calling thread until an event has passed. Raises PeerError if a process has ended meanwhile.

        A kernel that waits for a process that has ended would never end, so the collectives are aborted then.
        """
        if self.world.aborted:
            raise self.world.explain_failure(RuntimeError("the collectives of this device were aborted"))
        self.accelerator.wait(event, self._check_processes)

    def _check_processes(self) -> None:
        now = time.monotonic()
        if now < self._checked + CHECK_S:
            return
        self._checked = now
        if self.world.has_lost_process():
            error = self.world.explain_failure(RuntimeError("a collective of the device waits for it"))
            self.world.abort_data()
            raise error

    @contextmanager
    def _on_stream(self, label: str) -> Iterator[Callable[[], Transfer]]:
        """Launch on the stream, ordered after the current one; yield a function that returns the transfer."""
        with self.accelerator.use(self.stream):
            yield lambda: StreamCollective(self, self.accelerator.record(), label)
