"""Ctrl-C strikes between any two bytecodes; what must not be torn in two has it wait."""

# What `signal` wraps: its enums would cost ten times as much, and this is done at every operator.
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
    """Inside, the first Ctrl-C waits for the end; a second one does not, since the first may wait for a dead disk."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._struck: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # where Python handles no signals
        handler = _signal.getsignal(CTRL_C)
        if callable(handler) and not isinstance(getattr(handler, "__self__", None), DeferSigint):
            self._handler = handler
            _signal.signal(CTRL_C, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._struck is not None and self._handler is not None:
            self._handler(number, frame)
        self._struck = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _signal.signal(CTRL_C, self._handler)
        if self._struck is not None:
            self._handler(*self._struck)


def defer_sigint(function: Callable[P, R]) -> Callable[P, R]:
    """A function that Ctrl-C does not strike inside of. See `DeferSigint`."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        with DeferSigint():
            return function(*args, **kwargs)

    return whole
