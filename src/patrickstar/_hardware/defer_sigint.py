"""Deferral of Ctrl-C, which can strike between any two bytecodes, past sections that must not be interrupted."""

# The module behind `signal`: that one's enums cost ten times as much, and this runs at every operator.
import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CTRL_C = int(signal.SIGINT)


class SigintHandler:
    """Handler of Ctrl-C for a call into the engine: sections within the call need not install one each.

    It defers the first Ctrl-C to the end of a section, but not a second one: the first may wait for a dead disk.
    """

    installed: "SigintHandler | None" = None
    """There is one SIGINT handler per process."""

    def __init__(self, section: bool = False) -> None:
        self._section = section
        self._previous: Callable[[int, FrameType | None], object] | None = None
        self.deferred: tuple[int, FrameType | None] | None = None
        self.thread = 0

    def __enter__(self) -> None:
        if SigintHandler.installed is not None or threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread only
        handler = _signal.getsignal(CTRL_C)
        if callable(handler):
            self._previous, self.thread = handler, threading.get_ident()
            _signal.signal(CTRL_C, self._handle)
            SigintHandler.installed = self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self._section or DeferSigint.active) and self.deferred is None:
            self.deferred = number, frame
        elif self._previous is not None:
            self.deferred = None
            self._previous(number, frame)

    def raise_deferred(self) -> None:
        """Handle a deferred Ctrl-C now."""
        if self.deferred is not None and self._previous is not None:
            deferred, self.deferred = self.deferred, None
            self._previous(*deferred)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            SigintHandler.installed = None
            if _signal.getsignal(CTRL_C) == self._handle:
                _signal.signal(CTRL_C, self._previous)
            self.raise_deferred()


class DeferSigint:
    """Section that must not be interrupted: Ctrl-C takes effect at its end."""

    active = False
    """True while the main thread is in such a section."""

    def __init__(self) -> None:
        self._handler: SigintHandler | None = None
        self._entered = False

    def __enter__(self) -> None:
        if DeferSigint.active or threading.current_thread() is not threading.main_thread():
            return
        if SigintHandler.installed is None:
            self._handler = SigintHandler(section=True)
            self._handler.__enter__()
        self._entered = DeferSigint.active = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            return
        DeferSigint.active = False
        if self._handler is not None:
            self._handler.__exit__(kind, error, trace)
        elif SigintHandler.installed is not None:
            SigintHandler.installed.raise_deferred()


def defer_sigint(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function a section that Ctrl-C does not interrupt."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if DeferSigint.active:
            return function(*args, **kwargs)
        handler = SigintHandler.installed
        if handler is None or handler.thread != threading.get_ident():
            with DeferSigint():
                return function(*args, **kwargs)
        DeferSigint.active = True
        try:
            return function(*args, **kwargs)
        finally:
            DeferSigint.active = False
            if handler.deferred is not None:
                handler.raise_deferred()

    return wrapper


def handle_sigint(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function a call into the engine, which installs the handler for all sections within it."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with SigintHandler():
            return function(*args, **kwargs)

    return wrapper
