"""Line that says what is going on if the first step of a run takes long."""

import threading
from collections.abc import Callable

NOTICE_S = 20.0
"""Seconds of the first step after which the line is printed: longer than most wait without a sign of progress."""


class FirstStepNotice:
    """Timer that prints a line, unless it is ended before.

    Args:
        say: Prints the line; called in a thread of its own.
        after_s: Seconds until then.
    """

    def __init__(self, say: Callable[[], None], after_s: float = NOTICE_S) -> None:
        self._timer = threading.Timer(after_s, say)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def end(self) -> None:
        """End the timer. Without effect on one that has printed, or was ended."""
        self._timer.cancel()
