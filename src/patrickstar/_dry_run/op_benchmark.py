"""Measured operator costs: each distinct operator runs on its own test tensors, timed and metered."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._dry_run.device_timer import OUT_OF_CACHE_BYTES, DeviceTimer
from patrickstar._dry_run.op_tracer import OpCost, OpCosts, tensors_of, touched_bytes
from patrickstar._hardware.memory_meter import Meter
from patrickstar._tiers.hardware import Hardware

MIN_RUNS = 3
MAX_RUNS = 100
MIN_TOTAL_S = 0.03
"""An operator is timed at least `MIN_RUNS` times, then until `MIN_TOTAL_S` or `MAX_RUNS` is reached."""


class OpBenchmark:
    """Operator costs on a CPU or GPU, measured once per distinct set of shapes."""

    def __init__(self, device: torch.device, memory_bandwidth: float, fallback: OpCosts, *, timed: bool = True) -> None:
        self.device = device
        self.timed = timed
        """False to measure memory only: the time of an operator then follows from its traffic."""
        self.memory_bandwidth = memory_bandwidth
        self.fallback = fallback
        """Cost model for operators that cannot run in isolation."""
        self._hardware = Hardware(device)
        self.meter: Meter = self._hardware.meter()
        self._libraries_allocate = device.type != "cpu" or self.meter.counts_freed
        """True if a first run may allocate memory that libraries keep. The allocator of CPU tensors counts no such."""
        accelerator = self._hardware.accelerator
        self.timer = DeviceTimer(accelerator) if timed and accelerator is not None else None
        """Timer of operators on an accelerator; a CPU's operators are timed by the clock."""
        self.known: dict[Any, OpCost] = {}
        self.estimated: set[str] = set()
        """Names of operators that could not run in isolation, or whose tensors the machine can't hold."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = func, structure, tuple(_signature(leaf) for leaf in leaves)
        if key not in self.known:
            self.known[key] = self._measure(func, leaves, structure, (args, kwargs, out))
        return self.known[key]

    def _measure(self, func: Any, leaves: list[Any], structure: Any, call: tuple[Any, Any, Any]) -> OpCost:
        if touched_bytes(*call) > self._hardware.free_device_bytes():
            self.estimated.add(str(func))
            return self.fallback(func, *call)
        with torch.no_grad(), _disable_current_modes():
            try:

                def new_run() -> tuple[Callable[[], Any], Any]:
                    """Return a function that runs the operator on operands of its own, and these operands."""
                    args, kwargs = pytree.tree_unflatten([self._materialize(leaf) for leaf in leaves], structure)
                    return partial(func, *args, **kwargs), (args, kwargs)

                run, operands = new_run()
                first_bytes, retained_bytes, results = self._measure_memory(run, operands)
                scratch_bytes = first_bytes
                if self._libraries_allocate:
                    scratch_bytes, _, results = self._measure_memory(run, operands)
                # Repeated runs find all operands in the cache. In a training step gigabytes pass between two accesses
                # of a tensor, so memory bandwidth is the lower bound.
                nbytes = touched_bytes(*call)
                seconds, launch_s = nbytes / self.memory_bandwidth, 0.0
                if self.timer is not None:
                    device_s, launch_s = self._time_on_device(self.timer, run, lambda: new_run()[0], nbytes)
                    seconds = max(device_s, seconds)
                elif self.timed:
                    seconds = max(self._time(run), seconds)
                return OpCost(seconds, scratch_bytes, first_bytes, retained_bytes, results, launch_s)
            except (RuntimeError, NotImplementedError, IndexError, TypeError):
                self.estimated.add(str(func))
                return self.fallback(func, *call)

    def _measure_memory(
        self, run: Callable[[], Any], inputs: Any
    ) -> tuple[int, int, tuple[tuple[int, torch.dtype], ...]]:
        """Return a run's peak bytes beyond its results, the bytes that remain, and its results' sizes and dtypes."""
        self.meter.reclaim()
        before = self.meter.now(0)
        self.meter.restart()
        out = run()
        peak = self.meter.peak(0)
        new_bytes = _new_bytes(inputs, out)
        results = tuple((tensor.untyped_storage().nbytes(), tensor.dtype) for tensor in tensors_of(out))
        del out
        self.meter.reclaim()
        return max(0, peak - before - new_bytes), max(0, self.meter.now(0) - before), results

    def _time_on_device(
        self, timer: DeviceTimer, run: Callable[[], Any], new_run: Callable[[], Callable[[], Any]], nbytes: int
    ) -> tuple[float, float]:
        """Return the seconds of a run on the device and of its launch. See [Note: time on a device]."""
        run_s = max(timer.measure([run], MIN_RUNS))
        count = min(MAX_RUNS, max(MIN_RUNS, int(MIN_TOTAL_S / run_s) if run_s else MAX_RUNS))
        most_bytes = min(OUT_OF_CACHE_BYTES + nbytes, self._hardware.free_device_bytes())
        sets = min(count, most_bytes // max(1, nbytes))
        return timer.measure([run, *(new_run() for _ in range(sets - 1))], count)

    def _time(self, run: Callable[[], Any]) -> float:
        """Return the median time of a run on the CPU.

        Its results take memory that the allocator caches. Without a limit the allocator caches nothing, and each run
        would include the page faults of its results, which are counted apart: see [Note: fresh pages].
        """
        times: list[float] = []
        self.meter.limit(self._hardware.free_device_bytes())
        try:
            while len(times) < MIN_RUNS or (sum(times) < MIN_TOTAL_S and len(times) < MAX_RUNS):
                start_s = time.perf_counter()
                run()
                times.append(time.perf_counter() - start_s)
        finally:
            self.meter.close()
        return median(times)

    def _materialize(self, leaf: Any) -> Any:
        """Return a tensor of the same shape, strides and dtype, with values that are valid for any operator."""
        if isinstance(leaf, torch.device):
            return self.device if leaf.type == "meta" else leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf
        extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
        numel = extent if leaf.numel() else 0
        if leaf.dtype.is_floating_point and self.timed:  # zeros would be fast and easy on the caches
            memory = torch.empty(numel, dtype=leaf.dtype, device=self.device).uniform_(-1.0, 1.0)
        else:
            memory = torch.zeros(numel, dtype=leaf.dtype, device=self.device)
        return memory.as_strided(leaf.shape, leaf.stride())


def _new_bytes(inputs: Any, out: Any) -> int:
    """Return the bytes of those results that do not share storage with an input."""
    known = {leaf.untyped_storage()._cdata for leaf in tensors_of(inputs)}
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in tensors_of(out)}
    return sum(nbytes for key, nbytes in storages.items() if key not in known)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return repr(leaf)
