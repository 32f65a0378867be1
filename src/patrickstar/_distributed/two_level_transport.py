"""Transport of a chunk in two levels: between replicas once per update, and within a replica for every access."""

from collections.abc import Sequence

import torch

from patrickstar._distributed.collectives import Collectives, Levels, sum_dtype
from patrickstar._distributed.process_group import RankGroup
from patrickstar._distributed.transport import OwnShards, Transport, keep_shard
from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._layout.schema import NODE16
from patrickstar._tiers.transfer_counters import TransferCounters

# [Note: two levels of transport]
# HSDP shards a model within each replica (a node) and repeats every update in each replica, which a CPU does not have
# the time for. Here ownership stays over all D = R * S processes, for R replicas of S, and only transport has two
# levels. Part k of a chunk belongs to shard k // R and replica k % R, so a shard's R parts are contiguous. Their owners
# are a replicate group; the processes of a replica are a shard group.
#
# Gathers read `node16`, a copy of the replicate group's shard on the host, and stay inside the replica. The copy is
# stale once parameters have changed: after a step, an in-place write, or when a state is loaded. Then the next gather
# begins with an all-gather of the R parts in the replicate groups. All processes of the data-parallel group take part
# in it, whoever requests the chunk, since they derive it from the same agreement: one of the requests is a `REFRESH`.
# So a process that has yet to apply a change doesn't make the others wait.
#
# Gradients are summed in the replica first, and the partial sums over replicas. See [Note: summation order].


class TwoLevelTransport(Transport):
    """Transport of a chunk whose owners form replicas. See [Note: two levels of transport].

    Args:
        group: The data-parallel group. Member j * S + s has shard s in replica j.
    """

    def __init__(
        self, chunk: ChunkSpec, collectives: Collectives, counters: TransferCounters, group: RankGroup, levels: Levels
    ) -> None:
        super().__init__(chunk, collectives, counters)
        self.group, self.levels = group, levels
        self.stale = True

    def reads_shard(self, ranks: Sequence[int], refresh: bool) -> bool:
        return refresh and bool(self.levels.part_bounds(self.bounds)[-1])

    def gather(
        self, own: OwnShards, whole: torch.Tensor | None, ranks: Sequence[int], refresh: bool
    ) -> Transfer | None:
        shard = self.levels.shard
        if refresh:
            self._refresh(own)
        targets = self._in_replica(ranks)
        if not targets:
            return None
        node = own.chunks[NODE16, self.index]
        mine = node.flat_on_host(0, node.numel)
        if whole is not None:
            self.counters.h2d_bytes += mine.nbytes
        self.counters.gathered_bytes += mine.nbytes * (len(targets) - (whole is not None))
        bounds = self.levels.shard_bounds(self.bounds)
        if whole is not None and len(targets) == shard.size:
            gathering = self.collectives.all_gather(shard, mine, whole, bounds, in_order=True)
        else:
            gathering = self.collectives.gather_to(shard, mine, whole, bounds, targets, in_order=True)
        node.host.reader = gathering
        return gathering

    def _refresh(self, own: OwnShards) -> None:
        """Exchange the parts of this replica's shard with the other replicas."""
        self.stale = False
        node, replicate = own.chunks[NODE16, self.index], self.levels.replicate
        if not node.numel:
            return
        target, bounds = node.flat_on_host(0, node.numel), self.levels.part_bounds(self.bounds)
        part, on_disk = self.own_part(own, self.collectives.shard(target, bounds, replicate.rank))
        node.host.writer = self.collectives.all_gather(replicate, part, target, bounds, in_order=on_disk)
        keep_shard(own, self.index, node.host.writer)
        sent_bytes = part.nbytes * (replicate.size - 1)
        self.counters.gathered_bytes += sent_bytes
        self.counters.inter_replica_gathered_bytes += sent_bytes
        if own.has_gpu:
            self.counters.h2d_bytes += part.nbytes
            self.counters.d2h_bytes += node.nbytes

    def reduce(self, whole: torch.Tensor | None, target: torch.Tensor, ranks: Sequence[int]) -> Transfer:
        shard = self.levels.shard
        members = self._in_replica(ranks)
        replicas = tuple(sorted({rank // shard.size for rank in ranks}))
        own = self.levels.part_bounds(self.bounds)
        if whole is not None:
            self.counters.reduced_bytes += (whole.numel() - own[-1]) * target.dtype.itemsize
        if members:
            sent_bytes = (own[-1] - target.numel()) * sum_dtype(target.dtype).itemsize
            self.counters.reduced_bytes += sent_bytes
            self.counters.inter_replica_reduced_bytes += sent_bytes
        return self.collectives.hierarchical_reduce_scatter(self.levels, whole, target, self.bounds, members, replicas)

    def broadcast(self, tensor: torch.Tensor, position: int) -> None:
        shard, replica = divmod(position, self.levels.replicate.size)
        self.group.broadcast(tensor, replica * self.levels.shard.size + shard)

    def invalidate(self) -> None:
        self.stale = True

    def _in_replica(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers in the shard group of those of these processes that belong to this replica."""
        size, replica = self.levels.shard.size, self.levels.replicate.rank
        return tuple(rank - replica * size for rank in ranks if rank // size == replica)
