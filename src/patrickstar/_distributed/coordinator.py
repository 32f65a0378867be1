"""Coordination steps of one process: exchange requests with the others, and agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from patrickstar._distributed.collectives import Collectives
from patrickstar._distributed.gloo_collectives import GlooCollectives
from patrickstar._distributed.process_group import RankGroup, World
from patrickstar._distributed.stream_collectives import StreamCollectives
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._schedule.coordination import Agreement, Message, Request, derive_agreement
from patrickstar.errors import PeerError

CHUNKS_PER_ENGINE = 1 << 20
"""Range of global chunk indices per engine."""
_READY_PER_MESSAGE = 28
"""Ready chunks in one message of 128 bytes; further ones need a second exchange."""
_HEADER = 4


_Engine = TypeVar("_Engine")


class Coordinator(Generic[_Engine]):
    """Runs the coordination steps of one process with the processes of its data-parallel group.

    Whoever negotiates executes the agreement, inside `executing`, for all engines that it concerns. Ranks in messages
    and agreements are numbers in this group. See [Note: coordination steps].
    """

    def __init__(self, world: World, group: RankGroup, collectives: Collectives) -> None:
        self.world, self.group = world, group
        self.collectives = collectives
        """Shared by all engines: collectives are one sequence, too."""
        self.engines: list[_Engine] = []
        """All engines of the process; a chunk's engine is its global index / `CHUNKS_PER_ENGINE`."""
        self.ready: set[int] = set()
        """Global indices of chunks whose gradients are ready to be reduced."""
        self.serving = False
        """True while an agreement is executed."""
        self._broken = False

    @classmethod
    def of(cls, world: World, group: RankGroup, accelerator: TorchDevice | None) -> "Coordinator[_Engine]":
        """Return the coordinator of a data-parallel group; create it for the first engine."""
        if group not in world.coordinators:
            collectives = GlooCollectives(world) if accelerator is None else StreamCollectives(world, accelerator)
            world.coordinators[group] = cls(world, group, collectives)
        coordinator: Coordinator[_Engine] = world.coordinators[group]
        return coordinator

    def join(self, engine: _Engine) -> int:
        """Register a new engine and return its number; all processes create engines in one order."""
        self.engines.append(engine)
        return len(self.engines) - 1

    def negotiate(self, request: Request, engine: int, index: int = -1) -> Agreement:
        """Take part in one coordination step for an engine, given by its number."""
        if self._broken or self.serving:
            raise PeerError(
                "this process can't communicate with the others, since one of its collectives has failed"
                if self._broken
                else "serving another process would require waiting for that process: raise device_memory"
            )
        requested = index if index < 0 else engine * CHUNKS_PER_ENGINE + index
        return derive_agreement(self._exchange(Message(request, requested, frozenset(self.ready), engine)))

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Return a context for the execution of an agreement, in which no other can be negotiated."""
        self.serving = True
        try:
            with self.collective_section():
                yield
        finally:
            self.serving = False

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        """Report an error inside to all processes: the others have started the same collective."""
        try:
            yield
        except Exception as error:
            self._broken = True
            self.world.announce(f"stopped in the middle of a collective: {type(error).__name__}: {error}")
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"rank {self.world.rank} can't do its part of a collective: {error}") from error

    def _exchange(self, message: Message) -> list[Message]:
        ready = sorted(message.ready)
        header = [message.request, message.chunk, message.engine, len(ready)]
        own = torch.full((_HEADER + _READY_PER_MESSAGE,), -1, dtype=torch.int32, device="cpu")
        own[:_HEADER] = torch.tensor(header, dtype=torch.int32, device="cpu")
        if ready:
            own[_HEADER : _HEADER + min(len(ready), _READY_PER_MESSAGE)] = torch.tensor(
                ready[:_READY_PER_MESSAGE], dtype=torch.int32, device="cpu"
            )
        rows = self.group.all_gather(own).tolist()
        longest = max(row[3] for row in rows)
        if longest > _READY_PER_MESSAGE:
            rest = torch.full((longest,), -1, dtype=torch.int32, device="cpu")
            rest[: len(ready)] = torch.tensor(ready, dtype=torch.int32, device="cpu")
            tails = self.group.all_gather(rest).tolist()
            rows = [row[:_HEADER] + tail for row, tail in zip(rows, tails, strict=True)]
        return [Message(Request(row[0]), row[1], frozenset(row[_HEADER : _HEADER + row[3]]), row[2]) for row in rows]
