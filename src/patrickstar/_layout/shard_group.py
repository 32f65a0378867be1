"""Groups of processes that share chunks."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardGroup:
    """Processes that share chunks: each owns a shard of every chunk. With several groups each has its own parameters.

    Attributes:
        partition: Ranks of all groups, in the order of their shards. All groups have the same size.
        number: Number of this process's group.
        position: Position of this process in its group.
        replicas: Number of replicas, as HSDP's, that the members form; 1 if all members send to each other alike.
            Members of a replicate group, which own one shard together, follow each other in the order of replicas.
    """

    partition: tuple[tuple[int, ...], ...]
    number: int
    position: int
    replicas: int = 1

    @classmethod
    def of(cls, rank: int, partition: Iterable[Iterable[int]], replicas: int = 1) -> "ShardGroup":
        """Return the group of a process in a partition of all processes."""
        groups = tuple(tuple(ranks) for ranks in partition)
        number = next(number for number, ranks in enumerate(groups) if rank in ranks)
        return cls(groups, number, groups[number].index(rank), replicas)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this process's group."""
        return self.partition[self.number]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def replicate_positions(self) -> range:
        """Positions of the members of this process's replicate group."""
        first = self.position // self.replicas * self.replicas
        return range(first, first + self.replicas)


def largest_group(groups: Iterable[ShardGroup | None]) -> int:
    """Return the size of the largest group of processes that share chunks."""
    return max((group.size for group in groups if group is not None), default=1)
