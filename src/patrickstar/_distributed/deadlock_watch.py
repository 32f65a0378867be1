"""Detection of processes that wait for each other, in calls of the engine or in collectives outside of it."""

import json
import linecache
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from patrickstar.errors import PeerError

# [Note: calls of a single process]
# Reading parameters, state dicts and checkpoints are collective. A script that calls them in one process only, and then
# has all processes meet in a barrier of its own, would wait forever: neither side can see the other. The same happens
# if processes that operators link ([Note: linked processes]) take different branches. So a process that has waited for
# a while in a call of the engine asks the others where they are. A thread of each process answers with the line that
# its main thread executes. If all of them wait, in calls of the engine or in collectives outside of it, and none has
# moved on between two answers, they would wait until their timeouts, and the call fails at once. Any other line may
# take its time: loading data, evaluating.

WAIT_S = 4.0
"""Seconds in a call of the engine before a process asks the others, and between two questions."""
ANSWER_S = 1.0
"""Seconds between two looks for questions."""
CPU_UNIT_S = 0.01
"""Time of the processor in which a thread is taken to have moved on."""
COLLECTIVES = "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives", "torch.distributed.nn"
"""Modules whose functions wait for other processes; those of checkpoints and DTensors also compute and write."""
REMINDER_S = 60.0
"""Seconds between two log messages about a process that is elsewhere."""

_log = logging.getLogger(__name__)


class DeadlockWatch:
    """Answers the questions of other processes, and asks them when this one waits.

    Args:
        store: Key-value store of the process group.
        rank, size: This process and the number of processes.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._main = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._main)
        self._asked = 0
        self._waits = 0
        """Number of waits so far."""
        self.waiting_in = ""
        """Call of the engine in which this process waits for others, empty while it does not."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="patrickstar-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()

    def _answer(self) -> None:
        answered = 0
        while not self._closed.wait(ANSWER_S):
            try:
                asked = int(self._store.add("questions", 0))
                if asked != answered:
                    answered = asked
                    self._store.set(f"place/{self._rank}", json.dumps([asked, *self._place()]))
            except RuntimeError:  # the store is gone: the others have ended, which their collectives report
                return

    def _place(self) -> "Place":
        """Return what the main thread executes."""
        if call := self.waiting_in:
            return Place(True, call, self._waits)
        in_collective, text = _line_of_user(sys._current_frames().get(self._main))
        # A thread that waits for a collective uses no time of the processor.
        return Place(in_collective, text, round(time.clock_gettime(self._clock) / CPU_UNIT_S))

    @contextmanager
    def waiting(self) -> Iterator["PeerWait"]:
        """Record that this process waits for others inside of the context."""
        self._waits += 1
        self.waiting_in = "a call of the engine"
        try:
            yield PeerWait(self)
        finally:
            self.waiting_in = ""

    def ask(self) -> dict[int, "Place"]:
        """Return what the other processes execute, as far as they answered the last question, and ask again."""
        places = {}
        for rank in range(self._size):
            key = f"place/{rank}"
            if rank != self._rank and self._asked and self._store.check([key]):
                asked, *place = json.loads(self._store.get(key).decode())
                if asked >= self._asked:
                    places[rank] = Place(*place)
        self._asked = int(self._store.add("questions", 1))
        return places


class Place(NamedTuple):
    """Place of a process in its code: whether it waits, the line, and a number that changes as it goes on."""

    waits: bool
    text: str
    progress: int


class PeerWait:
    """One wait of this process for the others."""

    def __init__(self, watch: DeadlockWatch) -> None:
        self._watch = watch
        self._began = self._last = self._reminded = time.monotonic()
        self._places: dict[int, Place] = {}

    def check(self) -> None:
        """Raise PeerError if no process can go on; call this again and again."""
        now = time.monotonic()
        if now - self._last < WAIT_S:
            return
        self._last, watch = now, self._watch
        watch.waiting_in = call = own_call()
        try:
            places = watch.ask()
        except RuntimeError:  # the collective will fail, too, and say which process ended
            return
        waiting_ranks = [rank for rank, place in places.items() if place.waits and self._places.get(rank) == place]
        if len(waiting_ranks) == watch._size - 1:
            others = "; ".join(f"rank {rank} waits in {places[rank].text}" for rank in waiting_ranks)
            raise PeerError(
                f"rank {watch._rank} waits for other processes in {call}, but {others}: none can go on; all processes "
                f"must do the same with the engine"
            )
        if now - self._reminded > REMINDER_S:
            for rank, place in places.items():
                _log.warning(
                    "rank %d has waited %.0f s in %s for rank %d, which is in %s",
                    *(watch._rank, now - self._began, call, rank, place.text),
                )
            if places:
                self._reminded = now
        self._places = places


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{number} ({linecache.getline(path, number).strip()})"


def _is(frame: FrameType, package: str) -> bool:
    return _module(frame) == package or _module(frame).startswith(package + ".")


def _line_of_user(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread is in a collective, and the innermost line outside of PyTorch and this package."""
    in_collective = False
    while frame is not None:
        if any(_is(frame, module) for module in COLLECTIVES):
            in_collective = True
        elif not _is(frame, "torch") and not _is(frame, "patrickstar"):
            return in_collective, _line(frame)
        frame = frame.f_back
    return in_collective, "an unknown line"


def own_call() -> str:
    """Return the engine's method that the user called, and the line of the call."""
    frame: FrameType | None = sys._getframe()
    call = ""
    while frame is not None and (_is(frame, "patrickstar") or _is(frame, "torch") or _is(frame, "contextlib")):
        if _is(frame, "patrickstar"):
            call = f"engine.{frame.f_code.co_name}"
        frame = frame.f_back
    if call.startswith("engine._"):  # the outermost function of the package is the hook of an operator
        call = "the use of a parameter"
    return f"{call} at {_line(frame)}" if frame is not None else call
