"""Who communicates what, and when: processes meet in rounds, and none waits for what never comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from patrickstar.errors import PeerError

# [Note: rounds]
# Collectives must be called by all processes in one order, yet processes need not do the same: one takes a branch that
# another doesn't, has less memory and gathers again what another kept, evaluates alone, or has run out of batches. So
# before bytes move all say what they want, in a round; everybody then draws the same conclusion from the same words.
# Where all want the same, it is one collective. Where some want a chunk, its owners send it to these alone. Gradients
# of a chunk are reduced when each process has said that its own are ready, or that it will have none: whoever comes to
# an optimizer step has no more. A process at a step serves the others until all are there.
#
# A process goes on once it has what it wanted. Nobody waits forever: in every round either something moves, or somebody
# goes on who wanted nothing, or all wait for room that their gradients take; then these are reduced as they are, and
# what comes later is added. What a process waits for can't depend on one that is gone: the exchange fails then.
#
# All engines of a process share its rounds: with rounds of their own, one process could wait in those of one engine and
# another in those of the other.


class Request(IntEnum):
    """What a process comes to a round for."""

    NOTHING = 0
    """To say that gradients are ready; it goes on at once."""
    GATHER = 1
    """A chunk of `param16`."""
    ROOM = 2
    """That gradients it has are reduced, for the memory they take."""
    STEP = 3
    """To update: it has no more gradients."""
    NORM = 4
    """The norm of all gradients: it has no more."""
    STATE = 5
    """Parameters or states of all processes."""
    AVERAGE = 6
    """The mean of a number."""
    CLOSE = 7
    """To end."""
    DROP = 8
    """To forget gradients: it has no more of those."""
    WRITE = 9
    """To take over what was written to a parameter in place."""

    @property
    def is_meeting(self) -> bool:
        """Whether all processes have to come for the same."""
        return self >= Request.STEP


@dataclass(frozen=True)
class Message:
    """What one process says in a round: what it wants, of which chunk, and of which chunks its gradients are ready.

    Chunks of all engines of a process are numbered as one; `engine` says whose meeting it is.
    """

    want: Request
    chunk: int = -1
    ready: frozenset[int] = frozenset()
    engine: int = 0


@dataclass(frozen=True)
class Agreement:
    """What is done in a round, in this order: reductions, gathers, a meeting. Ranks are ascending."""

    reduces: tuple[tuple[int, tuple[int, ...]], ...]
    """Chunks, and the ranks that have gradients of them."""
    gathers: tuple[tuple[int, tuple[int, ...]], ...]
    """Chunks, and the ranks that want them."""
    met: bool
    """Whether all have come for the same."""


def outcome(words: Sequence[Message]) -> Agreement:
    """What follows from the words of all processes. Raises PeerError where they have come for different meetings."""
    meetings = {(word.want, word.engine) for word in words if word.want.is_meeting}
    met = all(word.want.is_meeting for word in words)
    if met and len(meetings) > 1:
        several = len({word.engine for word in words}) > 1
        said = "; ".join(
            f"rank {rank}: {_SAID[word.want]}{f' of engine {word.engine}' if several else ''}"
            for rank, word in enumerate(words)
        )
        raise PeerError(
            f"processes have come apart, and can't go on together ({said}): all have to call optimizer.step(), "
            f"optimizer.zero_grad(), engine.clip_grad_norm_, engine.state_dict() and the like in the same order"
        )
    ready = sorted(set().union(*(word.ready for word in words)))
    reduces = [chunk for chunk in ready if all(chunk in word.ready or word.want.is_meeting for word in words)]
    wanted = sorted({word.chunk for word in words if word.want is Request.GATHER})
    bound_to_device = all(word.want is Request.ROOM or word.want.is_meeting for word in words)
    if bound_to_device and not met and not reduces:
        reduces = sorted(set().union(*(word.ready for word in words if word.want is Request.ROOM)))
    return Agreement(
        tuple((chunk, tuple(rank for rank, word in enumerate(words) if chunk in word.ready)) for chunk in reduces),
        tuple(
            (chunk, tuple(r for r, word in enumerate(words) if word.want is Request.GATHER and word.chunk == chunk))
            for chunk in wanted
        ),
        met,
    )


_SAID = {
    Request.STEP: "a step",
    Request.NORM: "clipping",
    Request.STATE: "reading the state or a gradient",
    Request.AVERAGE: "an average",
    Request.CLOSE: "closing the engine",
    Request.DROP: "dropping gradients",
    Request.WRITE: "writing to a parameter in place",
}
