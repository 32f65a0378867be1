"""Detection of processes that wait for each other: one in a call of the engine, another in a collective of the user."""

import json
import linecache
import logging
import sys
import threading
import time
from types import FrameType
from typing import Any

from patrickstar.errors import PeerError

# [Note: calls of a single process]
# Reading parameters, state dicts and checkpoints are collective. A script that calls them in one process only, and then
# has all processes meet in a barrier of its own, would wait forever: neither side can see the other. So a process that
# has waited for a while in a call of the engine asks the others where they are. A thread of each process answers with
# the line that its main thread executes. If that is a collective outside of the engine, in two answers, both would wait
# until their timeouts, and the call fails at once. Any other line may take its time: loading data, evaluating.

WAIT_S = 4.0
"""Seconds in a call of the engine before a process asks the others, and between two questions."""
ANSWER_S = 1.0
"""Seconds between two looks for questions."""
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
        self._asked = 0
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
                    frame = sys._current_frames().get(self._main)
                    self._store.set(f"place/{self._rank}", json.dumps([asked, *_place(frame)]))
            except RuntimeError:  # the store is gone: the others have ended, which their collectives report
                return

    def waiting(self) -> "Wait":
        """Return the record of a wait that begins now."""
        return Wait(self)

    def ask(self) -> dict[int, tuple[str, str]]:
        """Return what the other processes execute, as far as they answered the last question, and ask again."""
        places = {}
        for rank in range(self._size):
            key = f"place/{rank}"
            if rank != self._rank and self._asked and self._store.check([key]):
                asked, kind, text = json.loads(self._store.get(key).decode())
                if asked >= self._asked:
                    places[rank] = (kind, text)
        self._asked = int(self._store.add("questions", 1))
        return places


class Wait:
    """One wait of this process for the others."""

    def __init__(self, watch: DeadlockWatch) -> None:
        self._watch = watch
        self._began = self._last = self._reminded = time.monotonic()
        self._places: dict[int, tuple[str, str]] = {}

    def check(self) -> None:
        """Raise PeerError if another process waits in a collective of the user; call this again and again."""
        now = time.monotonic()
        if now - self._last < WAIT_S:
            return
        self._last = now
        try:
            places = self._watch.ask()
        except RuntimeError:  # the collective will fail, too, and say which process ended
            return
        for rank, place in places.items():
            kind, text = place
            if kind == "collective" and self._places.get(rank) == place:
                raise PeerError(
                    f"rank {self._watch._rank} waits for all processes in {own_call()}, but rank {rank} waits in "
                    f"{text}: neither can go on; all processes must do the same with the engine"
                )
            if now - self._reminded > REMINDER_S:
                _log.warning(
                    "rank %d has waited %.0f s in %s for rank %d, which is in %s",
                    *(self._watch._rank, now - self._began, own_call(), rank, text),
                )
        if places and now - self._reminded > REMINDER_S:
            self._reminded = now
        self._places = places


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{number} ({linecache.getline(path, number).strip()})"


def _is(frame: FrameType, package: str) -> bool:
    return _module(frame) == package or _module(frame).startswith(package + ".")


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return what a thread executes: "collective", "engine" or "elsewhere", and the line of the user's code."""
    kind = "elsewhere"
    while frame is not None:
        if _is(frame, "patrickstar"):
            return "engine", frame.f_code.co_qualname
        if _is(frame, "torch.distributed"):
            kind = "collective"
        elif not _is(frame, "torch"):
            return kind, _line(frame)
        frame = frame.f_back
    return kind, "an unknown line"


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
