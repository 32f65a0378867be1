"""Coordination of processes: what each one requests, and what all of them do next, without deadlock."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from patrickstar.errors import PeerError

# [Note: coordination steps]
# All processes must call collectives in one order, yet they need not do the same: a process may take a branch that
# another does not, have less memory and gather again what another kept, evaluate alone, or run out of batches. So
# before bytes are transferred, all processes exchange requests in a coordination step, and derive the same agreement
# from them. If all request the same, it is one collective. If some request a chunk, its owners send it to these only.
# Gradients of a chunk are reduced once each process has reported its own as ready, or that it will have none: a process
# at an optimizer step has no more gradients. A process at a step serves the others until all have reached it.
#
# A process continues once it has what it requested. None waits forever: in every coordination step something is
# transferred, or a process that requested nothing continues, or all wait for memory that gradients occupy. Then those
# whose host has room move the gradients there, and continue. If no host has room, gradients are reduced as they are and
# later ones are added, which changes the order of the sum. No process waits for one that has ended: the exchange fails.
#
# All engines of a process share its coordination steps: with separate ones, a process could wait in those of one engine
# and another process in those of the other.


class Request(IntEnum):
    """Request of a process in a coordination step."""

    NOTHING = 0
    """None: report ready gradients and continue."""
    GATHER = 1
    """Gather a chunk of `param16`."""
    REFRESH = 2
    """Gather a chunk whose shards the replicas have to exchange first, since parameters have changed."""
    MEMORY = 3
    """Reduce ready gradients, to free their memory; if that has to wait, the host has room for them."""
    MEMORY_ALONE = 4
    """Reduce ready gradients, to free their memory; the host has no room for them."""
    STEP = 5
    """Start the optimizer step; no more gradients follow."""
    NORM = 6
    """Compute the norm of all gradients; no more follow."""
    STATE = 7
    """Read parameters or optimizer states of all processes."""
    AVERAGE = 8
    """Average a number."""
    CLOSE = 9
    """Close the engine."""
    DROP = 10
    """Drop gradients; no more of these follow."""
    WRITE = 11
    """Apply an in-place write to a parameter."""
    PLAN = 12
    """Wait for the dry run of the first process."""

    @property
    def is_barrier(self) -> bool:
        """True if the request is granted only when all processes make it."""
        return self >= Request.STEP

    @property
    def waits_for_memory(self) -> bool:
        """True if the process waits for memory that its gradients occupy."""
        return self in (Request.MEMORY, Request.MEMORY_ALONE)

    @property
    def is_gather(self) -> bool:
        """True if the process requests a chunk."""
        return self in (Request.GATHER, Request.REFRESH)


@dataclass(frozen=True)
class Message:
    """Message of one process in a coordination step: its request, and its chunks with ready gradients.

    Chunk indices are global, in one numbering for all engines of a process; `engine` made the request.
    """

    request: Request
    chunk: int = -1
    ready: frozenset[int] = frozenset()
    engine: int = 0


@dataclass(frozen=True)
class Agreement:
    """Actions of a coordination step, in order: reductions, gathers, a barrier. Ranks are ascending."""

    reductions: tuple[tuple[int, tuple[int, ...]], ...]
    """Chunks, each with the ranks that have gradients of it."""
    gathers: tuple[tuple[int, tuple[int, ...]], ...]
    """Chunks, each with the ranks that requested it."""
    synchronized: bool
    """True if all processes have reached the same barrier."""
    refreshes: frozenset[int] = frozenset()
    """Gathered chunks whose shards the replicas exchange first. All processes take part, whoever requested it."""
    blocked: bool = False
    """True if no process could continue: those that requested MEMORY have to move their gradients to the host."""


def derive_agreement(messages: Sequence[Message]) -> Agreement:
    """Derive the agreement from the messages of all processes, by rank; raise PeerError if barriers differ."""
    barriers = {(message.request, message.engine) for message in messages if message.request.is_barrier}
    synchronized = all(message.request.is_barrier for message in messages)
    if synchronized and len(barriers) > 1:
        name_engines = len({message.engine for message in messages}) > 1
        requests = "; ".join(
            f"rank {rank}: {_DESCRIPTIONS[message.request]}{f' of engine {message.engine}' if name_engines else ''}"
            for rank, message in enumerate(messages)
        )
        raise PeerError(
            f"processes made different calls and can't continue ({requests}): all have to call optimizer.step(), "
            f"optimizer.zero_grad(), engine.clip_grad_norm_, engine.state_dict() and the like in the same order"
        )
    ready = sorted(set().union(*(message.ready for message in messages)))
    reduced = [chunk for chunk in ready if all(chunk in m.ready or m.request.is_barrier for m in messages)]
    requested = sorted({message.chunk for message in messages if message.request.is_gather})
    waiting = [message for message in messages if message.request.waits_for_memory]
    blocked = bool(waiting) and not reduced and all(m in waiting or m.request.is_barrier for m in messages)
    if blocked and all(message.request is Request.MEMORY_ALONE for message in waiting):
        reduced = sorted(set().union(*(message.ready for message in waiting)))
    return Agreement(
        tuple((chunk, tuple(rank for rank, m in enumerate(messages) if chunk in m.ready)) for chunk in reduced),
        tuple(
            (chunk, tuple(r for r, m in enumerate(messages) if m.request.is_gather and m.chunk == chunk))
            for chunk in requested
        ),
        synchronized,
        frozenset(message.chunk for message in messages if message.request is Request.REFRESH),
        blocked,
    )


_DESCRIPTIONS = {
    Request.STEP: "a step",
    Request.NORM: "clipping",
    Request.STATE: "reading the state or a gradient",
    Request.AVERAGE: "an average",
    Request.PLAN: "a plan",
    Request.CLOSE: "closing the engine",
    Request.DROP: "dropping gradients",
    Request.WRITE: "writing to a parameter in place",
}
