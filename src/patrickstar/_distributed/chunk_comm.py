"""What one process has to do with the others: gathers and reductions of chunks, in rounds."""

from collections.abc import Sequence
from typing import Protocol

import torch

from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Rounds
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.transfer_counters import Traffic
from patrickstar._memory.worker_pool import Transfer
from patrickstar._schedule.coordination import Outcome, Want
from patrickstar.errors import PeerError


class Owner(Protocol):
    """Has this process's parts of chunks."""

    def parameters(self, index: int) -> torch.Tensor:
        """The part of a chunk that this process owns, parameters in it, where it lies."""
        ...

    def begin_sum(self, index: int, ranks: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Gradients of these ranks will be added up.

        Returns this process's own, of the whole chunk and zero where there are none, if it is one of them; where the
        sum of its part goes; and the chunk that this lies in.
        """
        ...


class Reduction(Transfer):
    """Gradients of a chunk on their way to its owners: first the processes have to agree on it."""

    def __init__(self, peers: "Peers", chunk: Chunk) -> None:
        self.what = f"gradients of {chunk}"
        self.peers = peers
        self.chunk = chunk
        self.begun: Transfer | None = None

    @property
    def done(self) -> bool:
        return self.begun is not None and self.begun.done

    def wait(self) -> None:
        while self.begun is None:
            self.peers.come(Want.ROOM)
        self.begun.wait()

    def hasten(self) -> None:
        """Who waits comes for it."""

    def cancel(self) -> None:
        """It is not asked for any more, or ends."""
        if self.begun is None:
            self.peers.take_back(self.chunk.index)
        else:
            self.begun.cancel()


class _Nothing(Transfer):
    """What was taken back has ended."""

    def __init__(self) -> None:
        self.what = "nothing"

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def hasten(self) -> None:
        """There is nothing to hasten."""

    def cancel(self) -> None:
        """There is nothing to drop."""


NOTHING = _Nothing()


class Peers:
    """The other processes, as one engine sees them."""

    def __init__(self, rounds: Rounds, cuts: dict[int, tuple[int, ...]]) -> None:
        self.rounds = rounds
        self.world = rounds.world
        self.collectives = rounds.collectives
        self.cuts = cuts
        """Of each chunk where its owners' parts begin."""
        self.traffic = Traffic()
        """Where bytes are counted."""
        self.owner: Owner | None = None
        self.number = rounds.join(self)
        self.world.users += 1
        self._ready: dict[int, Reduction] = {}
        """Gradients that wait for the others'."""
        self._left = False
        self._wanted: Chunk | None = None
        self._gathering: Transfer | None = None

    @property
    def serving(self) -> bool:
        """Whether something is being done for other processes, which can't wait for them."""
        return self.rounds.serving

    def gather(self, chunk: Chunk) -> Transfer:
        """Begin to have a whole chunk on the device, whose memory it has taken."""
        self._wanted, self._gathering = chunk, None
        chunk.pins += 1  # what is done for others meanwhile must not have it leave
        try:
            while self._gathering is None:
                self.come(Want.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._wanted = self._gathering = None

    def reduce(self, chunk: Chunk) -> Transfer:
        """Have the gradients over a chunk averaged, as soon as the others have theirs."""
        found = self._ready[chunk.index] = Reduction(self, chunk)
        self.rounds.ready.add(self._numbered(chunk.index))
        self.come(Want.NOTHING)
        return found

    def take_back(self, index: int) -> None:
        """Have gradients of a chunk not averaged, unless that has begun."""
        waiting = self._no_longer_ready(index)
        if waiting is not None:
            waiting.begun = NOTHING

    def meet(self, want: Want) -> None:
        """Wait until all have come for the same; whatever gradients there are is being reduced then."""
        while not self.come(want).met:
            pass

    def come(self, want: Want, index: int = -1) -> Outcome:
        """Take part in one round."""
        if self._left:
            raise PeerError("this engine is being closed, and waits for no other process any more")
        self.traffic.rounds += 1
        return self.rounds.come(want, self.number, index)

    def leave(self, why: str) -> None:
        """Take part in nothing any more: what waits for the others waits in vain."""
        if not self._left:
            self._left = True
            self.world.say(why)

    def close(self) -> None:
        """Give what was made for it back."""
        for index in list(self._ready):
            self.take_back(index)
        self.world.users -= 1
        self.world.close()

    def _numbered(self, index: int) -> int:
        return self.number * CHUNKS_PER_ENGINE + index

    def _no_longer_ready(self, index: int) -> Reduction | None:
        self.rounds.ready.discard(self._numbered(index))
        return self._ready.pop(index, None)

    # What a round has agreed on

    def reduce_now(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to add up the gradients that these ranks have."""
        assert self.owner is not None
        mine = self._no_longer_ready(index)
        whole, target, chunk = self.owner.begin_sum(index, ranks)
        transfer = self.collectives.reduce(whole, target, self.cuts[index], ranks)
        chunk.host_reader = transfer
        if mine is not None:
            mine.begun = transfer
        if whole is not None:
            self.traffic.reduced_bytes += (whole.numel() - target.numel()) * target.dtype.itemsize

    def gather_now(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to give these ranks all of a chunk."""
        assert self.owner is not None
        me, cuts = self.world.rank, self.cuts[index]
        own = self.owner.parameters(index)
        whole = None
        if me in ranks:
            assert self._wanted is not None
            whole = self._wanted.on_device(self._wanted.whole)
            self.collectives.part(whole, cuts).copy_(own)
            self.traffic.h2d_bytes += own.nbytes
        if len(ranks) == self.world.size:
            assert whole is not None
            self._gathering = self.collectives.gather(whole, cuts)
        else:
            sending = self.collectives.send(own, whole, cuts, ranks)
            if whole is not None:
                self._gathering = sending
            sending.wait()  # its source may change as soon as this process goes on
        self.traffic.gathered_bytes += own.nbytes * (len(ranks) - (me in ranks))
