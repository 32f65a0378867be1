"""Channel of a given rate, for benchmarks: what it moves takes as long as its bytes do at that rate."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from patrickstar._memory.swap_file import SwapFile


class Channel:
    """One channel at a fixed rate, in bytes per second, which one thread uses at a time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.busy_s = 0.0
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def run(self, action: Callable[[], Any], nbytes: int) -> Any:
        """Run an action, and sleep until the channel has moved its bytes, after all others that asked before."""
        seconds = nbytes / self.rate
        with self._lock:
            self._free_at_s = end_s = max(self._free_at_s, time.perf_counter()) + seconds
            self.busy_s += seconds
        result = action()
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result


@contextmanager
def throttled(rate: float | None) -> Iterator[None]:
    """Limit reads and writes of the swap files of all engines, together, to a rate; None does nothing."""
    if rate is None:
        yield
        return
    channel, move = Channel(rate), SwapFile._move

    def slow_move(file: SwapFile, operation: str, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        channel.run(lambda: move(file, operation, offset, buffer, nbytes, label), nbytes)

    SwapFile._move = slow_move
    try:
        yield
    finally:
        SwapFile._move = move
