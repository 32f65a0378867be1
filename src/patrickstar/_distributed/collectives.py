"""Collectives on chunks: gather, send, reduce. On a CPU a thread runs them beside what computes, on a GPU a stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from patrickstar._distributed.process_group import World, gather_into
from patrickstar._memory.copy_streams import StreamTransfer
from patrickstar._memory.swap_file import PAGE_BYTES
from patrickstar._memory.worker_pool import Job, Transfer, WorkerPool
from patrickstar.errors import MoveError

# [Note: the order of sums]
# With gloo, gradients cross in their own dtype, and each owner adds up its part in fp32 (fp64 for fp64), from +0, rank
# after rank, and rounds once. gloo's own reduce-scatter sends everything twice and rounds at every hop: with two
# processes 2.00 times the bytes, measured on the loopback device. With NCCL it is `reduce_scatter_tensor`, whose order
# and rounding are NCCL's. Either way the sum is divided by the number of processes in fp32, by the update.

Cuts = tuple[int, ...]
"""Where the parts of the processes begin, in elements, and the end."""


class Collectives(ABC):
    """Begins collectives; all processes begin the same ones in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world

    def part(self, whole: torch.Tensor, shard_bounds: Cuts, rank: int | None = None) -> torch.Tensor:
        """The part of one process, by default this one's."""
        rank = self.world.rank if rank is None else rank
        return whole[shard_bounds[rank] : shard_bounds[rank + 1]]

    @abstractmethod
    def gather(self, whole: torch.Tensor, shard_bounds: Cuts) -> Transfer:
        """Have all parts everywhere; each process has put its own in place."""

    @abstractmethod
    def send(self, own: torch.Tensor, whole: torch.Tensor | None, shard_bounds: Cuts, ranks: Sequence[int]) -> Transfer:
        """Have all parts in `whole` with these ranks, which have put their own in place; the others only send."""

    @abstractmethod
    def reduce(
        self, whole: torch.Tensor | None, target: torch.Tensor, shard_bounds: Cuts, ranks: Sequence[int]
    ) -> Transfer:
        """Add up what these ranks have; each process finds its part in `target`, in that one's dtype."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is begun."""

    @staticmethod
    def even(shard_bounds: Cuts) -> bool:
        """Whether all parts are of one size."""
        return len(set(_sizes(shard_bounds))) == 1

    @staticmethod
    def owner(shard_bounds: Cuts) -> int:
        """The rank of the one process whose part is not empty."""
        return next(rank for rank, size in enumerate(_sizes(shard_bounds)) if size)


class CollectiveTransfer(Transfer):
    """A collective on the thread. It is neither hastened nor dropped: the others have begun it too."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.label = inner.label

    @property
    def done(self) -> bool:
        return self.inner.done

    def wait(self) -> None:
        self.inner.wait()

    def prioritize(self) -> None:
        """Collectives keep their order."""

    def cancel(self) -> None:
        """It ends, well or not."""
        try:
            self.inner.wait()
        except MoveError:
            return


class GlooCollectives(Collectives):
    """Over gloo, by a thread. See [Note: the order of sums]."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._thread = WorkerPool(1, "peers", PAGE_BYTES)

    def gather(self, whole: torch.Tensor, shard_bounds: Cuts) -> Transfer:
        if not self.even(shard_bounds):
            return self._begin(partial(self._broadcast, whole, self.owner(shard_bounds)), "a broadcast")
        return self._begin(partial(self._gather, whole, self.part(whole, shard_bounds)), "a gather")

    def send(self, own: torch.Tensor, whole: torch.Tensor | None, shard_bounds: Cuts, ranks: Sequence[int]) -> Transfer:
        return self._begin(partial(self._send, own, whole, shard_bounds, ranks), "a gather by some")

    def reduce(
        self, whole: torch.Tensor | None, target: torch.Tensor, shard_bounds: Cuts, ranks: Sequence[int]
    ) -> Transfer:
        return self._begin(partial(self._reduce, whole, target, shard_bounds, ranks), "a reduction")

    def close(self) -> None:
        self._thread.close()

    def _begin(self, job: Job, what: str) -> Transfer:
        def run(stage: torch.Tensor) -> None:
            try:
                job(stage)
            except (RuntimeError, dist.DistError) as error:
                raise self.world.explain_failure(error) from error

        return CollectiveTransfer(self._thread.submit([run], what))

    def _gather(self, whole: torch.Tensor, part: torch.Tensor, stage: torch.Tensor) -> None:
        gather_into(whole, part, self.world.data)

    def _broadcast(self, whole: torch.Tensor, owner: int, stage: torch.Tensor) -> None:
        dist.broadcast(whole, group_src=owner, group=self.world.data)

    def _send(
        self,
        own: torch.Tensor,
        whole: torch.Tensor | None,
        shard_bounds: Cuts,
        ranks: Sequence[int],
        stage: torch.Tensor,
    ) -> None:
        works: list[Any] = []
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        if whole is not None:
            works += [self._receive_tensor(self.part(whole, shard_bounds, rank), rank) for rank in others]
        works += [self._send_tensor(own, rank) for rank in others if rank in ranks]
        _finish(works)

    def _reduce(
        self,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        shard_bounds: Cuts,
        ranks: Sequence[int],
        stage: torch.Tensor,
    ) -> None:
        """A piece at a time, so that what the others send has room in the thread's page."""
        me, size = self.world.rank, self.world.size
        sources = [rank for rank in ranks if rank != me]
        total = torch.float64 if target.dtype == torch.float64 else torch.float32
        dtype = target.dtype
        length = max(1, PAGE_BYTES // max(1, size - 1) // dtype.itemsize // 64 * 64)
        sizes = _sizes(shard_bounds)
        for first in range(0, max(sizes), length):
            pieces = [slice(min(first, n), min(first + length, n)) for n in sizes]
            works: list[Any] = []
            mine = pieces[me].stop - pieces[me].start
            room = {rank: stage.view(dtype)[k * length :][:mine] for k, rank in enumerate(sources)}
            works += [self._receive_tensor(room[rank], rank) for rank in sources]
            if whole is not None:
                theirs = {rank: self.part(whole, shard_bounds, rank)[pieces[rank]].to(dtype) for rank in range(size)}
                works += [self._send_tensor(theirs[rank], rank) for rank in range(size) if rank != me]
            _finish(works)
            added = torch.zeros(mine, dtype=total, device="cpu")
            for rank in ranks:
                if rank != me:
                    added += room[rank]
                elif whole is not None:
                    added += theirs[me]
            target[pieces[me]] = added.to(target.dtype)

    def _send_tensor(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, group_dst=rank, group=self.world.data) if tensor.numel() else None

    def _receive_tensor(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group_src=rank, group=self.world.data) if tensor.numel() else None


def _sizes(shard_bounds: Cuts) -> list[int]:
    return [end - begin for begin, end in pairwise(shard_bounds)]


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


class NcclCollectives(Collectives):
    """Over NCCL, on a stream beside the one that computes. It has not run on a GPU yet."""

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world)
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def gather(self, whole: torch.Tensor, shard_bounds: Cuts) -> Transfer:
        with self._beside("a gather over NCCL") as done:
            if self.even(shard_bounds):
                gather_into(whole, self.part(whole, shard_bounds), self.world.data)
            else:
                dist.broadcast(whole, group_src=self.owner(shard_bounds), group=self.world.data)
            return done()

    def send(self, own: torch.Tensor, whole: torch.Tensor | None, shard_bounds: Cuts, ranks: Sequence[int]) -> Transfer:
        with self._beside("a send over NCCL") as done:
            own = own.to(self.device, non_blocking=True)
            pairs = []
            for rank in range(self.world.size):
                if rank == self.world.rank:
                    continue
                if whole is not None and self.part(whole, shard_bounds, rank).numel():
                    part = self.part(whole, shard_bounds, rank)
                    pairs.append(dist.P2POp(dist.irecv, part, group=self.world.data, group_peer=rank))
                if rank in ranks and own.numel():
                    pairs.append(dist.P2POp(dist.isend, own, group=self.world.data, group_peer=rank))
            if pairs:
                _finish(dist.batch_isend_irecv(pairs))
            return done()

    def reduce(
        self, whole: torch.Tensor | None, target: torch.Tensor, shard_bounds: Cuts, ranks: Sequence[int]
    ) -> Transfer:
        with self._beside("a reduction over NCCL") as done:
            if whole is None:
                whole = torch.zeros(shard_bounds[-1], dtype=target.dtype, device=self.device)
            else:
                whole = whole.to(self.device, target.dtype)
            if self.even(shard_bounds):
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(self.part(whole, shard_bounds), whole, group=self.world.data)
            else:
                dist.reduce(whole, group_dst=self.owner(shard_bounds), group=self.world.data)
            target.copy_(self.part(whole, shard_bounds), non_blocking=True)
            return done()

    def close(self) -> None:
        self.stream.synchronize()

    @contextmanager
    def _beside(self, what: str) -> Iterator[Callable[[], Transfer]]:
        """Inside, what is launched comes after what computes now, on the stream. Gives what says when it has ended."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield lambda: StreamTransfer(self.stream.record_event(), self.device, what)


def collectives(world: World, device: torch.device) -> Collectives:
    """Those of a device."""
    return NcclCollectives(world, device) if device.type == "cuda" else GlooCollectives(world)
