"""Out-of-memory errors raised although the budgets were kept: another user of the device, or a growing operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.modes import managing
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in PyTorch's allocator or in a library that allocates by itself."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OTHER_ALLOCATORS)


def explain(operation: str, data: ModelData, error: BaseException) -> BudgetError:
    """Return a BudgetError that states how device memory was used when `operation` failed to allocate."""
    manager = data.manager
    non_model_bytes = data.tracer.meter.now(manager.resident_bytes)
    return BudgetError(
        f"{operation} ran out of memory: chunks use {manager.device_tier.used} bytes of the device, non-model data "
        f"{non_model_bytes} bytes; the budget is {manager.device_tier.budget_bytes} bytes. "
        f"Lower device_memory if other processes use this device, or use activation checkpointing or a smaller "
        f"batch. PyTorch reported: {error}"
    )


def run_with_retry(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], managed: ManagedParam, data: ModelData
) -> Any:
    """Run an operator on a parameter; if it runs out of memory, evict all idle chunks and run it once more.

    Linked processes evict alike, so that one of them can't do it alone.
    """
    name = getattr(func, "__name__", func)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if data.tracer.linked is not None:
            raise explain(f"{name} on parameter {managed.name!r}", data, error) from None
    with managing():
        data.manager.free_memory()
        data.update_param_views()
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise explain(f"{name} on parameter {managed.name!r}, tried twice,", data, error) from None
