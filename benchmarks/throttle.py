"""Disk of a given rate, for benchmarks: reads and writes together take as long as their bytes do at that rate."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from patrickstar._memory.swap_file import SwapFile


class Throttle:
    """One channel at a fixed rate, in bytes per second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until the channel has moved these bytes, after all others that asked before."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self.rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


@contextmanager
def throttled(rate: float | None) -> Iterator[None]:
    """Limit the swap files of all engines to a rate; None does nothing."""
    if rate is None:
        yield
        return
    channel, move = Throttle(rate), SwapFile._move

    def slow_move(file: SwapFile, operation: str, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        move(file, operation, offset, buffer, nbytes, label)
        channel.wait(nbytes)

    SwapFile._move = slow_move
    try:
        yield
    finally:
        SwapFile._move = move
