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


class DeferSigint:
    """Context that defers the first Ctrl-C to its end, but not a second one: the first may wait for a dead disk."""

    active = False
    """True while the main thread is in such a context. There is one SIGINT handler per process, hence one flag."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._deferred: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if DeferSigint.active or threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread only
        handler = _signal.getsignal(CTRL_C)
        if callable(handler):
            self._handler = handler
            _signal.signal(CTRL_C, self._defer)
            DeferSigint.active = True

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._deferred is not None and self._handler is not None:
            self._handler(number, frame)
        self._deferred = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        DeferSigint.active = False
        _signal.signal(CTRL_C, self._handler)
        if self._deferred is not None:
            self._handler(*self._deferred)


def defer_sigint(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if DeferSigint.active:
            return function(*args, **kwargs)
        with DeferSigint():
            return function(*args, **kwargs)

    return wrapper
