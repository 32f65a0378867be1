"""Limit on the time of a training run, which then ends at the end of a step."""

import math
import time
from collections.abc import Callable

from patrickstar.errors import ConfigError


class TimeLimit:
    """Clock of a run that ends at the end of a step, before `minutes` have passed.

    Args:
        minutes: The limit; None for none.
        clock: Returns seconds. The limit counts from the creation of this object.

    Raises:
        ConfigError: The limit is not a positive number.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None and not 0 < minutes < math.inf:
            raise ConfigError(f"--minutes {minutes:g} is not a positive number of minutes")
        self.minutes = minutes
        self._clock, self._started_s = clock, clock()

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return math.inf if self.minutes is None else self._started_s + 60 * self.minutes - self._clock()

    def is_due(self, step_s: float) -> bool:
        """Return whether another step, as long as the last one of `step_s` seconds, would end after the limit."""
        return step_s > self.left_s
