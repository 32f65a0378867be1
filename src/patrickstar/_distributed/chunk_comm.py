"""Communication of one engine with other processes: gathers and reductions of chunks, in coordination steps."""

from collections.abc import Iterable

from patrickstar._distributed.collectives import Levels
from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Coordinator
from patrickstar._distributed.transport import FlatTransport, ShardOwner, Transport
from patrickstar._distributed.two_level_transport import TwoLevelTransport
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._schedule.coordination import Agreement, Request
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.transfer_counters import TransferCounters
from patrickstar.errors import ConfigError, PeerError


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
            fits = self.comm.fits_host(self.chunk)
            agreement = self.comm.negotiate(Request.MEMORY if fits else Request.MEMORY_ALONE)
            if fits and agreement.blocked and self.collective is None:
                self.comm.move_to_host(self)
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
    """Communication of one engine with the other processes.

    Args:
        levels: Levels of transport in the data-parallel group, if it consists of replicas.
    """

    def __init__(self, coordinator: Coordinator, levels: Levels | None = None) -> None:
        self.coordinator = coordinator
        self.world = coordinator.world
        self.collectives = coordinator.collectives
        self.levels = levels
        self.transports: dict[int, Transport] = {}
        """Transport of each chunk, by chunk index."""
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
        for chunk in chunks:
            self.transports[chunk.index] = self._transport(chunk)

    def _transport(self, chunk: ChunkSpec) -> Transport:
        assert chunk.group is not None, "with several processes every chunk is sharded"
        coordinating, common = self.coordinator.group, (chunk, self.collectives, self.counters)
        if not set(chunk.group.ranks) <= set(coordinating.ranks):
            raise ConfigError(
                f"parameter {chunk.params[0]!r} is held by processes {', '.join(map(str, chunk.group.ranks))}, which "
                f"are not in one data-parallel group ({', '.join(map(str, coordinating.ranks))}): shard it over "
                f"dimensions of the mesh that ps.initialize was given"
            )
        if chunk.group.replicas > 1:
            assert self.levels is not None, "only a mesh with replicas divides the owners into replicas"
            return TwoLevelTransport(*common, coordinating, self.levels)
        group = self.world.group(chunk.group.partition)
        members = tuple(coordinating.ranks.index(rank) for rank in group.ranks)
        size = coordinating.size if self.levels is None else self.levels.shard.size
        own = coordinating.rank // size
        elsewhere = tuple(number for number, member in enumerate(members) if member // size != own)
        return FlatTransport(*common, group, members, elsewhere)

    def invalidate(self, indices: Iterable[int]) -> None:
        """Note that owners have changed parameters of these chunks."""
        for index in indices:
            self.transports[index].invalidate()

    def gather(self, chunk: Chunk) -> Transfer:
        self._gather_target, self._gathering = chunk, None
        chunk.pins += 1  # serving other processes meanwhile must not evict it
        try:
            if self.transports[chunk.index].alone:
                self.start_gather(chunk.index, (self.coordinator.group.rank,), False)
            while self._gathering is None:
                stale = self.transports[chunk.index].stale
                self.negotiate(Request.REFRESH if stale else Request.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._gather_target = self._gathering = None

    def request_reduction(self, chunk: Chunk) -> Transfer:
        """Request the reduction of a chunk's gradients, once those of the other processes are ready."""
        reduction = self._pending[chunk.index] = PendingReduction(self, chunk)
        if self.transports[chunk.index].alone:
            self.start_reduction(chunk.index, (self.coordinator.group.rank,))
            return reduction
        self.coordinator.ready.add(self._global_index(chunk.index))
        self.negotiate(Request.NOTHING)
        return reduction

    def fits_host(self, chunk: Chunk) -> bool:
        """Return whether gradients on the device that wait for their reduction can be moved to the host."""
        return self._owner.fits_host(chunk)

    def move_to_host(self, reduction: PendingReduction) -> None:
        """Move gradients that wait for their reduction to the host; the request remains."""
        index = reduction.chunk.index
        self._pending[index] = PendingReduction(self, reduction.chunk)
        self._owner.move_gradients_to_host(reduction.chunk, self._pending[index])
        reduction.collective = CompletedTransfer("gradients on the host")

    def waits_for_reduction(self, index: int) -> bool:
        """Return whether the reduction of a chunk has been requested and not started."""
        return index in self._pending

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
        own, transport = self._unmark_ready(index), self.transports[index]
        whole, target, chunk = self._owner.begin_reduction(index, self.coordinator.group.rank in ranks)
        with profiler_range("reduce-scatter", chunk):
            transfer = transport.reduce(whole, target, ranks)
        chunk.host.reader = transfer
        if own is not None:
            own.collective = transfer

    def start_gather(self, index: int, ranks: tuple[int, ...], refresh: bool) -> None:
        whole = None
        if self.coordinator.group.rank in ranks:
            assert self._gather_target is not None
            whole = self._gather_target.on_device(self._gather_target.whole)
        with profiler_range("all-gather", f"param16[{index}]"):
            gathering = self.transports[index].gather(self._owner, whole, ranks, refresh)
        if whole is not None:
            self._gathering = gathering
