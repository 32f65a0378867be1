"""Transports of all chunks of one engine."""

from collections.abc import Iterable

from patrickstar._distributed.collectives import Collectives, Levels
from patrickstar._distributed.process_group import RankGroup
from patrickstar._distributed.transport import FlatTransport, Transport
from patrickstar._distributed.two_level_transport import TwoLevelTransport
from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._tiers.transfer_counters import TransferCounters
from patrickstar.errors import ConfigError


class Transports(dict[int, Transport]):
    """Transport of each chunk, by chunk index.

    Args:
        coordinating: The data-parallel group.
        levels: Levels of transport in this group, if it consists of replicas.
    """

    def __init__(self, coordinating: RankGroup, collectives: Collectives, levels: Levels | None) -> None:
        super().__init__()
        self.coordinating, self.collectives, self.levels = coordinating, collectives, levels
        self.counters = TransferCounters()
        """Counters of sent bytes; shared with the chunk manager."""

    def register(self, chunks: Iterable[ChunkSpec]) -> None:
        """Record the owners of the shards of new chunks. Every process of the world must call this.

        Raises:
            ConfigError: The owners are not in one data-parallel group.
        """
        for chunk in chunks:
            if chunk.index not in self:
                self[chunk.index] = self._transport(chunk)

    def invalidate(self, indices: Iterable[int]) -> None:
        """Note that owners have changed parameters of these chunks."""
        for index in indices:
            self[index].invalidate()

    def _transport(self, chunk: ChunkSpec) -> Transport:
        assert chunk.group is not None, "with several processes every chunk is sharded"
        coordinating, common = self.coordinating, (chunk, self.collectives, self.counters)
        if not set(chunk.group.ranks) <= set(coordinating.ranks):
            raise ConfigError(
                f"parameter {chunk.params[0]!r} is held by processes {', '.join(map(str, chunk.group.ranks))}, which "
                f"are not in one data-parallel group ({', '.join(map(str, coordinating.ranks))}): shard it over "
                f"dimensions of the mesh that ps.initialize was given"
            )
        if chunk.group.replicas > 1:
            assert self.levels is not None, "only a mesh with replicas divides the owners into replicas"
            return TwoLevelTransport(*common, coordinating, self.levels)
        group = self.collectives.world.group(chunk.group.partition)
        members = tuple(coordinating.ranks.index(rank) for rank in group.ranks)
        size = coordinating.size if self.levels is None else self.levels.shard.size
        own = coordinating.rank // size
        elsewhere = tuple(number for number, member in enumerate(members) if member // size != own)
        return FlatTransport(*common, group, members, elsewhere)
