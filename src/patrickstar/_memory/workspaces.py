"""cuBLAS workspaces: memory of a CUDA device that matrix products take once, and that PyTorch keeps."""

import os
import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from patrickstar._memory.cuda_device import CudaDevice
from patrickstar.errors import BudgetError

# [Note: library bytes]
# PyTorch gives cuBLAS a workspace for each thread and stream that multiplies matrices: 32 MiB on Hopper and Blackwell,
# 8.1 MiB before, or what CUBLAS_WORKSPACE_CONFIG says (ATen/cuda/CublasHandlePool.cpp; cuBLASLt shares it). It comes
# from the caching allocator, and is kept until the process ends. An engine multiplies in two threads, the caller's and
# the one that autograd runs backward in. Unless both have their workspaces before memory is planned, the first
# operators take them without any plan knowing.
#
# A difference of two looks at the allocator shows a workspace only when it is made. In a process that has multiplied
# before (a second engine, or a reference model) there is nothing to see, and the difference of one thread stands for
# both, or, if there is none, PyTorch's rule. Clearing the workspaces to see them made again would be exact, but breaks
# CUDA graphs that were captured with them.

THREADS = 2
SIZE = 64
LEAST_BYTES = 1 << 16
"""Less is no workspace, but a tensor that a thread is about to free."""
CONFIG_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_known: dict[int, int] = {}
"""Bytes found so far, by device: workspaces belong to the process."""


def library_bytes(cuda: CudaDevice, dtype: torch.dtype) -> int:
    """Multiply matrices in both threads that an engine computes in, and return what cuBLAS keeps of the device.

    The matrices are of `dtype`. See [Note: library bytes]. Raises BudgetError if the device has no memory for it.
    """
    try:
        with torch.cuda.device(cuda.index), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            # Said once by the thread of backward, whose context is about to be made.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
            x = torch.ones(SIZE, SIZE, dtype=dtype, device=cuda.device)
            weight = torch.ones(SIZE, SIZE, dtype=dtype, device=cuda.device, requires_grad=True)
            bias = torch.ones(SIZE, dtype=dtype, device=cuda.device)
            here = _kept(cuda, lambda: _product(x, weight, bias))
            there = _kept(cuda, lambda: torch.autograd.grad(_product(x, weight, bias).sum(), weight))
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{cuda.device} has no memory left for the workspaces of its libraries (cuBLAS), which every matrix "
            f"product needs: free some of it. PyTorch said: {error}"
        ) from error
    each = max(here, there)
    found = THREADS * each if each >= LEAST_BYTES else _known.get(cuda.index, THREADS * workspace_bytes(cuda))
    _known[cuda.index] = max(found, _known.get(cuda.index, 0))
    return _known[cuda.index]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Multiply by cuBLASLt, which adds a bias on its way, and by cuBLAS."""
    return F.linear(x, weight, bias) @ weight


def _kept(cuda: CudaDevice, act: Callable[[], object]) -> int:
    """Return how many bytes more are allocated after an act whose results are dropped."""
    before = cuda.allocated_bytes
    act()
    return max(0, cuda.allocated_bytes - before)


def workspace_bytes(cuda: CudaDevice) -> int:
    """Return the size of one workspace by PyTorch's rule."""
    config = re.findall(r":(\d+):(\d+)", os.environ.get(CONFIG_VARIABLE, ""))
    if config:
        return sum(int(kib) * int(count) << 10 for kib, count in config)
    major, _ = torch.cuda.get_device_capability(cuda.index)
    return 32 << 20 if major in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10
