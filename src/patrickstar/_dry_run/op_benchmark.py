"""What operators cost on this machine: each distinct one is run on tensors of its own, timed and metered."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._dry_run.machine_profile import elapsed_s
from patrickstar._dry_run.op_tracer import OpCost, OpCosts, touched_bytes
from patrickstar._memory.memory_meter import Meter, default_meter

LEAST_RUNS = 3
MOST_RUNS = 100
ENOUGH_S = 0.03
"""An operator is timed at least so often, and until so much time was spent on it, or so many runs."""


class OpBenchmark:
    """Costs of operators on a CPU, or on a GPU, measured once for each distinct set of shapes."""

    def __init__(self, device: torch.device, memory_bandwidth: float, fallback: OpCosts) -> None:
        self.device = device
        self.memory_bandwidth = memory_bandwidth
        self.fallback = fallback
        """What an operator takes that can't be run by itself."""
        self.meter: Meter = default_meter(device)
        self.known: dict[Any, OpCost] = {}
        self.estimated: set[str] = set()
        """Names of operators that could not be run by themselves."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = func, structure, tuple(_signature(leaf) for leaf in leaves)
        if key not in self.known:
            self.known[key] = self._measured(func, leaves, structure, (args, kwargs, out))
        return self.known[key]

    def _measured(self, func: Any, leaves: list[Any], structure: Any, told: tuple[Any, Any, Any]) -> OpCost:
        with torch.no_grad(), _disable_current_modes():
            try:
                args, kwargs = pytree.tree_unflatten([self._real(leaf) for leaf in leaves], structure)
                made = _made_bytes(told[:2], told[2])
                first, kept = self._took(lambda: func(*args, **kwargs), made)
                scratch, _ = self._took(lambda: func(*args, **kwargs), made)
                # Timed again and again, an operator finds all in cache; in a step, where gigabytes pass between two
                # looks at a tensor, it waits for memory.
                from_memory = touched_bytes(*told) / self.memory_bandwidth
                seconds = max(self._time(lambda: func(*args, **kwargs)), from_memory)
                return OpCost(seconds, scratch, first, kept)
            except (RuntimeError, NotImplementedError, IndexError, TypeError):
                self.estimated.add(str(func))
                return self.fallback(func, *told)

    def _took(self, run: Callable[[], Any], made_bytes: int) -> tuple[int, int]:
        """What an operator takes beside its results while it runs, and what of that stays."""
        self.meter.reclaim()
        before = self.meter.now(0)
        self.meter.restart()
        out = run()
        peak = self.meter.peak(0)
        del out
        self.meter.reclaim()
        return max(0, peak - before - made_bytes), max(0, self.meter.now(0) - before)

    def _time(self, run: Callable[[], Any]) -> float:
        taken: list[float] = []
        while len(taken) < LEAST_RUNS or (sum(taken) < ENOUGH_S and len(taken) < MOST_RUNS):
            taken.append(elapsed_s(run, self.device))
        return median(taken)

    def _real(self, leaf: Any) -> Any:
        """A tensor of the same shape, strides and dtype, with values that are valid for any operator."""
        if isinstance(leaf, torch.device):
            return self.device if leaf.type == "meta" else leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf
        extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
        numel = extent if leaf.numel() else 0
        if leaf.dtype.is_floating_point:
            memory = torch.empty(numel, dtype=leaf.dtype, device=self.device).uniform_(-1.0, 1.0)
        else:
            memory = torch.zeros(numel, dtype=leaf.dtype, device=self.device)
        return memory.as_strided(leaf.shape, leaf.stride())


def _made_bytes(told: Any, out: Any) -> int:
    """Of the results, those that are in nobody's memory yet."""
    there = {leaf.untyped_storage()._cdata for leaf in _tensors(told)}
    made = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in _tensors(out)}
    return sum(nbytes for key, nbytes in made.items() if key not in there)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return repr(leaf)
