"""Library workspaces: device memory that matrix products allocate once and that PyTorch keeps."""

import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar.errors import BudgetError

# [Note: library bytes]
# PyTorch gives cuBLAS one workspace per handle and stream: 32 MiB on Hopper and Blackwell, 8.1 MiB on earlier GPUs, or
# the size in CUBLAS_WORKSPACE_CONFIG (ATen/cuda/CublasHandlePool.cpp); and cuBLASLt, which products that add a vector
# use, another one of 1 MiB, or of the size in CUBLASLT_WORKSPACE_SIZE. A thread has one handle; when it ends, the next
# new thread takes it over. The caching allocator provides workspaces, and they are kept until the process ends. Unless
# they exist before memory is planned, the first operators allocate them outside of every plan.
#
# An engine runs products in the caller's thread and in autograd's backward thread, on the caller's stream. Updates that
# need whole parameters (Muon) run products also in the worker thread of updates on the host, on its default stream: a
# thread that has ended has made the workspaces whose handle that one takes over. No other thread of an engine runs any:
# those of the disk only copy, and sums and norms are no products.
#
# The allocator's statistics show a workspace only when it is created. In a process that has run products before (a
# second engine, or a reference model) the statistics do not change; then the most that was measured in one thread is
# taken for all, or, if nothing was, PyTorch's rule. Clearing the workspaces to measure them again would be exact, but
# breaks CUDA graphs that were captured with them.

THREADS = 2
"""Threads of an engine that run products: the caller's and autograd's."""
SIZE = 64
MIN_BYTES = 1 << 13
"""Smaller differences are no workspace, but a tensor that a thread is about to free."""
CONFIG_VARIABLE, LT_VARIABLE = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
LT_KIB = 1024
"""Workspace of cuBLASLt by default."""

POLL_S = 1e-4

_known: dict[torch.device, int] = {}
"""Most bytes measured in one thread so far, by device: workspaces belong to the process."""


def library_bytes(accelerator: TorchDevice, dtype: torch.dtype, in_updates: bool, rule_bytes: Callable[[], int]) -> int:
    """Run matrix products of `dtype` in all compute threads; return the bytes of their workspaces.

    See [Note: library bytes].

    Args:
        in_updates: Whether updates on the host run products.
        rule_bytes: Returns the bytes of one thread by PyTorch's rule.

    Raises:
        BudgetError: The device is out of memory.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            # Threads warn once, since their context does not exist yet.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
            x = torch.ones(SIZE, SIZE, dtype=dtype, device=accelerator.device)
            bias = torch.ones(SIZE, dtype=dtype, device=accelerator.device)
            threads: list[Callable[[Callable[[], object]], None]] = [_in_caller, _in_backward(x)]
            if in_updates:
                threads.append(_in_new_thread(accelerator))
            measured = [_retained_bytes(accelerator, run, lambda: _products(x, bias)) for run in threads]
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{accelerator.device} has no memory left for the workspaces of its libraries (cuBLAS), which every matrix "
            f"product needs: free device memory. PyTorch reported: {error}"
        ) from error
    most = max(measured)
    if most >= MIN_BYTES:
        _known[accelerator.device] = max(most, _known.get(accelerator.device, 0))
    return len(threads) * (_known.get(accelerator.device) or rule_bytes())


def _products(x: torch.Tensor, bias: torch.Tensor) -> None:
    """Compute one product by cuBLASLt, which also adds the bias, and one by cuBLAS."""
    with torch.no_grad():
        F.linear(x, x, bias)
        x @ x


def _in_caller(operation: Callable[[], object]) -> None:
    operation()


class _InBackward(torch.autograd.Function):
    """Calls an operation in the thread of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operation: Callable[[], object]) -> torch.Tensor:
        ctx.operation = operation
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.operation()
        return grads[0], None


def _in_backward(x: torch.Tensor) -> Callable[[Callable[[], object]], None]:
    def run(operation: Callable[[], object]) -> None:
        one = x[:1, :1].clone().requires_grad_()
        torch.autograd.grad(_InBackward.apply(one, operation), one)  # type: ignore[no-untyped-call]

    return run


def _in_new_thread(accelerator: TorchDevice) -> Callable[[Callable[[], object]], None]:
    def run(operation: Callable[[], object]) -> None:
        errors: list[BaseException] = []

        def begin() -> None:
            try:
                accelerator.enter_worker()
                operation()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=begin, name="patrickstar-workspaces")
        thread.start()
        join_to_the_end(thread)
        for error in errors:
            raise error

    return run


def join_to_the_end(thread: threading.Thread) -> None:
    """Join a thread, and wait until the system has ended it, which gives its handles back."""
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(POLL_S)


def _retained_bytes(
    accelerator: TorchDevice, run: Callable[[Callable[[], object]], None], operation: Callable[[], object]
) -> int:
    """Return the bytes that stay allocated after an operation whose results are dropped.

    They are read in the operation's own thread: what `run` needs around it may be freed later, by another thread.
    """
    retained: list[int] = []

    def measured() -> None:
        before = accelerator.allocated_bytes
        operation()
        retained.append(max(0, accelerator.allocated_bytes - before))

    run(measured)
    return retained[0]


def workspace_bytes(major: int) -> int:
    """Return the bytes of the workspaces of one thread by PyTorch's rule, for a device of this compute capability."""
    config = re.findall(r":(\d+):(\d+)", os.environ.get(CONFIG_VARIABLE, ""))
    kib = 32 << 10 if major in (9, 10, 12) else 2 * 4096 + 8 * 16
    if config:
        kib = sum(int(size) * int(count) for size, count in config)
    lt_kib = os.environ.get(LT_VARIABLE, "")
    return (kib + (int(lt_kib) if lt_kib.isdigit() else LT_KIB)) << 10
