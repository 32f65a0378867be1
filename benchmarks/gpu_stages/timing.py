"""Wall-clock timing of work on a device, synchronized before and after."""

import time
from collections.abc import Callable
from statistics import median

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all work launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(action: Callable[[], object], device: torch.device) -> float:
    """Return the time of a single call."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def seconds(action: Callable[[], object], device: torch.device, *, rounds: int = 7, inner: int = 1) -> float:
    """Return the median time of one call over `rounds` of `inner` calls each, after one warm-up round."""

    def calls() -> None:
        for _ in range(inner):
            action()

    return median([once(calls, device) / inner for _ in range(rounds + 1)][1:])
