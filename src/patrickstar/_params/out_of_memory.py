"""Out-of-memory errors raised although the budgets were kept: another user of the device, or a growing operator."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from patrickstar._hardware.sigint_gate import managing
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar.errors import BudgetError

OTHER_ALLOCATORS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",
)
"""Messages of out-of-memory errors that have no class of their own: PyTorch's CPU allocator, cuBLAS, cuDNN, the CUDA
driver (which loads kernels at their first launch), Triton's launcher, and NCCL."""

LISTS_OF_BLOCK = ("weak_holders", "x_metadatas", "recomputed", "recomp_counter")
"""Lists of a block under `torch.utils.checkpoint`, as PyTorch 2.11 to 2.13 name them."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in PyTorch's allocator or in a library that allocates by itself."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OTHER_ALLOCATORS)


def explain(operation: str, data: LocalShards, error: BaseException) -> BudgetError:
    """Return a BudgetError that states how device memory was used when `operation` failed to allocate."""
    manager = data.manager
    non_model_bytes = data.tracer.meter.now(manager.cache.resident_bytes)
    return BudgetError(
        f"{operation} ran out of memory: chunks use {manager.device_tier.used} bytes of the device, non-model data "
        f"{non_model_bytes} bytes; the budget is {manager.device_tier.budget_bytes} bytes. "
        f"Lower device_memory if other processes use this device, or use activation checkpointing or a smaller "
        f"batch. PyTorch reported: {error}"
    )


class SavedByCheckpoint:
    """Tensors that a block under `torch.utils.checkpoint` has saved so far.

    A checkpoint knows saved tensors by their number in the block, in its forward and in its recomputation. An operator
    that runs out of memory may have saved some, and saves them again when it is tried again: from there on each tensor
    of the recomputation would be taken for one before it, without an error where shapes are alike. Hence what a failed
    operator has saved is taken back. PyTorch has no interface for it: the lists are those of its hooks. Where another
    version of it has others, an operator is not tried again.
    """

    def __init__(self, pack_hook: Callable[..., Any]) -> None:
        hook: Any = inspect.unwrap(pack_hook)
        names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
        variables = dict(zip(names, getattr(hook, "__closure__", None) or (), strict=False))
        self._recomputation = variables["gid"].cell_contents if "gid" in variables else None
        cell = variables.get("frame" if self._recomputation is None else "target_frame_ref")
        block = None if cell is None else cell.cell_contents
        self._block: Any = block if block is None or self._recomputation is None else block()
        self.known = all(hasattr(self._block, name) for name in LISTS_OF_BLOCK)
        """True if these are the hooks of a version whose lists are known."""
        self._count = self._saved_count() if self.known else 0

    def _saved_count(self) -> int:
        of_forward = self._recomputation is None
        return len(self._block.weak_holders) if of_forward else self._block.recomp_counter[self._recomputation]

    def forget(self) -> None:
        """Forget what has been saved since."""
        block, count = self._block, self._count
        if self._recomputation is None:
            del block.weak_holders[count:], block.x_metadatas[count:]
            return
        for number in range(count, self._saved_count()):
            holder = block.weak_holders[number]()
            if holder is not None:
                del block.recomputed[self._recomputation][holder.handles.pop(self._recomputation)]
        block.recomp_counter[self._recomputation] = count


def saved_by_checkpoint(pack_hook: Callable[..., Any]) -> SavedByCheckpoint | None:
    """Return what the block under `torch.utils.checkpoint` has saved whose hook this is; None if it is another hook."""
    return SavedByCheckpoint(pack_hook) if pack_hook.__module__ == "torch.utils.checkpoint" else None


def check_retry(
    error: RuntimeError, func: Any, managed: ManagedParam, data: LocalShards, saved: SavedByCheckpoint | None
) -> None:
    """Raise the error of an operator on a parameter, unless it has run out of memory and can run once more.

    It can't in a block under a checkpoint of an unknown version, see `SavedByCheckpoint`, nor in linked processes,
    which evict alike.
    """
    if not is_out_of_memory(error):
        raise error
    if data.tracer.linked is not None or (saved is not None and not saved.known):
        raise explain(f"{getattr(func, '__name__', func)} on parameter {managed.name!r}", data, error) from None
    if saved is not None:
        saved.forget()


def run_again(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], managed: ManagedParam, data: LocalShards
) -> Any:
    """Evict all idle chunks and run an operator on a parameter that has run out of memory."""
    name = getattr(func, "__name__", func)
    with managing():
        data.manager.cache.free_memory()
        data.update_param_views()
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise explain(f"{name} on parameter {managed.name!r}, tried twice,", data, error) from None
