"""Wall-clock time of work on a device, its queue emptied before and after."""

import time
from collections.abc import Callable
from statistics import median

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(act: Callable[[], object], device: torch.device, *, rounds: int = 7, inner: int = 1) -> float:
    """Return the median time of one `act`, of `rounds` of `inner` calls each, after one round that does not count."""
    taken = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(inner):
            act()
        synchronize(device)
        taken.append((time.perf_counter() - start) / inner)
    return median(taken[1:])


def once(act: Callable[[], object], device: torch.device) -> float:
    """Return the time of a single `act`."""
    synchronize(device)
    start = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - start
