"""What operators take on this machine: each distinct one is run on tensors of its own, and timed."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from patrickstar.engine.operators import is_free

LEAST_RUNS = 3
ENOUGH_S = 0.03
"""An operator is timed at least so often, and until so much time was spent on it."""


class OperatorTimes:
    """Seconds of operators on a CPU, or on a GPU, measured once for each distinct set of shapes."""

    def __init__(self, device: torch.device, fallback: Callable[..., float]) -> None:
        self.device = device
        self.fallback = fallback
        """What an operator takes that can't be run by itself."""
        self.known: dict[Any, float] = {}
        self.estimated: set[str] = set()
        """Names of operators that could not be run by themselves."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        if is_free(func):
            return 0.0
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = func, structure, tuple(_signature(leaf) for leaf in leaves)
        if key not in self.known:
            self.known[key] = self._measured(func, leaves, structure, (args, kwargs, out))
        return self.known[key]

    def _measured(self, func: Any, leaves: list[Any], structure: Any, told: tuple[Any, Any, Any]) -> float:
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            try:
                args, kwargs = pytree.tree_unflatten([self._real(leaf) for leaf in leaves], structure)
                return self._time(lambda: func(*args, **kwargs))
            except (RuntimeError, NotImplementedError, IndexError, TypeError):
                self.estimated.add(str(func))
                return self.fallback(func, *told)

    def _time(self, run: Callable[[], Any]) -> float:
        run()
        taken: list[float] = []
        while len(taken) < LEAST_RUNS or (sum(taken) < ENOUGH_S and len(taken) < 100):
            start = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            taken.append(time.perf_counter() - start)
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


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return repr(leaf)
