"""Collectives over gloo, on a worker thread."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from patrickstar._distributed.collectives import Bounds, Collectives, Levels, finish, shard_sizes, sum_dtype
from patrickstar._distributed.process_group import RankGroup, World, explain_peer_failure, gather_into
from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.job_queue import Job
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar.errors import MoveError


class CollectiveTransfer(Transfer):
    """Collective on the worker thread, never reordered or cancelled: the other processes have started it, too."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.label = inner.label

    @property
    def done(self) -> bool:
        return self.inner.done

    def interval(self, clock: DeviceClock | None) -> tuple[float, float] | None:
        """Return when it began and ended in the worker thread."""
        return self.inner.interval(clock)

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
        self._after: Transfer | None = None
        """Read from disk that the next collective waits for."""

    def begin_after(self, read: Transfer) -> None:
        self._after = read

    def all_gather(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds, *, in_order: bool = False
    ) -> Transfer:
        part = self.shard(whole, bounds, group.rank)
        if not in_order:
            part.copy_(own)
            if group.size == 1:
                return CompletedTransfer("a copy of the only shard")

        def job(stage: torch.Tensor) -> None:
            if in_order:
                part.copy_(own)
            if group.size > 1 and self.even(bounds):
                gather_into(whole, part, group.data)
            elif group.size > 1:
                dist.broadcast(whole, group_src=self.owner(bounds), group=group.data)

        return self._submit(job, "an all-gather" if self.even(bounds) else "a broadcast")

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
        if whole is not None and not in_order:
            self.shard(whole, bounds, group.rank).copy_(own)

        def job(stage: torch.Tensor) -> None:
            if whole is not None and in_order:
                self.shard(whole, bounds, group.rank).copy_(own)
            self._gather_to(group, own, whole, bounds, ranks)

        return self._submit(job, "a gather onto some ranks")

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

    def hierarchical_reduce_scatter(
        self,
        levels: Levels,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        replicas: Sequence[int],
    ) -> Transfer:
        return self._submit(
            lambda stage: self._reduce_in_levels(levels, whole, target, bounds, ranks, replicas, stage),
            "a reduce-scatter in two levels",
        )

    def close(self) -> None:
        self._thread.close()

    def _submit(self, job: Job, label: str) -> Transfer:
        after, self._after = self._after, None

        def run(stage: torch.Tensor) -> None:
            if after is not None:
                after.wait()
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
        finish(works)

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
        dtype, sizes = target.dtype, shard_sizes(bounds)
        length = _piece_numel(stage, max(1, group.size - 1) * dtype.itemsize)
        for first in range(0, max(sizes), length):
            pieces = _pieces(bounds, first, length)
            sent = None if whole is None else [whole[piece].to(dtype) for piece in pieces]
            own = slice(min(first, sizes[group.rank]), min(first + length, sizes[group.rank]))
            total = torch.zeros(own.stop - own.start, dtype=sum_dtype(dtype), device="cpu")
            self._add_pieces(group, sent, ranks, stage.view(dtype), total)
            target[own] = total.to(dtype)

    def _reduce_in_levels(
        self,
        levels: Levels,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        replicas: Sequence[int],
        stage: torch.Tensor,
    ) -> None:
        """Reduce piece by piece, so that received pieces and partial sums fit in the thread's staging buffer."""
        (shard, replicate), dtype, wide = levels, target.dtype, sum_dtype(target.dtype)
        count, sizes = replicate.size, shard_sizes(bounds)
        first_own = shard.rank * count
        element_bytes = (2 * count - 1) * wide.itemsize + (shard.size - 1) * dtype.itemsize
        length = _piece_numel(stage, element_bytes)
        partials, others, rest = stage[: length * element_bytes].split(
            [
                length * count * wide.itemsize,
                length * (count - 1) * wide.itemsize,
                length * (shard.size - 1) * dtype.itemsize,
            ]
        )
        for first in range(0, max(sizes), length):
            pieces = _pieces(bounds, first, length)
            sums = []
            for replica in range(count if ranks else 0):
                numel = pieces[first_own + replica].stop - pieces[first_own + replica].start
                sums.append(partials.view(wide)[replica * length :][:numel].zero_())
                sent = None if whole is None else [whole[piece].to(dtype) for piece in pieces[replica::count]]
                self._add_pieces(shard, sent, ranks, rest.view(dtype), sums[-1])
            size = sizes[first_own + replicate.rank]
            own = slice(min(first, size), min(first + length, size))
            total = torch.zeros(own.stop - own.start, dtype=wide, device="cpu")
            self._add_pieces(replicate, sums or None, replicas, others.view(wide), total)
            target[own] = total.to(dtype)

    def _add_pieces(
        self,
        group: RankGroup,
        sent: Sequence[torch.Tensor] | None,
        ranks: Sequence[int],
        buffer: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """Exchange pieces, and add those for this process to `total`, in the order of `ranks`, which send them.

        `sent` holds this process's pieces for all members, None if it sends none; `buffer` has room for received ones.
        """
        numel, peers = total.numel(), [rank for rank in ranks if rank != group.rank]
        received = {rank: buffer[number * numel :][:numel] for number, rank in enumerate(peers)}
        works = [self._receive_tensor(group, received[rank], rank) for rank in peers]
        if sent is not None:
            works += [self._send_tensor(group, sent[rank], rank) for rank in range(group.size) if rank != group.rank]
        finish(works)
        for rank in ranks:
            if rank != group.rank:
                total += received[rank]
            elif sent is not None:
                total += sent[rank]

    def _send_tensor(self, group: RankGroup, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, group_dst=rank, group=group.data) if tensor.numel() else None

    def _receive_tensor(self, group: RankGroup, tensor: torch.Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group_src=rank, group=group.data) if tensor.numel() else None


def _piece_numel(stage: torch.Tensor, element_bytes: int) -> int:
    """Return the elements of a piece that needs so many bytes of the staging buffer per element."""
    return max(1, stage.numel() // element_bytes // 64 * 64)


def _pieces(bounds: Bounds, first: int, length: int) -> list[slice]:
    """Return up to `length` elements of each shard, from its element `first` on."""
    return [slice(min(begin + first, end), min(begin + first + length, end)) for begin, end in pairwise(bounds)]
