"""Transport of one chunk between the processes that share it: who sends which shards to whom."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from patrickstar._distributed.collectives import Collectives, shard_sizes
from patrickstar._distributed.process_group import RankGroup
from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._layout.schema import SHARD16
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.transfer_counters import TransferCounters


class OwnShards(NamedTuple):
    """Chunks of this process, with its shards; `has_gpu`: an accelerator reads those on the host beside it.

    `start_read` starts to read a shard on disk into other memory, `ensure_in_memory` moves one to memory.
    """

    chunks: Mapping[tuple[str, int], Chunk]
    has_gpu: bool
    start_read: Callable[[Chunk, torch.Tensor], Transfer]
    ensure_in_memory: Callable[[Chunk], None]


class Transport(ABC):
    """Starts the gathers and reductions of one chunk, and counts the bytes that this process sends.

    Ranks of gathers and reductions are numbers in the data-parallel group that coordinates.
    """

    stale = False
    """True if the replicas have to exchange shards before the next gather, since parameters have changed."""
    alone = False
    """True if this process is the only owner, and no other takes part in gathers and reductions."""

    def __init__(self, chunk: ChunkSpec, collectives: Collectives, counters: TransferCounters) -> None:
        self.index, self.bounds = chunk.index, chunk.shard_bounds
        self.collectives, self.counters = collectives, counters

    @abstractmethod
    def reads_shard(self, ranks: Sequence[int], refresh: bool) -> bool:
        """Return whether a gather reads this process's `param16` shard, which then has to hold the parameters."""

    @abstractmethod
    def gather(
        self, own: OwnShards, whole: torch.Tensor | None, ranks: Sequence[int], refresh: bool
    ) -> Transfer | None:
        """Start to gather the chunk on these ranks, on this one into `whole`.

        Return the transfer, None if nothing is gathered here. `refresh`: let the replicas exchange shards first.
        """

    def own_part(self, own: OwnShards, place: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """Return this process's shard; True if the next collective reads it from disk first, into `place`.

        `place`: part of the gathered chunk that the shard belongs to, if this process gathers it.
        """
        shard = own.chunks[SHARD16, self.index]
        if place is not None and shard.numel and not shard.in_memory:
            self.collectives.begin_after(own.start_read(shard, place))
            return place, True
        own.ensure_in_memory(shard)
        return shard.current(shard.whole), False

    @abstractmethod
    def reduce(self, whole: torch.Tensor | None, target: torch.Tensor, ranks: Sequence[int]) -> Transfer:
        """Start to sum the gradients `whole` of these ranks; `target` gets this process's shard of the sum."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, position: int) -> None:
        """Broadcast a tensor on the host from the owner of a shard, given by its position, to all owners."""

    @abstractmethod
    def invalidate(self) -> None:
        """Note that owners have changed parameters of the chunk."""

    def assemble(self, flat: torch.Tensor, offset: int) -> None:
        """Broadcast each owner's part of `flat`, elements on the host that begin at `offset` in the chunk."""
        end = offset + flat.numel()
        for position, (first, last) in enumerate(pairwise(self.bounds)):
            if max(first, offset) < min(last, end):
                self.broadcast(flat[max(first, offset) - offset : min(last, end) - offset], position)


class FlatTransport(Transport):
    """Transport in which each owner sends its shard to every process, and receives its gradients from every process.

    Args:
        group: Owners of the shards.
        members: Their numbers in the data-parallel group.
        elsewhere: Numbers in `group` of the owners in other replicas.
    """

    def __init__(
        self,
        chunk: ChunkSpec,
        collectives: Collectives,
        counters: TransferCounters,
        group: RankGroup,
        members: tuple[int, ...],
        elsewhere: tuple[int, ...] = (),
    ) -> None:
        super().__init__(chunk, collectives, counters)
        self.group, self.members, self.elsewhere = group, members, elsewhere
        self.alone = group.size == 1

    def reads_shard(self, ranks: Sequence[int], refresh: bool) -> bool:
        return bool(self._among(ranks))

    def gather(
        self, own: OwnShards, whole: torch.Tensor | None, ranks: Sequence[int], refresh: bool
    ) -> Transfer | None:
        group, bounds, targets = self.group, self.bounds, self._among(ranks)
        if not targets:
            return None
        place = None if whole is None else self.collectives.shard(whole, bounds, group.rank)
        part, on_disk = self.own_part(own, place)
        if whole is not None and not own.chunks[SHARD16, self.index].device.valid:
            self.counters.h2d_bytes += part.nbytes
        self.counters.gathered_bytes += part.nbytes * (len(targets) - (whole is not None))
        self.counters.inter_replica_gathered_bytes += part.nbytes * len(set(targets) & set(self.elsewhere))
        if whole is not None and len(targets) == group.size:
            gathering = self.collectives.all_gather(group, part, whole, bounds, in_order=on_disk)
            keep_shard(own, self.index, gathering)
        else:
            gathering = self.collectives.gather_to(group, part, whole, bounds, targets, in_order=on_disk)
            gathering.wait()  # the source may change as soon as this process continues
        return gathering

    def reduce(self, whole: torch.Tensor | None, target: torch.Tensor, ranks: Sequence[int]) -> Transfer:
        if whole is not None:
            sizes, itemsize = shard_sizes(self.bounds), target.dtype.itemsize
            self.counters.reduced_bytes += (whole.numel() - target.numel()) * itemsize
            self.counters.inter_replica_reduced_bytes += sum(sizes[number] for number in self.elsewhere) * itemsize
        return self.collectives.reduce_scatter(self.group, whole, target, self.bounds, self._among(ranks))

    def broadcast(self, tensor: torch.Tensor, position: int) -> None:
        self.group.broadcast(tensor, position)

    def invalidate(self) -> None:
        """Do nothing: each gather reads the owners' shards."""

    def _among(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers in `group` of those processes that are numbered `ranks` in the data-parallel group."""
        return tuple(number for number, member in enumerate(self.members) if member in ranks)


def keep_shard(own: OwnShards, index: int, reader: Transfer) -> None:
    """Keep the `param16` shard of a chunk, if the device reads it on the host, unchanged until `reader` has ended."""
    shard = own.chunks[SHARD16, index]
    if shard.host.valid and not shard.device.valid and own.has_gpu:
        shard.host.reader = reader
