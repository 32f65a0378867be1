"""The rounds of one process: it says what it wants, hears the others, and does its part of what follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from patrickstar._distributed.collectives import Collectives, collectives
from patrickstar._distributed.process_group import World
from patrickstar._schedule.coordination import Agreement, Message, Request, outcome
from patrickstar.errors import PeerError

CHUNKS_PER_ENGINE = 1 << 20
"""Chunks of all engines are numbered as one."""
_AT_ONCE = 28
"""Chunks with gradients that a word has room for; more are told in a second exchange. A word has 128 bytes."""
_HEAD = 4


class CoordinatedEngine(Protocol):
    """An engine's side of the rounds: does what was agreed on, by chunk index and ranks."""

    def start_reduction(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to add up the gradients that these ranks have."""
        ...

    def start_gather(self, index: int, ranks: tuple[int, ...]) -> None:
        """Begin to give these ranks all of a chunk."""
        ...


class Coordinator:
    """See [Note: rounds]."""

    def __init__(self, world: World, collectives: Collectives) -> None:
        self.world = world
        self.collectives = collectives
        """Of all engines: they too are one sequence."""
        self.members: list[CoordinatedEngine] = []
        self.ready: set[int] = set()
        """Chunks of all engines with gradients that wait for the others'."""
        self.serving = False
        """Whether what a round has agreed on is being done."""
        self._broken = False

    @classmethod
    def of(cls, world: World, device: torch.device) -> "Coordinator":
        """Those of a process; made when its first engine is."""
        if world.coordinator is None:
            world.coordinator = cls(world, collectives(world, device))
        rounds: Coordinator = world.coordinator
        return rounds

    def join(self, member: CoordinatedEngine) -> int:
        """A new engine's number; all processes make their engines in one order."""
        self.members.append(member)
        return len(self.members) - 1

    def negotiate(self, want: Request, number: int, index: int = -1) -> Agreement:
        """Take part in one round, for the engine of this number."""
        if self._broken or self.serving:
            raise PeerError(
                "this process can't speak to the others any more, since a collective failed on its way here"
                if self._broken
                else "what is done for another process would have to wait for that one: raise device_memory"
            )
        chunk = index if index < 0 else number * CHUNKS_PER_ENGINE + index
        found = outcome(self._exchange(Message(want, chunk, frozenset(self.ready), number)))
        self.serving = True
        try:
            with self.collective_section():
                for one, ranks in found.reduces:
                    self.members[one // CHUNKS_PER_ENGINE].start_reduction(one % CHUNKS_PER_ENGINE, ranks)
                for one, ranks in found.gathers:
                    self.members[one // CHUNKS_PER_ENGINE].start_gather(one % CHUNKS_PER_ENGINE, ranks)
        finally:
            self.serving = False
        return found

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        """What happens inside was agreed on, and the others have begun it: an error here ends it for all."""
        try:
            yield
        except Exception as error:
            self._broken = True
            self.world.announce(f"stopped in the middle of a collective: {type(error).__name__}: {error}")
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"rank {self.world.rank} can't do its part of a collective: {error}") from error

    def _exchange(self, word: Message) -> list[Message]:
        ready = sorted(word.ready)
        said = torch.full((_HEAD + _AT_ONCE,), -1, dtype=torch.int32, device="cpu")
        said[:_HEAD] = torch.tensor([word.want, word.chunk, word.engine, len(ready)], dtype=torch.int32, device="cpu")
        if ready:
            said[_HEAD : _HEAD + min(len(ready), _AT_ONCE)] = torch.tensor(
                ready[:_AT_ONCE], dtype=torch.int32, device="cpu"
            )
        rows = self.world.all_gather(said).tolist()
        longest = max(row[3] for row in rows)
        if longest > _AT_ONCE:
            rest = torch.full((longest,), -1, dtype=torch.int32, device="cpu")
            rest[: len(ready)] = torch.tensor(ready, dtype=torch.int32, device="cpu")
            rows = [row[:_HEAD] + more for row, more in zip(rows, self.world.all_gather(rest).tolist(), strict=True)]
        return [Message(Request(row[0]), row[1], frozenset(row[_HEAD : _HEAD + row[3]]), row[2]) for row in rows]
