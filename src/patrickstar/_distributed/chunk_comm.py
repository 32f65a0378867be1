"""Communication of one engine with other processes: gathers and reductions of chunks, in coordination steps."""

from collections.abc import Sequence
from typing import Protocol

import torch

from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Coordinator
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.profiler_range import profiler_range
from patrickstar._memory.transfer import CompletedTransfer, Transfer
from patrickstar._memory.transfer_counters import TransferCounters
from patrickstar._schedule.coordination import Agreement, Request
from patrickstar.errors import PeerError


class ShardOwner(Protocol):
    """Owner of this process's shards of chunks."""

    def parameters(self, index: int) -> torch.Tensor:
        """Return the `param16` shard of a chunk that this process owns, on its current tier."""

    def keep_parameters(self, index: int, reader: Transfer) -> None:
        """Keep the `param16` shard of a chunk unchanged until `reader` has ended."""

    def begin_reduction(self, index: int, ranks: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Prepare the reduction of a chunk's gradients from these ranks.

        Return this process's gradients of the whole chunk, zero where missing (None if its rank is not among `ranks`);
        the target for the sum of its shard; and the chunk that holds the target.
        """


class PendingReduction(Transfer):
    """Reduction of a chunk's gradients, which starts once the processes have agreed on it."""

    def __init__(self, comm: "ChunkComm", chunk: Chunk) -> None:
        self.label = f"gradients of {chunk}"
        self.comm = comm
        self.chunk = chunk
        self.collective: Transfer | None = None

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

    def __init__(self, coordinator: Coordinator, shard_bounds: dict[int, tuple[int, ...]]) -> None:
        self.coordinator = coordinator
        self.world = coordinator.world
        self.collectives = coordinator.collectives
        self.shard_bounds = shard_bounds
        """Bounds of the owners' shards, by chunk index."""
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

    @property
    def serving(self) -> bool:
        """True while an agreement is executed; no negotiation is possible then."""
        return self.coordinator.serving

    def gather(self, chunk: Chunk) -> Transfer:
        self._gather_target, self._gathering = chunk, None
        chunk.pins += 1  # serving other processes meanwhile must not evict it
        try:
            while self._gathering is None:
                self.negotiate(Request.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._gather_target = self._gathering = None

    def request_reduction(self, chunk: Chunk) -> Transfer:
        """Request the reduction of a chunk's gradients, once those of the other processes are ready."""
        reduction = self._pending[chunk.index] = PendingReduction(self, chunk)
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
        own = self._unmark_ready(index)
        whole, target, chunk = self._owner.begin_reduction(index, ranks)
        with profiler_range("reduce-scatter", chunk):
            transfer = self.collectives.reduce_scatter(whole, target, self.shard_bounds[index], ranks)
        chunk.h2d_transfer = transfer
        if own is not None:
            own.collective = transfer
        if whole is not None:
            self.counters.reduced_bytes += (whole.numel() - target.numel()) * target.dtype.itemsize

    def start_gather(self, index: int, ranks: tuple[int, ...]) -> None:
        me, shard_bounds = self.world.rank, self.shard_bounds[index]
        own = self._owner.parameters(index)
        whole = None
        if me in ranks:
            assert self._gather_target is not None
            whole = self._gather_target.on_device(self._gather_target.whole)
            self.counters.h2d_bytes += own.nbytes
        with profiler_range("all-gather", f"param16[{index}]"):
            if len(ranks) == self.world.size:
                assert whole is not None
                self._gathering = self.collectives.all_gather(own, whole, shard_bounds)
                self._owner.keep_parameters(index, self._gathering)
            else:
                sending = self.collectives.gather_to(own, whole, shard_bounds, ranks)
                if whole is not None:
                    self._gathering = sending
                sending.wait()  # the source may change as soon as this process continues
        self.counters.gathered_bytes += own.nbytes * (len(ranks) - (me in ranks))
