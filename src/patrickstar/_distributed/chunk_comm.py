"""What one process has to do with the others: gathers and reductions of chunks, in rounds."""

from collections.abc import Sequence
from typing import Protocol

import torch

from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Coordinator
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.transfer_counters import TransferCounters
from patrickstar._memory.worker_pool import Transfer
from patrickstar._schedule.coordination import Agreement, Request
from patrickstar.errors import PeerError


class ShardOwner(Protocol):
    """Has this process's parts of chunks."""

    def parameters(self, index: int) -> torch.Tensor:
        """The part of a chunk that this process owns, parameters in it, where it lies."""
        ...

    def begin_reduction(self, index: int, ranks: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Gradients of these ranks will be added up.

        Returns this process's own, of the whole chunk and zero where there are none, if it is one of them; where the
        sum of its part goes; and the chunk that this lies in.
        """
        ...


class PendingReduction(Transfer):
    """Gradients of a chunk on their way to its owners: first the processes have to agree on it."""

    def __init__(self, comm: "ChunkComm", chunk: Chunk) -> None:
        self.label = f"gradients of {chunk}"
        self.comm = comm
        self.chunk = chunk
        self.begun: Transfer | None = None

    @property
    def done(self) -> bool:
        return self.begun is not None and self.begun.done

    def wait(self) -> None:
        while self.begun is None:
            self.comm.negotiate(Request.ROOM)
        self.begun.wait()

    def prioritize(self) -> None:
        """Who waits comes for it."""

    def cancel(self) -> None:
        """It is not asked for any more, or ends."""
        if self.begun is None:
            self.comm.cancel_reduction(self.chunk.index)
        else:
            self.begun.cancel()


class _CompletedTransfer(Transfer):
    """What was taken back has ended."""

    def __init__(self) -> None:
        self.label = "nothing"

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def prioritize(self) -> None:
        """There is nothing to hasten."""

    def cancel(self) -> None:
        """There is nothing to drop."""


NOTHING = _CompletedTransfer()


class ChunkComm:
    """The other processes, as one engine sees them."""

    def __init__(self, rounds: Coordinator, shard_bounds: dict[int, tuple[int, ...]]) -> None:
        self.coordinator = rounds
        self.world = rounds.world
        self.collectives = rounds.collectives
        self.shard_bounds = shard_bounds
        """Of each chunk where its owners' parts begin."""
        self.counters = TransferCounters()
        """Where bytes are counted."""
        self.owner: ShardOwner | None = None
        self.number = rounds.join(self)
        self.world.users += 1
        self._ready: dict[int, PendingReduction] = {}
        """Gradients that wait for the others'."""
        self._left = False
        self._wanted: Chunk | None = None
        self._gathering: Transfer | None = None

    @property
    def serving(self) -> bool:
        """Whether something is being done for other processes, which can't wait for them."""
        return self.coordinator.serving

    def gather(self, chunk: Chunk) -> Transfer:
        """Begin to have a whole chunk on the device, whose memory it has taken."""
        self._wanted, self._gathering = chunk, None
        chunk.pins += 1  # what is done for others meanwhile must not have it leave
        try:
            while self._gathering is None:
                self.negotiate(Request.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._wanted = self._gathering = None

    def reduce(self, chunk: Chunk) -> Transfer:
        """Have the gradients over a chunk averaged, as soon as the others have theirs."""
        found = self._ready[chunk.index] = PendingReduction(self, chunk)
        self.coordinator.ready.add(self._global_index(chunk.index))
        self.negotiate(Request.NOTHING)
        return found

    def cancel_reduction(self, index: int) -> None:
        """Have gradients of a chunk not averaged, unless that has begun."""
        waiting = self._unmark_ready(index)
        if waiting is not None:
            waiting.begun = NOTHING

    def synchronize_processes(self, want: Request) -> None:
        """Wait until all have come for the same; whatever gradients there are is being reduced then."""
        while not self.negotiate(want).met:
            pass

    def negotiate(self, want: Request, index: int = -1) -> Agreement:
        """Take part in one round."""
        if self._left:
            raise PeerError("this engine is being closed, and waits for no other process any more")
        self.counters.rounds += 1
        return self.coordinator.negotiate(want, self.number, index)

    def leave(self, why: str) -> None:
        """Take part in nothing any more: what waits for the others waits in vain."""
        if not self._left:
            self._left = True
            self.world.announce(why)

    def close(self) -> None:
        """Give what was made for it back."""
        for index in list(self._ready):
            self.cancel_reduction(index)
        self.world.users -= 1
        self.world.close()

    def _global_index(self, index: int) -> int:
        return self.number * CHUNKS_PER_ENGINE + index

    def _unmark_ready(self, index: int) -> PendingReduction | None:
        self.coordinator.ready.discard(self._global_index(index))
        return self._ready.pop(index, None)

    # What a round has agreed on

    def start_reduction(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to add up the gradients that these ranks have."""
        assert self.owner is not None
        mine = self._unmark_ready(index)
        whole, target, chunk = self.owner.begin_reduction(index, ranks)
        transfer = self.collectives.reduce(whole, target, self.shard_bounds[index], ranks)
        chunk.h2d_transfer = transfer
        if mine is not None:
            mine.begun = transfer
        if whole is not None:
            self.counters.reduced_bytes += (whole.numel() - target.numel()) * target.dtype.itemsize

    def start_gather(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to give these ranks all of a chunk."""
        assert self.owner is not None
        me, shard_bounds = self.world.rank, self.shard_bounds[index]
        own = self.owner.parameters(index)
        whole = None
        if me in ranks:
            assert self._wanted is not None
            whole = self._wanted.on_device(self._wanted.whole)
            self.collectives.part(whole, shard_bounds).copy_(own)
            self.counters.h2d_bytes += own.nbytes
        if len(ranks) == self.world.size:
            assert whole is not None
            self._gathering = self.collectives.gather(whole, shard_bounds)
        else:
            sending = self.collectives.send(own, whole, shard_bounds, ranks)
            if whole is not None:
                self._gathering = sending
            sending.wait()  # its source may change as soon as this process goes on
        self.counters.gathered_bytes += own.nbytes * (len(ranks) - (me in ranks))
