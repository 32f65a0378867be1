"""Timed mode of the strict device: rates of its links, and seconds of the operators that a thread calls.

[Note: timed mode]
With rates, each stream has a thread that runs its work in order, as early as order and waits allow, and sleeps until
the work's scheduled end. The schedule of a stream continues from scheduled ends and from the times at which the host
queued work, not from the times at which threads woke up: their delays do not add up. A copy between host and device
takes its bytes / the rate of its direction, and shares the link of this direction with other streams. An operator takes
the seconds that its thread was charged before (`charge`), or none. Arithmetic runs within these seconds; if it takes
longer, the stream is late, and catches up. Targets of queued copies to the host are not filled with NaN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar._dry_run.op_tracer import is_free


@dataclass(frozen=True)
class Rates:
    """Rates of copies between host and device, in bytes per second."""

    up: float
    """From the host to the device."""
    down: float
    """From the device to the host."""


class OperatorTimes(TorchDispatchMode):
    """Dispatch mode that charges each operator on the device before it is queued, in all threads of autograd.

    Args:
        seconds_of: Returns the seconds of (operator, args, kwargs, result); the result is known to its shape only.
        charge: Charges the calling thread's next operator; returns what was not taken of the last charge.
    """

    def __init__(self, seconds_of: Callable[[Any, Any, Any, Any], float], charge: Callable[[float], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.charged_s = 0.0
        """Seconds charged so far."""
        self._seconds_of, self._charge = seconds_of, charge
        self._known: dict[Any, float] = {}
        self._whole_s: float | None = None

    @contextmanager
    def as_one(self, seconds: float) -> Iterator[None]:
        """Return a context in which the first operator takes `seconds`, and the others none."""
        self._whole_s = seconds
        try:
            yield
        finally:
            self._whole_s = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A use of a parameter counts as an access where the model calls the operator, and not here again.
        with torch._C.DisableTorchFunctionSubclass():
            seconds = self._seconds(func, args, kwargs or {})
            self._charge(seconds)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.charged_s += seconds - self._charge(0.0)  # an operator may queue nothing

    def _seconds(self, func: Any, args: Any, kwargs: Any) -> float:
        if is_free(func):
            return 0.0
        leaves, structure = pytree.tree_flatten((args, kwargs))
        types = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        types |= {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        # A copy between host and device takes the seconds of its link. A read of a value only waits.
        if "strict" not in types or (is_copy and len(types) > 1) or func is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        if self._whole_s is not None:
            seconds, self._whole_s = self._whole_s, 0.0
            return seconds
        key = func, structure, tuple(_signature(leaf) for leaf in leaves)
        if key not in self._known:
            self._known[key] = self._seconds_of(func, *_on_meta(func, args, kwargs))
        return self._known[key]


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _on_meta(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return an operator's arguments and result on the meta device."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(convert, (args, kwargs))
    return args, kwargs, func(*args, **kwargs)
