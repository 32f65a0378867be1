"""Gate where Ctrl-C, which can strike between any two bytecodes, waits while the engine's own code runs."""

# The module behind `signal`: that one's enums cost ten times as much, and operators outside of a call need it.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import Final

import torch

# [Note: Ctrl-C]
# Whatever the user calls or hooks into the model shuts the gate for as long as the engine's own code runs in it. The
# first Ctrl-C then waits for the end of the outermost such section, so that chunks, states and records are never
# changed by half; a second one does not wait, since the first may wait for a dead disk. The user's own code inside a
# call, which is the model, an operator or a backward, opens the gate again (`interruptible`).
#
# Long loops of a call (chunks of a step, pages of a save) begin each round with an `interruption_point`, where Ctrl-C
# takes effect early. Only calls may reach one, not operators, gradients or the update of one chunk: where these share a
# loop with calls they enter it in an `uninterruptible` section, in which points have no effect.
#
# Python handles signals in the main thread only: in others the gate does nothing, and stays as it is.

CTRL_C = int(signal.SIGINT)
ABSENT, OPEN, SHUT, LOCKED = range(-1, 3)
"""Positions of the gate: there is no handler; Ctrl-C passes; it waits; it waits at interruption points, too."""


class SigintGate:
    """Handler of Ctrl-C. There is one per process, as there is one SIGINT handler."""

    __slots__ = ("_previous", "deferred", "position", "thread")

    def __init__(self) -> None:
        self.position = ABSENT
        self.thread = 0
        """Identity of the main thread while the handler is installed."""
        self.deferred: tuple[int, FrameType | None] | None = None
        self._previous: Callable[[int, FrameType | None], object] | None = None

    def install(self) -> bool:
        """Install the handler. Return False in a thread that handles no signals, or if Ctrl-C is ignored."""
        if self.thread or threading.current_thread() is not threading.main_thread():
            return False
        handler = _signal.getsignal(CTRL_C)
        if not callable(handler):
            return False
        if handler != self._handle:  # else Ctrl-C struck before it was removed
            self._previous = handler
            _signal.signal(CTRL_C, self._handle)
        self.thread = get_ident()
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        waits = self.position >= SHUT and self.deferred is None
        self.deferred = number, frame
        if not waits:
            self.raise_deferred()

    def raise_deferred(self) -> None:
        """Let a deferred Ctrl-C, if there is one, take effect now."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None and self._previous is not None:
            self._previous(*deferred)

    def leave(self) -> None:
        """End the outermost section of a call, or a part of one that is not the user's."""
        if self.position == ABSENT:
            self.thread = 0
            if _signal.getsignal(CTRL_C) == self._handle:  # else the user has set another one
                _signal.signal(CTRL_C, self._previous)
        self.raise_deferred()


GATE: Final = SigintGate()


class deferring_sigint:
    """Context of the engine's own code: Ctrl-C takes effect at its end. See [Note: Ctrl-C]."""

    __slots__ = ("_before",)
    _inside = SHUT

    def __enter__(self) -> None:
        self._before = None
        if GATE.thread == get_ident() or GATE.install():
            self._before = GATE.position
            if self._before != LOCKED:
                GATE.position = self._inside

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            GATE.position = self._before
            if self._before <= OPEN and (GATE.deferred is not None or self._before == ABSENT):
                GATE.leave()


class uninterruptible(deferring_sigint):
    """Context that is a whole: without interruption points, and without user code that is interruptible."""

    __slots__ = ()
    _inside = LOCKED


class interruptible(deferring_sigint):
    """Context of the user's code inside the engine's: Ctrl-C takes effect at once."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._before = None
        if GATE.thread == get_ident():
            if GATE.deferred is not None and GATE.position == SHUT:
                GATE.raise_deferred()
            self._before = GATE.position
            if self._before != LOCKED:
                GATE.position = OPEN


class managing(deferring_sigint):
    """Context without gradients and inference mode, since tensors created in it outlive the user's mode.

    Ctrl-C takes effect at its end. A class, and not `torch.no_grad`: it is entered at every operator, and so does by
    itself what the methods of its superclass do.
    """

    __slots__ = ("_grad", "_inference")

    def __enter__(self) -> None:
        if GATE.thread == get_ident():
            self._before = GATE.position
            if self._before != LOCKED:
                GATE.position = SHUT
        else:
            super().__enter__()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(kind, error, trace)
        if self._before is not None and self._before != ABSENT:
            GATE.position = self._before
            if GATE.deferred is None:
                return
        super().__exit__(kind, error, trace)


def interruption_point() -> None:
    """Let a Ctrl-C that waits take effect now, unless an uninterruptible section is running."""
    if GATE.deferred is not None and GATE.position == SHUT and GATE.thread == get_ident():
        GATE.raise_deferred()
