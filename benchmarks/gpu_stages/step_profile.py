"""Profile of one step: host waits for the device, and the share of time that kernels and copies ran."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run a step under PyTorch's profiler; return counts of waits, and the time shares of kernels and copies.

    On a CPU only the profiler itself is tested.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as prof:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        duration_s = time.perf_counter() - start
    result: dict[str, Any] = {"profiled_s": duration_s}
    events = prof.events()
    assert events is not None
    for name in WAITS:
        result[name] = sum(1 for event in events if event.name == name)
    if cuda:
        on_device = [
            event
            for event in events
            # Annotations span the gaps between the kernels of their range.
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        copies = [event for event in on_device if event.name.startswith("Memcpy")]
        kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
        result["kernels"] = len(kernels)
        result["busy"] = _covered_s(kernels) / duration_s
        result["copying"] = _covered_s(copies) / duration_s
    return result


def _covered_s(events: list[Any]) -> float:
    """Return the seconds in which at least one of the events ran."""
    covered, end = 0.0, float("-inf")
    for begin, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered / 1e6
