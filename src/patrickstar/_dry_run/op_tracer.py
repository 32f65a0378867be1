"""Operator tracer for dry runs: counts the time and memory of each operator that runs on meta tensors."""

import math
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

from patrickstar._dry_run.host_time import HostClock
from patrickstar._dry_run.packed_products import is_packed_product, product_sides
from patrickstar._dry_run.simulated_attention import attention_on
from patrickstar._dry_run.simulated_blocks import SimulatedBlocks
from patrickstar._hardware.cpu_allocator import CpuAllocator
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation


@dataclass(frozen=True)
class OpCost:
    """Time and extra memory of one operator."""

    seconds: float
    """Time on the device."""
    scratch_bytes: int = 0
    """Temporary memory while it runs."""
    first_bytes: int = 0
    """Temporary memory of its first run in a process, when libraries initialize."""
    retained_bytes: int = 0
    """Memory that libraries retain after the first run: compiled code and caches."""
    results: tuple[tuple[int, torch.dtype], ...] = ()
    """Storage size and dtype of its results on the real device; some operators give others on the meta device."""
    launch_s: float = 0.0
    """Time of the host until the operator is in the device's queue; a part of `seconds` where the host computes."""


OpCosts = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], OpCost]
"""Cost model: (operator, args, kwargs, result) -> cost."""

_FREE_OPS = {
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
"""Operators other than views that touch no bytes."""


def is_free(func: Any) -> bool:
    """Return whether an operator touches no bytes: views and plain allocations."""
    return func.is_view or func.overloadpacket in _FREE_OPS


_COUNTED_AS = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
"""Products in place, which the registry does not have, and those that have as many operations."""


def operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the multiplications and additions of an operator's matrix products."""
    aten = torch.ops.aten
    if is_packed_product(func):
        return 2 * math.prod(product_sides(args))
    if func.overloadpacket in (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
    ):
        return int(sdpa_flop_count(*_with_all_heads(args[:3])))
    if func.overloadpacket in (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_flash_attention_backward,
    ):
        return int(sdpa_backward_flop_count(*_with_all_heads(args[:4])))
    count = flop_registry.get(_COUNTED_AS.get(func.overloadpacket, func.overloadpacket))
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def matrix_size(func: Any, args: tuple[Any, ...]) -> int | None:
    """Return the smallest side of the multiplied matrices; None for batched products and other operators."""
    if is_packed_product(func):
        return min(product_sides(args))
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 2]
    return min(side for matrix in matrices for side in matrix.shape) if len(matrices) >= 2 else None


def _with_all_heads(tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of operands of attention, of which keys and values may have fewer heads, one for several."""
    heads = max(tensor.shape[-3] for tensor in tensors)
    return [(*tensor.shape[:-3], heads, *tensor.shape[-2:]) for tensor in tensors]


def touched_bytes(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes, each tensor counted once."""
    return sum(tensor.nbytes for tensor in tensors_of((args, kwargs, out)))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of operands or results."""
    if isinstance(value, torch.Tensor):  # as of most operators, of which a dry run has millions
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def number_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the tensors that PyTorch makes of numbers which an operator takes in place of tensors.

    They live until the operator has returned to its caller, in a dry run as in a run.
    """
    numbers = 0
    for declared, value in zip(func._schema.arguments, args, strict=False):
        numbers += isinstance(value, int | float) and isinstance(declared.type, torch.TensorType)
    return 8 * numbers


DEVICE_GRAIN_BYTES = 512
"""Rounding of the CUDA caching allocator."""


# [Note: real tensors in a dry run]
# A dry run of a machine without a GPU simulates the tensors of this process's own device. Some of these are real even
# then: random states, integers that the user's code creates, and the user's batch. The process's allocator counts those
# that are allocated during the dry run; the values of integers that the dry run itself keeps are subtracted. A batch
# that was allocated before counts from its first use, and its copy on the meta device does not.


class TensorMeter:
    """`Meter` that counts current and peak bytes of live tensors, rounded up to a granularity.

    With an `allocator`, real CPU tensors count too. See [Note: real tensors in a dry run].
    """

    source = "bytes of tensors"
    counts_freed = False

    def __init__(self, grain_bytes: int = 1, allocator: CpuAllocator | None = None) -> None:
        self.grain_bytes = grain_bytes
        self.allocator = allocator
        self.peak_bytes = 0
        self._known: dict[int, tuple[int, int]] = {}
        """Bytes of a storage, 0 if it is older than the last calibration, and of its block."""
        self.blocks = SimulatedBlocks()
        self.calibrate(0)

    @property
    def live_bytes(self) -> int:
        """Bytes of live tensors since the last calibration."""
        return self._meta_bytes + (0 if self._real is None else self._real.live_bytes)

    def _note_peak(self, more_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)

    def track(self, tensor: torch.Tensor, nbytes: int | None = None) -> None:
        """Count a tensor's storage, of `nbytes` if given, until the last tensor that shares it is freed."""
        storage = tensor.untyped_storage()
        real = self.allocator is not None and tensor.device.type == "cpu"
        self._track(storage, 0 if real else storage.nbytes() if nbytes is None else nbytes)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a real tensor of the dry run itself, which the allocator counts."""
        if self.allocator is not None:
            self._track(tensor.untyped_storage(), -tensor.untyped_storage().nbytes())

    def track_batch(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Count a real tensor at its first use, unless the allocator counts it, and not its copy."""
        self._track(source.untyped_storage(), source.untyped_storage().nbytes())
        self._track(copy.untyped_storage(), 0)

    def _track(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata in self._known:
            return
        nbytes = -(-nbytes // self.grain_bytes) * self.grain_bytes
        self._known[storage._cdata] = nbytes, self._take_block(nbytes)
        self._meta_bytes += nbytes
        self._note_peak()
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def _take_block(self, nbytes: int) -> int:
        return 0 if self.allocator is None else self.blocks.take(nbytes, self.live_bytes)

    def add_transient(self, nbytes: int) -> None:
        self._note_peak(nbytes)
        self.blocks.free(self._take_block(nbytes), self.live_bytes)

    def add_persistent(self, nbytes: int) -> None:
        self._meta_bytes += nbytes
        self._note_peak()

    def _forget(self, key: int) -> None:
        nbytes, block = self._known.pop(key)
        self._meta_bytes -= nbytes
        self.blocks.free(block, self.live_bytes)

    def calibrate(self, chunk_bytes: int) -> None:
        self._meta_bytes = 0
        self._known = {key: (0, block) for key, (_, block) in self._known.items()}
        self._real = None if self.allocator is None else self.allocator.counter()
        self.restart()

    def now(self, chunk_bytes: int) -> int:
        self._note_peak()
        return self.live_bytes

    def peak(self, chunk_bytes: int) -> int:
        self._note_peak()
        return self.peak_bytes

    def restart(self) -> None:
        self.peak_bytes = self.live_bytes

    def reclaim(self) -> None:
        """Do nothing: freed memory does not count."""

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        """Return no fragmentation: that of a real device is part of what libraries use."""
        return NO_FRAGMENTATION

    def limit(self, nbytes: int) -> None:
        self.blocks.limit(nbytes, self.live_bytes)

    def close(self) -> None:
        """Do nothing."""


# [Note: values of integers]
# Models branch on values of positions, masks and labels ("is this sequence packed?"). Operators whose inputs are all
# integers are therefore also computed on real CPU tensors beside the meta tensors; their cost is small. Values of
# floating-point tensors are unknown in a dry run, and reading one is an error.


_INTEGER_DTYPES = (torch.int64, torch.int32, torch.bool)
"""Dtypes of positions, masks and labels. uint8 is excluded: it is the dtype of raw chunk memory."""


class IntegerValues:
    """Values of integer meta tensors. See [Note: values of integers]."""

    def __init__(self, meter: TensorMeter) -> None:
        self._known = WeakTensorKeyDictionary()
        self._meter = meter

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the result of an operator whose inputs and outputs are all integers."""
        if isinstance(out, torch.Tensor) and out.dtype not in _INTEGER_DTYPES:
            return
        results = tensors_of(out)
        if not results or any(leaf.dtype not in _INTEGER_DTYPES for leaf in results):
            return
        inputs: list[Any] = []
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and leaf not in self._known:
                return
            inputs.append(self._value(leaf))
        args, kwargs = pytree.tree_unflatten(inputs, pytree.tree_structure((args, kwargs)))
        values = pytree.tree_leaves(func(*args, **kwargs))
        for leaf, value in zip(pytree.tree_leaves(out), values, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self._known[leaf] = value
                self._meter.leave_out(value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self._known[leaf] if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf

    def item(self, tensor: torch.Tensor) -> Any:
        """Return the value of a one-element tensor; raise NotImplementedError if it is unknown."""
        if tensor not in self._known:
            raise NotImplementedError(f"the model reads a value of a {tensor.dtype} tensor, known only in a real run")
        return self._known[tensor].item()


class OpTracer(TorchDispatchMode):
    """Dispatch mode that meters each operator's memory and passes its cost to `advance`.

    Args:
        host: Measures the time between operators. Default None: only operators take time.
        wait: Called before a value is read, for which the host of a run waits.
    """

    def __init__(
        self,
        meter: TensorMeter,
        costs: OpCosts,
        advance: Callable[[OpCost], None],
        host: HostClock | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter, self.costs, self.advance = meter, costs, advance
        self.host, self.wait = host, wait
        self.values = IntegerValues(meter)
        self._seen_costs: set[int] = set()
        self.scratch_bytes = 0
        """Temporary memory of the last operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        host = self.host
        if host is None:
            return self._trace(func, args, kwargs or {})
        host.enter()
        try:
            return self._trace(func, args, kwargs or {})
        finally:
            host.leave()

    def _trace(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.wait()
            return self.values.item(args[0])
        # Some meta kernels are written in Python: the operators that they call must not count as parameter accesses.
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            self.values.follow(func, args, kwargs, out)
            cost = None if is_free(func) else self.costs(func, args, kwargs, out)
        if func is torch.ops.aten._to_copy.default and self.meter.allocator is not None and not args[0].is_meta:
            self.meter.track_batch(args[0], out)
        if cost is not None and cost.results:
            out = _with_dtypes(out, [dtype for _, dtype in cost.results])
            for tensor, (nbytes, _) in zip(tensors_of(out), cost.results, strict=True):
                self.meter.track(tensor, nbytes)
        else:
            for tensor in tensors_of(out):
                self.meter.track(tensor)
        if self.host is not None:
            self.host.add(self.host.costs.view_s if cost is None else cost.launch_s)
        if cost is not None:
            self._count_memory(cost, func, args)
            if self.host is not None:
                self.host.add(self.host.costs.fresh_s * self.meter.blocks.take_fresh())
            self.advance(cost)
        return out

    def _count_memory(self, cost: OpCost, func: Any, args: tuple[Any, ...]) -> None:
        """Count the extra memory of one operator; equal operators share one `OpCost` object."""
        first = id(cost) not in self._seen_costs and (cost.first_bytes or cost.retained_bytes)
        self.scratch_bytes = cost.first_bytes if first else cost.scratch_bytes
        if self.scratch_bytes and self.meter.allocator is not None:  # which counts tensors of numbers already
            self.scratch_bytes = max(0, self.scratch_bytes - number_bytes(func, args))
        self.meter.add_transient(self.scratch_bytes)
        if first:
            self._seen_costs.add(id(cost))
            self.meter.add_persistent(cost.retained_bytes)


def _with_dtypes(out: Any, dtypes: list[torch.dtype]) -> Any:
    """Return an operator's meta results with the dtypes that it gives them on the real device."""
    if all(tensor.dtype is dtype for tensor, dtype in zip(tensors_of(out), dtypes, strict=True)):
        return out
    remaining = iter(dtypes)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype = next(remaining)
        return leaf if leaf.dtype is dtype else torch.empty_like(leaf, dtype=dtype)

    return pytree.tree_map(convert, out)


@contextmanager
def trace_operators(tracer: OpTracer, device_type: str) -> Iterator[None]:
    """Trace all operators in the context, including those of autograd.

    Attention is replaced so that it uses the kernel of the real device type; for meta tensors PyTorch would choose
    another. The dispatch mode cannot do this, because autograd leaves the mode during recomputation. For meta tensors
    PyTorch also omits the random state that a recomputation saves; it is saved as on a CPU.
    """
    functional: Any = torch.nn.functional
    real = functional.scaled_dot_product_attention
    random: Any = torch.random
    real_fork = random.fork_rng

    def fork_rng(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cpu"
        return real_fork(*args, **kwargs)

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = (
            attention_on(device_type, query, *args, **kwargs) if query.is_meta else real(query, *args, **kwargs)
        )
        return out

    functional.scaled_dot_product_attention, random.fork_rng = attention, fork_rng
    try:
        with tracer:
            yield
    finally:
        functional.scaled_dot_product_attention, random.fork_rng = real, real_fork
