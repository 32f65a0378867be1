"""Collectives on chunks, on a worker thread (CPU) or a separate stream (GPU)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from patrickstar._distributed.process_group import World, explain_peer_failure
from patrickstar._distributed.rank_group import RankGroup, gather_into
from patrickstar._memory.accelerator import Accelerator
from patrickstar._memory.copy_streams import StreamTransfer
from patrickstar._memory.direct_io import PAGE_BYTES
from patrickstar._memory.transfer import CompletedTransfer, Transfer
from patrickstar._memory.worker_pool import Job, WorkerPool
from patrickstar.errors import MoveError, PeerError

# [Note: summation order]
# With gloo, gradients are sent in their own dtype; each owner sums its shard in fp32 (fp64 for fp64), from +0, in rank
# order, and rounds once. gloo's own reduce-scatter sends everything twice and rounds at every hop: with two processes
# 2.00 times the bytes, measured on the loopback device. On an accelerator it is `reduce_scatter_tensor`, with the order
# and rounding of NCCL or its counterpart. In both cases the optimizer step divides the sum by the number of processes
# in fp32.

CHECK_S = 1.0
"""Seconds between checks of the other processes while the host waits for a collective of the device."""

Bounds = tuple[int, ...]
"""Start of each process's shard, in elements, and the end of the last."""


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
    def all_gather(self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds) -> Transfer:
        """All-gather the processes' shards, which may be on the host, into `whole`."""

    @abstractmethod
    def gather_to(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor | None, bounds: Bounds, ranks: Sequence[int]
    ) -> Transfer:
        """Gather the shards into `whole` on these ranks; the other ranks only send."""

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
    def close(self) -> None:
        """Stop; no collective may be started afterwards."""

    @staticmethod
    def even(bounds: Bounds) -> bool:
        """Return True if all shards have the same size."""
        return len(set(_sizes(bounds))) == 1

    @staticmethod
    def owner(bounds: Bounds) -> int:
        """Return the rank of the only process with a non-empty shard."""
        return next(rank for rank, size in enumerate(_sizes(bounds)) if size)


class CollectiveTransfer(Transfer):
    """Collective on the worker thread, never reordered or cancelled: the other processes have started it, too."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.label = inner.label

    @property
    def done(self) -> bool:
        return self.inner.done

    def wait(self) -> None:
        self.inner.wait()

    def prioritize(self) -> None:
        """Do nothing: collectives keep their order."""

    def cancel(self) -> None:
        """Wait for the end; ignore an error."""
        with suppress(MoveError):
            self.inner.wait()


class GlooCollectives(Collectives):
    """Collectives over gloo on a worker thread. See [Note: summation order]."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._thread = WorkerPool(1, "peers", PAGE_BYTES)

    def all_gather(self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds) -> Transfer:
        part = self.shard(whole, bounds, group.rank)
        part.copy_(own)
        if group.size == 1:
            return CompletedTransfer("a copy of the only shard")
        if not self.even(bounds):
            owner = self.owner(bounds)
            return self._submit(lambda _: dist.broadcast(whole, group_src=owner, group=group.data), "a broadcast")
        return self._submit(lambda _: gather_into(whole, part, group.data), "an all-gather")

    def gather_to(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor | None, bounds: Bounds, ranks: Sequence[int]
    ) -> Transfer:
        if whole is not None:
            self.shard(whole, bounds, group.rank).copy_(own)
        return self._submit(lambda _: self._gather_to(group, own, whole, bounds, ranks), "a gather onto some ranks")

    def reduce_scatter(
        self,
        group: RankGroup,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
    ) -> Transfer:
        return self._submit(
            lambda stage: self._reduce_scatter(group, whole, target, bounds, ranks, stage), "a reduce-scatter"
        )

    def close(self) -> None:
        self._thread.close()

    def _submit(self, job: Job, label: str) -> Transfer:
        def run(stage: torch.Tensor) -> None:
            with explain_peer_failure(self.world):
                job(stage)

        return CollectiveTransfer(self._thread.submit([run], label))

    def _gather_to(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor | None, bounds: Bounds, ranks: Sequence[int]
    ) -> None:
        works: list[Any] = []
        peers = [rank for rank in range(group.size) if rank != group.rank]
        if whole is not None:
            works += [self._receive_tensor(group, self.shard(whole, bounds, rank), rank) for rank in peers]
        works += [self._send_tensor(group, own, rank) for rank in peers if rank in ranks]
        _finish(works)

    def _reduce_scatter(
        self,
        group: RankGroup,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        stage: torch.Tensor,
    ) -> None:
        """Reduce piece by piece, so that the received pieces fit in the thread's staging buffer."""
        me, size = group.rank, group.size
        sources = [rank for rank in ranks if rank != me]
        sum_dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        dtype = target.dtype
        length = max(1, PAGE_BYTES // max(1, size - 1) // dtype.itemsize // 64 * 64)
        sizes = _sizes(bounds)
        for first in range(0, max(sizes), length):
            pieces = [slice(min(first, n), min(first + length, n)) for n in sizes]
            works: list[Any] = []
            mine = pieces[me].stop - pieces[me].start
            received = {rank: stage.view(dtype)[k * length :][:mine] for k, rank in enumerate(sources)}
            works += [self._receive_tensor(group, received[rank], rank) for rank in sources]
            if whole is not None:
                sent = {rank: self.shard(whole, bounds, rank)[pieces[rank]].to(dtype) for rank in range(size)}
                works += [self._send_tensor(group, sent[rank], rank) for rank in range(size) if rank != me]
            _finish(works)
            total = torch.zeros(mine, dtype=sum_dtype, device="cpu")
            for rank in ranks:
                if rank != me:
                    total += received[rank]
                elif whole is not None:
                    total += sent[me]
            target[pieces[me]] = total.to(target.dtype)

    def _send_tensor(self, group: RankGroup, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, group_dst=rank, group=group.data) if tensor.numel() else None

    def _receive_tensor(self, group: RankGroup, tensor: torch.Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group_src=rank, group=group.data) if tensor.numel() else None


def _sizes(bounds: Bounds) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds)]


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


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

    def __init__(self, world: World, accelerator: Accelerator) -> None:
        super().__init__(world)
        self.accelerator = accelerator
        self.stream = accelerator.new_stream()
        self._checked = 0.0
        """Time of the last check of the other processes."""

    def all_gather(self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds) -> Transfer:
        with self._on_stream("an all-gather") as done:
            part = self.shard(whole, bounds, group.rank)
            part.copy_(own, non_blocking=True)
            if group.size > 1 and self.even(bounds):
                gather_into(whole, part, group.data)
            elif group.size > 1:
                dist.broadcast(whole, group_src=self.owner(bounds), group=group.data)
            return done()

    def gather_to(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor | None, bounds: Bounds, ranks: Sequence[int]
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
                _finish(dist.batch_isend_irecv(pairs))
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
            if whole is None:
                whole = torch.zeros(bounds[-1], dtype=target.dtype, device=self.accelerator.device)
            else:
                whole = whole.to(self.accelerator.device, target.dtype)
            if group.size > 1 and self.even(bounds):
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(self.shard(whole, bounds, group.rank), whole, group=group.data)
            elif group.size > 1:
                dist.reduce(whole, group_dst=self.owner(bounds), group=group.data)
            target.copy_(self.shard(whole, bounds, group.rank), non_blocking=True)
            return done()

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


def collectives(world: World, accelerator: Accelerator | None) -> Collectives:
    return GlooCollectives(world) if accelerator is None else StreamCollectives(world, accelerator)
