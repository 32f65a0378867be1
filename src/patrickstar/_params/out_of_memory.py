"""When an allocator has nothing left although the budgets were kept: others use the device, or an operator grew."""

import torch

from patrickstar._params.model_data import ModelData
from patrickstar.errors import BudgetError

OTHER_ALLOCATORS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",
)
"""Texts of errors without a class of their own: PyTorch's CPU allocator, cuBLAS, cuDNN, the CUDA driver (which loads
kernels when they are first launched), Triton's launcher, and NCCL."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, PyTorch's own or one of a library beside its allocator."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OTHER_ALLOCATORS)


def explain(who: str, data: ModelData, error: BaseException) -> BudgetError:
    """An error that says what took the bytes when `who` found none."""
    manager = data.manager
    return BudgetError(
        f"{who} found no memory: chunks take {manager.device_tier.used} bytes of the device, non-model data "
        f"{data.tracer.current_non_model_bytes()}, the budget is {manager.device_tier.budget_bytes}. Lower "
        f"device_memory if others "
        f"use this device, or use activation checkpointing or a smaller batch. PyTorch said: {error}"
    )
