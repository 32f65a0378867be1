"""Communication of one engine with other processes: gathers and reductions of chunks, in coordination steps."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Coordinator
from patrickstar._distributed.rank_group import RankGroup
from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.profiler_range import profiler_range
from patrickstar._memory.transfer import CompletedTransfer, Transfer
from patrickstar._memory.transfer_counters import TransferCounters
from patrickstar._schedule.coordination import Agreement, Request
from patrickstar.errors import ConfigError, PeerError


class ShardOwner(Protocol):
    """Owner of this process's shards of chunks."""

    def parameters(self, index: int) -> torch.Tensor:
        """Return the `param16` shard of a chunk that this process owns, on its current tier."""

    def keep_parameters(self, index: int, reader: Transfer) -> None:
        """Keep the `param16` shard of a chunk unchanged until `reader` has ended."""

    def begin_reduction(self, index: int, contributes: bool) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Prepare the reduction of a chunk's gradients.

        Return this process's gradients of the whole chunk, zero where missing (None if it contributes none); the target
        for the sum of its shard; and the chunk that holds the target.
        """


class Shards(NamedTuple):
    """Shards of one chunk: the processes that own them, and the first element of each and the end of the last.

    `members` are the owners' numbers in the data-parallel group that coordinates.
    """

    group: RankGroup
    bounds: tuple[int, ...]
    members: tuple[int, ...]

    def among(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers in `group` of those processes that are numbered `ranks` in the data-parallel group."""
        return tuple(number for number, member in enumerate(self.members) if member in ranks)


class PendingReduction(Transfer):
    """Reduction of a chunk's gradients, which starts once the processes have agreed on it."""

    def __init__(self, comm: "ChunkComm", chunk: Chunk) -> None:
        self.label = f"gradients of {chunk}"
        self.comm = comm
        self.chunk = chunk
        self.collective: Transfer | None = None

    @property
    def started(self) -> bool:
        return self.collective is not None

    @property
    def done(self) -> bool:
        return self.collective is not None and self.collective.done

    def wait(self) -> None:
        while self.collective is None:
            self.comm.negotiate(Request.MEMORY)
        self.collective.wait()

    def prioritize(self) -> None:
        """Do nothing: `wait` negotiates the reduction."""

    def cancel(self) -> None:
        """Withdraw the request, or wait for a reduction that has started."""
        if self.collective is None:
            self.comm.cancel_reduction(self.chunk.index)
        else:
            self.collective.cancel()


class ChunkComm:
    """Communication of one engine with the other processes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.world = coordinator.world
        self.collectives = coordinator.collectives
        self.shards: dict[int, Shards] = {}
        """Owners of each chunk's shards, by chunk index."""
        self.counters = TransferCounters()
        """Counters of sent bytes; shared with the chunk manager."""
        self._pending: dict[int, PendingReduction] = {}
        """Requested reductions that have not started, by chunk index."""
        self._left = False
        self._gather_target: Chunk | None = None
        self._gathering: Transfer | None = None

    def attach(self, owner: ShardOwner) -> None:
        """Join the coordination steps; requests of other processes read and write the shards of `owner`."""
        self._owner = owner
        self.number = self.coordinator.join(self)
        self.world.users += 1

    def register(self, chunks: Iterable[ChunkSpec]) -> None:
        """Record the owners of the shards of new chunks. Every process of the world must call this.

        Raises:
            ConfigError: The owners are not in one data-parallel group.
        """
        coordinating = self.coordinator.group.ranks
        for chunk in chunks:
            assert chunk.group is not None, "with several processes every chunk is sharded"
            group = self.world.group(chunk.group.partition)
            if not set(group.ranks) <= set(coordinating):
                raise ConfigError(
                    f"parameter {chunk.params[0]!r} is held by processes {', '.join(map(str, group.ranks))}, which are "
                    f"not in one data-parallel group ({', '.join(map(str, coordinating))}): shard it over dimensions "
                    f"of the mesh that ps.initialize was given"
                )
            self.shards[chunk.index] = Shards(
                group, chunk.shard_bounds, tuple(coordinating.index(rank) for rank in group.ranks)
            )

    @property
    def serving(self) -> bool:
        """True while an agreement is executed; no negotiation is possible then."""
        return self.coordinator.serving

    def gather(self, chunk: Chunk) -> Transfer:
        self._gather_target, self._gathering = chunk, None
        chunk.pins += 1  # serving other processes meanwhile must not evict it
        try:
            if self.shards[chunk.index].group.size == 1:
                self.start_gather(chunk.index, self.shards[chunk.index].members)
            while self._gathering is None:
                self.negotiate(Request.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._gather_target = self._gathering = None

    def request_reduction(self, chunk: Chunk) -> Transfer:
        """Request the reduction of a chunk's gradients, once those of the other processes are ready."""
        reduction = self._pending[chunk.index] = PendingReduction(self, chunk)
        if self.shards[chunk.index].group.size == 1:
            self.start_reduction(chunk.index, self.shards[chunk.index].members)
            return reduction
        self.coordinator.ready.add(self._global_index(chunk.index))
        self.negotiate(Request.NOTHING)
        return reduction

    def cancel_reduction(self, index: int) -> None:
        """Withdraw the reduction of a chunk's gradients, unless it has started."""
        withdrawn = self._unmark_ready(index)
        if withdrawn is not None:
            withdrawn.collective = CompletedTransfer("nothing")

    def synchronize_processes(self, request: Request) -> None:
        """Wait until all processes make the same request; the reduction of all ready gradients has started then."""
        while not self.negotiate(request).synchronized:
            pass

    def negotiate(self, request: Request, index: int = -1) -> Agreement:
        if self._left:
            raise PeerError("this engine is being closed and no longer communicates with other processes")
        self.counters.rounds += 1
        return self.coordinator.negotiate(request, self.number, index)

    def leave(self, reason: str) -> None:
        """Announce the reason, and refuse to communicate from now on."""
        if not self._left:
            self._left = True
            self.world.announce(reason)

    def close(self) -> None:
        """Withdraw pending reductions, and release the process group."""
        for index in list(self._pending):
            self.cancel_reduction(index)
        self.world.users -= 1
        self.world.close()

    def _global_index(self, index: int) -> int:
        return self.number * CHUNKS_PER_ENGINE + index

    def _unmark_ready(self, index: int) -> PendingReduction | None:
        self.coordinator.ready.discard(self._global_index(index))
        return self._pending.pop(index, None)

    # Execution of agreements

    def start_reduction(self, index: int, ranks: tuple[int, ...]) -> None:
        own, shards = self._unmark_ready(index), self.shards[index]
        with_gradients = shards.among(ranks)
        whole, target, chunk = self._owner.begin_reduction(index, shards.group.rank in with_gradients)
        with profiler_range("reduce-scatter", chunk):
            transfer = self.collectives.reduce_scatter(shards.group, whole, target, shards.bounds, with_gradients)
        chunk.h2d_transfer = transfer
        if own is not None:
            own.collective = transfer
        if whole is not None:
            self.counters.reduced_bytes += (whole.numel() - target.numel()) * target.dtype.itemsize

    def start_gather(self, index: int, ranks: tuple[int, ...]) -> None:
        shards = self.shards[index]
        group, targets = shards.group, shards.among(ranks)
        if not targets:
            return
        own = self._owner.parameters(index)
        whole = None
        if group.rank in targets:
            assert self._gather_target is not None
            whole = self._gather_target.on_device(self._gather_target.whole)
            self.counters.h2d_bytes += own.nbytes
        with profiler_range("all-gather", f"param16[{index}]"):
            if len(targets) == group.size:
                assert whole is not None
                self._gathering = self.collectives.all_gather(group, own, whole, shards.bounds)
                self._owner.keep_parameters(index, self._gathering)
            else:
                sending = self.collectives.gather_to(group, own, whole, shards.bounds, targets)
                if whole is not None:
                    self._gathering = sending
                sending.wait()  # the source may change as soon as this process continues
        self.counters.gathered_bytes += own.nbytes * (len(targets) - (group.rank in targets))
