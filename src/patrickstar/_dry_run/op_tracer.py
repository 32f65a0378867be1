"""What operators would take, seen one by one as they run on tensors without bytes: seconds, and memory."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class OpCost:
    """What an operator takes beside its tensors."""

    seconds: float
    scratch_bytes: int = 0
    """Memory of its own while it runs."""
    first_bytes: int = 0
    """The same when it runs for the first time in a process, which is when libraries make themselves ready."""
    kept_bytes: int = 0
    """What libraries keep from then on: code made for these shapes, and caches."""


OpCosts = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], OpCost]
"""From an operator, its arguments and what it returned."""

_MADE_OF_NOTHING = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.set_,
    torch.ops.aten.resize_,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.lift_fresh,
}
"""What touches no byte, beside views."""


def is_free(func: Any) -> bool:
    """Whether an operator touches no bytes: a view, or memory that is only taken."""
    return func.is_view or func.overloadpacket in _MADE_OF_NOTHING


def operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Multiplications and additions of an operator's matrix products."""
    aten = torch.ops.aten
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(args[index].shape for index in range(4))))
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def matrix_size(args: tuple[Any, ...]) -> int | None:
    """The smallest side of the matrices that an operator multiplies; None where it multiplies none, or many at once."""
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 2]
    return min(side for matrix in matrices for side in matrix.shape) if len(matrices) >= 2 else None


def touched_bytes(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes of memory that an operator reads and writes, each tensor once."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))


HOST_GRAIN_BYTES = 4096
"""Memory on a CPU comes in pages, as far as the system can tell."""
DEVICE_GRAIN_BYTES = 512
"""The CUDA caching allocator rounds up to as many."""


class TensorMeter:
    """Counts the bytes of tensors that live, in whole grains, and the most there were. A `Meter`."""

    source = "bytes of tensors"
    caching = False

    def __init__(self, grain_bytes: int = 1, counts_freed: bool = False) -> None:
        self.grain_bytes = grain_bytes
        self.counts_freed = counts_freed
        """As the meter whose place it takes: that is looked at more often if so."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.baseline_bytes = 0
        self._known: dict[int, int] = {}

    def track(self, tensor: torch.Tensor) -> None:
        """A tensor has come: its memory counts until the last that shares it is gone."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = -(-storage.nbytes() // self.grain_bytes) * self.grain_bytes
        self.live_bytes += self._known[storage._cdata]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def add_transient(self, nbytes: int) -> None:
        """So much more was there for a moment."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)

    def add_persistent(self, nbytes: int) -> None:
        """So much more is there from now on."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)

    def calibrate(self, chunk_bytes: int) -> None:
        """What is there now is nobody's."""
        self.baseline_bytes = self.live_bytes

    def now(self, chunk_bytes: int) -> int:
        """Bytes of tensors."""
        return max(0, self.live_bytes - self.baseline_bytes)

    def peak(self, chunk_bytes: int) -> int:
        """The most since `restart`."""
        return max(0, self.peak_bytes - self.baseline_bytes)

    def restart(self) -> None:
        """Forget the peak."""
        self.peak_bytes = self.live_bytes

    def reclaim(self) -> None:
        """Nothing is kept for reuse."""

    def set_caching(self, allowed: bool) -> None:
        """Nor will it be."""


# [Note: values of integers]
# Models ask small questions of positions, masks and labels ("is this sequence packed?") and go on accordingly. So what
# follows from whole numbers alone is computed, beside the tensor without bytes; it is little beside what follows from
# numbers with a fraction, which is not. Asking for a value of those is an error, as nobody knows it before a run.


_WHOLE = (torch.int64, torch.int32, torch.bool)
"""What positions, masks and labels are made of. Bytes are chunks'."""


class IntegerValues:
    """The values of tensors of whole numbers that have no bytes. See [Note: values of integers]."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what an operator returned, if whole numbers are all that it has to do with."""
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not made or any(leaf.dtype not in _WHOLE for leaf in made):
            return
        found: list[Any] = []
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and leaf not in self._known:
                return
            found.append(self._value(leaf))
        args, kwargs = pytree.tree_unflatten(found, pytree.tree_structure((args, kwargs)))
        values = pytree.tree_leaves(func(*args, **kwargs))
        for leaf, value in zip(pytree.tree_leaves(out), values, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self._known[leaf] = value

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self._known[leaf] if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf

    def item(self, tensor: torch.Tensor) -> Any:
        """The one value of a tensor. Raises NotImplementedError if nobody knows it."""
        if tensor not in self._known:
            raise NotImplementedError(f"the value of a tensor of {tensor.dtype} is asked for, which only a run knows")
        return self._known[tensor].item()


class OpTracer(TorchDispatchMode):
    """Inside, every operator's memory is metered and its seconds are told to `spend`."""

    def __init__(self, meter: TensorMeter, costs: OpCosts, spend: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter, self.costs, self.spend = meter, costs, spend
        self.values = IntegerValues()
        self._cached_costs: set[int] = set()
        self.scratch_bytes = 0
        """What the last operator took of its own."""
        self.inside_s = 0.0
        """What was spent here: the rest of a step's time is Python's, autograd's and the engine's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        try:
            return self._see(func, args, kwargs or {})
        finally:
            self.inside_s += time.perf_counter() - start

    def _see(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.values.item(args[0])
        # Without bytes some operators are Python's, and their own operators are nobody's accesses.
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            self.values.follow(func, args, kwargs, out)
            cost = None if is_free(func) else self.costs(func, args, kwargs, out)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.meter.track(leaf)
        if cost is not None:
            self._take(cost)
            self.spend(cost.seconds)
        return out

    def _take(self, cost: OpCost) -> None:
        """Reckon with the memory of an operator that has run; equal ones have one and the same cost."""
        first = id(cost) not in self._cached_costs and (cost.first_bytes or cost.kept_bytes)
        self.scratch_bytes = cost.first_bytes if first else cost.scratch_bytes
        self.meter.add_transient(self.scratch_bytes)
        if first:
            self._cached_costs.add(id(cost))
            self.meter.add_persistent(cost.kept_bytes)


def _attention(
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    aten = torch.ops.aten
    if device_type == "cpu" and dropout_p == 0.0:
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        out: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
        return out
    if device_type == "cuda" and attn_mask is None:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


@contextmanager
def watching(watch: OpTracer, device_type: str) -> Iterator[None]:
    """Inside, operators are seen, those of autograd too.

    Attention takes the kernel that it takes on a real device: which one it is depends on the device's type, and for
    tensors without bytes it would be another. A mode could not see to that: autograd leaves it while it recomputes.
    """
    functional: Any = torch.nn.functional
    real = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = (
            _attention(device_type, query, *args, **kwargs) if query.is_meta else real(query, *args, **kwargs)
        )
        return found

    functional.scaled_dot_product_attention = attention
    try:
        with watch:
            yield
    finally:
        functional.scaled_dot_product_attention = real
