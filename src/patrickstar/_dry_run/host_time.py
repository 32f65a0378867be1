"""Time of the host in a dry run: that of Python, autograd and the engine, without what the dry run itself adds."""

import time
from dataclasses import dataclass

# [Note: time of the host]
# A dry run executes the code of a real step but for its operators, so the time of that code is measured while it runs.
# Operators are stopped by a dispatch mode in Python, on meta tensors whose memory is counted: within the tracer no time
# counts, but each operator also takes time on its way to the tracer and back, of which a real operator takes a small
# part, and that part is in the operator's own cost, too. So what tracing adds to an operator is subtracted: steps of a
# small model are timed as in a dry run and for real, and differ by that (`measure_host`). All times are those of
# processors: while other programs have them, a step does not get longer.


@dataclass(frozen=True)
class HostCosts:
    """Seconds of single operations on the host, in a dry run and in a run."""

    dispatch_s: float
    """Seconds that each operator of a dry run takes longer than one of a run, outside of the tracer."""
    view_s: float
    """Seconds of an operator that touches no bytes, in a run."""
    meter_s: float
    """Seconds in which the meter of a run is read."""
    fresh_s: float = 0.0
    """Seconds that a byte of a new block takes more than that of a freed one. See [Note: fresh pages]."""


class HostClock:
    """Seconds that the code between operators takes. See [Note: time of the host]."""

    def __init__(self, costs: HostCosts) -> None:
        self.costs = costs
        self._left_s = time.thread_time()
        self._seconds = 0.0
        self.operators = 0
        """Number of operators since the start of the step."""

    def start(self) -> None:
        """Start a step."""
        self.operators, self._seconds, self._left_s = 0, 0.0, time.thread_time()

    def enter(self) -> None:
        """Stop: the tracer has been entered by an operator."""
        self.operators += 1
        self._seconds += time.thread_time() - self._left_s - self.costs.dispatch_s

    def leave(self) -> None:
        """Go on after an operator."""
        self._left_s = time.thread_time()

    def add(self, seconds: float) -> None:
        """Add seconds of a run that a dry run doesn't take."""
        self._seconds += seconds

    def end(self) -> None:
        """End a step: add the time since its last operator."""
        self._seconds += time.thread_time() - self._left_s

    def take(self) -> float:
        """Return the seconds since the last call.

        Less than nothing, where an operator's way was shorter than on average, is subtracted from later ones.
        """
        seconds = max(0.0, self._seconds)
        self._seconds -= seconds
        return seconds
