"""When an allocator has nothing left although the budgets were kept: others use the device, or an operator grew."""

import torch

from patrickstar.engine.model_data import ModelData
from patrickstar.errors import BudgetError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had nothing left, of the GPU or of the CPU (whose error has no class of its own)."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def explain(who: str, data: ModelData, error: BaseException) -> BudgetError:
    """An error that says what took the bytes when `who` found none."""
    manager = data.manager
    return BudgetError(
        f"{who} found no memory: chunks take {manager.compute.used} bytes of the device, non-model data "
        f"{data.clock.non_model_now()}, the budget is {manager.compute.budget_bytes}. Lower device_memory if others "
        f"use this device, or use activation checkpointing or a smaller batch. PyTorch said: {error}"
    )
