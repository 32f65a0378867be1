"""cuBLAS workspaces: device memory that matrix products allocate once and that PyTorch keeps."""

import os
import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from patrickstar._memory.accelerator import Accelerator
from patrickstar.errors import BudgetError

# [Note: library bytes]
# PyTorch gives cuBLAS one workspace per thread and stream: 32 MiB on Hopper and Blackwell, 8.1 MiB on earlier GPUs, or
# the size in CUBLAS_WORKSPACE_CONFIG (ATen/cuda/CublasHandlePool.cpp; cuBLASLt shares it). The caching allocator
# provides it, and it is kept until the process ends. An engine runs matrix products in two threads, the caller's and
# autograd's backward thread. Unless both have their workspaces before memory is planned, the first operators allocate
# them outside of every plan.
#
# The allocator's statistics show a workspace only when it is created. In a process that has run matrix products before
# (a second engine, or a reference model) the statistics do not change; then the difference measured in one thread is
# taken for both, or, if there is none, PyTorch's rule. Clearing the workspaces to measure them again would be exact,
# but breaks CUDA graphs that were captured with them.

THREADS = 2
SIZE = 64
MIN_BYTES = 1 << 16
"""Smaller differences are no workspace, but a tensor that a thread is about to free."""
CONFIG_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_known: dict[int, int] = {}
"""Bytes measured so far, by device: workspaces belong to the process."""


def library_bytes(cuda: Accelerator, dtype: torch.dtype) -> int:
    """Run matrix products of `dtype` in both compute threads; return the bytes of the cuBLAS workspaces.

    See [Note: library bytes]. Raises BudgetError if the device is out of memory.
    """
    try:
        with torch.cuda.device(cuda.index), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            # The backward thread warns once, since its context does not exist yet.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
            x = torch.ones(SIZE, SIZE, dtype=dtype, device=cuda.device)
            weight = torch.ones(SIZE, SIZE, dtype=dtype, device=cuda.device, requires_grad=True)
            bias = torch.ones(SIZE, dtype=dtype, device=cuda.device)
            forward_bytes = _retained_bytes(cuda, lambda: _product(x, weight, bias))
            backward_bytes = _retained_bytes(cuda, lambda: torch.autograd.grad(_product(x, weight, bias).sum(), weight))
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{cuda.device} has no memory left for the workspaces of its libraries (cuBLAS), which every matrix "
            f"product needs: free device memory. PyTorch reported: {error}"
        ) from error
    workspace = max(forward_bytes, backward_bytes)
    nbytes = THREADS * workspace if workspace >= MIN_BYTES else _known.get(cuda.index, THREADS * workspace_bytes(cuda))
    _known[cuda.index] = max(nbytes, _known.get(cuda.index, 0))
    return _known[cuda.index]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute one product by cuBLASLt, which also adds the bias, and one by cuBLAS."""
    return F.linear(x, weight, bias) @ weight


def _retained_bytes(cuda: Accelerator, operation: Callable[[], object]) -> int:
    """Return the bytes that stay allocated after an operation whose results are dropped."""
    before = cuda.allocated_bytes
    operation()
    return max(0, cuda.allocated_bytes - before)


def workspace_bytes(cuda: Accelerator) -> int:
    """Return the size of one workspace by PyTorch's rule."""
    config = re.findall(r":(\d+):(\d+)", os.environ.get(CONFIG_VARIABLE, ""))
    if config:
        return sum(int(kib) * int(count) << 10 for kib, count in config)
    major, _ = torch.cuda.get_device_capability(cuda.index)
    return 32 << 20 if major in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10
