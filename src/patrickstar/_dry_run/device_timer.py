"""Times of operators on an accelerator: many runs between two events, and their launches apart."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch

from patrickstar._hardware.accelerator import TorchDevice

OUT_OF_CACHE_BYTES = 1 << 28
"""Memory whose accesses leave nothing else in a cache: as much as the largest of a GPU, 256 MiB."""
FILLS = (1, 8, 64)
"""Numbers of fills before timed runs, one after the other until the host is ahead. One takes from tens of microseconds
to a millisecond, as long as many launches; with more than these the queue itself would be full."""

# [Note: time on a device]
# A device works beside the host, which launches operators ahead. So an operator costs a device the time between events
# around many runs, if the device never waits for the host in between: the host launches them while the device still
# fills memory with zeros. The host's time of these launches is a cost of its own, and a step takes the longer of both.
# The allocator may free its cache for a run's results, which waits for the device and takes longer than most operators.
# In a step it does so once at most, not for every operator; so such runs are repeated.
#
# Runs use one set of operands after the other, so that these are not found in a cache: between two uses in a step
# others have passed.


class DeviceTimer:
    """Timer of work on the current stream of an accelerator. See [Note: time on a device].

    Args:
        accelerator: The accelerator.
        fill: Queues work that keeps the device busy. Default: it fills `OUT_OF_CACHE_BYTES` with zeros.
    """

    def __init__(self, accelerator: TorchDevice, fill: Callable[[], object] | None = None) -> None:
        self.accelerator = accelerator
        if fill is None:
            nbytes = min(OUT_OF_CACHE_BYTES, accelerator.free_bytes() // 2)
            fill = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device).zero_
        self._fill = fill

    def measure(self, actions: Sequence[Callable[[], object]], runs: int) -> tuple[float, float]:
        """Return the seconds of a run on the device, and those of its launch on the host.

        Args:
            actions: Equal ones with operands of their own, run in turn.
            runs: Number of runs, of which the means are taken.
        """
        device_s = launch_s = 0.0
        for fills in FILLS:
            retries = self.accelerator.allocator_stats().retries
            self.accelerator.synchronize()
            for _ in range(fills):
                self._fill()
            began = self.accelerator.record(timed=True)
            start_s = time.perf_counter()
            for action in islice(cycle(actions), runs):
                action()
            launch_s = (time.perf_counter() - start_s) / runs
            was_ahead = not began.query()
            ended = self.accelerator.record(timed=True)
            self.accelerator.synchronize()
            device_s = began.elapsed_time(ended) / 1e3 / runs
            if was_ahead and self.accelerator.allocator_stats().retries == retries:
                break
        return device_s, launch_s
