"""Accelerator: streams, events, page-locked host memory, allocator and random state of one device beside the host."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar._layout.byte_size import format_size
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation

POLL_S = 50e-6
"""Seconds between two queries of an event whose wait may be ended."""

# [Note: waits for the device]
# A thread that waits for the device launches nothing meanwhile: the device runs out of work, and copies and updates
# that could overlap with it do not. So the host waits only where it needs bytes that the device has yet to write, and
# every wait is made by `Accelerator.wait`, which counts those of all threads but worker threads. Compute that needs
# the bytes of a copy is ordered after it on the device instead (`Accelerator.order`).


@dataclass(frozen=True)
class AllocatorStats:
    """State of the caching allocator, in bytes; all zero on a device without one."""

    allocated_bytes: int = 0
    """Allocated blocks."""
    reserved_bytes: int = 0
    """Memory reserved on the device, in use or not."""
    inactive_split_bytes: int = 0
    """Free parts of segments that are partly in use; they cannot be released to the device."""
    retries: int = 0
    """Number of times the device was out of memory and the allocator freed its cache and retried."""

    def __str__(self) -> str:
        return (
            f"the device's allocator has reserved {self.reserved_bytes} bytes ({format_size(self.reserved_bytes)}) of "
            f"the device, {self.allocated_bytes} of them in use and {self.inactive_split_bytes} in free parts of "
            f"segments in use; it has freed its cache and retried {self.retries} times"
        )


class TorchDevice:
    """One device beside the host, by the interface that PyTorch offers for every type of device (`torch.accelerator`).

    A subclass adds what PyTorch offers for one type only.

    Args:
        device: The device; without an index, the current one of its type.
    """

    max_lock_bytes = 1 << 62
    """Largest registration of page-locked memory, in bytes. No copy may cross the boundary between two."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device.type)
        self.index = self._current_index() if device.index is None else device.index
        self.device = torch.device(device.type, self.index)
        self.host_waits = 0
        """Number of waits for unfinished work of the device, in all threads but worker threads.
        See [Note: waits for the device]."""
        self._thread = threading.local()

    @property
    def name(self) -> str:
        """Product name of the device."""
        return str(self.module.get_device_name(self.index))

    @property
    def has_bf16(self) -> bool:
        """True if it has products in bf16, not emulated ones; also if PyTorch can't tell."""
        supported = getattr(self.module, "is_bf16_supported", None)
        if supported is None:
            return True
        with torch.accelerator.device_index(self.index):
            try:
                return bool(supported(including_emulation=False))
            except TypeError:  # not every type of device has the argument
                return bool(supported())

    # Threads

    def _current_index(self) -> int:
        return int(self.module.current_device())

    def start(self) -> None:
        """Prepare the device for an engine of the calling thread; call it before any allocation on the device."""
        self.enter_thread()

    def enter_thread(self) -> None:
        """Make the device current in the calling thread.

        A new thread's current device is the first one. Leaving a stream context in such a thread creates a context on
        the first device, which takes about 500 MiB of the memory of a CUDA device.
        """
        self.module.set_device(self.index)

    def enter_worker(self) -> None:
        """Make the device current in the calling worker thread, whose waits are not counted."""
        self._thread.is_worker = True
        self.enter_thread()

    # Streams and events

    def new_stream(self) -> torch.Stream:
        """Create a stream, ordered after nothing."""
        return torch.Stream(device=self.device)

    def current_stream(self) -> torch.Stream:
        """Return the calling thread's current stream."""
        return torch.accelerator.current_stream(self.index)

    @contextmanager
    def use(self, stream: torch.Stream, *, after_current: bool = True) -> Iterator[None]:
        """Issue the work of this context on `stream`, by default ordered after the current stream's work so far.

        The state is local to the thread, while that of `with stream:` would be shared by the threads that use it.
        """
        previous = self.current_stream()
        if after_current:
            stream.wait_stream(previous)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)

    def record(self, stream: torch.Stream | None = None, *, timed: bool = False) -> torch.Event:
        """Record an event behind the work so far of a stream, by default of the current one.

        A thread that waits for the event sleeps; it would take a core from updates on the host otherwise.

        Args:
            stream: The stream.
            timed: Let the event have a time; see `DeviceClock`.
        """
        event = torch.Event(device=self.device, blocking=True, enable_timing=timed)
        event.record(self.current_stream() if stream is None else stream)
        return event

    def order(self, event: torch.Event) -> None:
        """Order later work of the current stream after an event. The host does not wait."""
        self.current_stream().wait_event(event)

    def wait(self, event: torch.Event, check: Callable[[], None] | None = None) -> None:
        """Block the calling thread until an event has passed; count it.

        Args:
            check: Called again and again meanwhile. It raises an exception to end the wait.
        """
        if event.query():
            return
        self.host_waits += not getattr(self._thread, "is_worker", False)
        if check is None:
            event.synchronize()
            return
        while not event.query():
            check()
            time.sleep(POLL_S)

    def synchronize(self) -> None:
        """Block the calling thread until the device has finished all work."""
        torch.accelerator.synchronize(self.index)

    # Host memory

    def page_lock(self, address: int, nbytes: int) -> list[int] | None:
        """Page-lock host memory for copies that run beside the host.

        Returns:
            Addresses of the registrations, each of at most `max_lock_bytes`. None, after a warning, if the memory can't
            be locked; nothing is locked then, and copies make the host wait.
        """
        warnings.warn(
            f"PyTorch offers no way to page-lock host memory for {self.device}: copies between it and the host make "
            f"the host wait",
            stacklevel=2,
        )
        return None

    def page_unlock(self, locked: list[int]) -> None:
        """Unlock the registrations of `page_lock`, after all work of the device has ended."""

    # Memory

    def _stats(self) -> dict[str, Any]:
        return torch.accelerator.memory_stats(self.index)

    @property
    def allocated_bytes(self) -> int:
        return int(self._stats()["allocated_bytes.all.current"])

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of `allocated_bytes` since the last reset."""
        return int(self._stats()["allocated_bytes.all.peak"])

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.index)

    def allocator_stats(self) -> AllocatorStats:
        stats = self._stats()
        names = "allocated_bytes", "reserved_bytes", "inactive_split_bytes"
        current = {name: int(stats[f"{name}.all.current"]) for name in names}
        return AllocatorStats(**current, retries=int(stats["num_alloc_retries"]))

    def free_bytes(self) -> int:
        """Return the free device memory plus the memory reserved by this process's allocator, in bytes."""
        return self._device_free_bytes() + self.allocator_stats().reserved_bytes

    def _device_free_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.index)[0])

    def release_cached_memory(self) -> None:
        torch.accelerator.empty_cache()

    @property
    def fragmentation(self) -> Fragmentation:
        """Fragmentation of the caching allocator, if what it reserves can be limited."""
        return NO_FRAGMENTATION

    def limit_reserved(self, owner: object, nbytes: int) -> None:
        """Limit the memory that the caching allocator reserves, until `unlimit_reserved` or until the owner ends."""

    def unlimit_reserved(self, owner: object) -> None:
        """Withdraw the limit of an owner."""

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        """Return the device bytes that its libraries keep after the first matrix products in `dtype`.

        Args:
            in_updates: Whether updates on the host run products on the device.
        """
        return 0


class DeviceClock:
    """Times of events of an accelerator in seconds of the host's clock.

    It waits for the device once, when it is created.

    Args:
        accelerator: The accelerator.
        seconds: The host's clock.
    """

    def __init__(self, accelerator: TorchDevice, seconds: Callable[[], float]) -> None:
        self._accelerator = accelerator
        self._start = self.event()
        self._start.synchronize()
        self._start_s = seconds()

    def event(self) -> torch.Event:
        """Record a timed event behind the work so far of the current stream."""
        return self._accelerator.record(timed=True)

    def seconds(self, event: torch.Event) -> float:
        """Return the time at which an event passed, which was recorded with `timed`."""
        return self._start_s + float(self._start.elapsed_time(event)) / 1e3
