"""One step under PyTorch's profiler: how often the host waited for the device, and how long the device was idle."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run a step; return counts of waits, and the shares of its time in which kernels and copies ran.

    On a CPU nothing is counted: only that the profiler runs is rehearsed.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as prof:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
    found: dict[str, Any] = {"profiled_s": took}
    events = prof.events()
    assert events is not None
    for name in WAITS:
        found[name] = sum(1 for event in events if event.name == name)
    if cuda:
        on_device = [
            event
            for event in events
            # Annotations span the gaps between the kernels of their range.
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        copies = [event for event in on_device if event.name.startswith("Memcpy")]
        kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
        found["kernels"] = len(kernels)
        found["busy"] = _covered_s(kernels) / took
        found["copying"] = _covered_s(copies) / took
    return found


def _covered_s(events: list[Any]) -> float:
    """Return how long at least one of them ran."""
    covered, end = 0.0, float("-inf")
    for begin, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered / 1e6
