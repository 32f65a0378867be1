"""Rates of the products of a linear layer on one core of this machine's CPU, in each precision."""

import time
from collections.abc import Callable
from functools import cache

import torch

from patrickstar._kernels.one_thread import one_thread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPICAL_WIDTH = 1024
"""Both widths of the layer that is timed if a model's own are not known."""
LIMIT_S = 0.15
"""Seconds for the products of one precision: two of them are compared in less than half a second."""
ROUNDS = 3
"""Number of times that products are timed. The shortest counts: what else runs can only lengthen a product."""
FIRST_SIZE = 64
"""Largest side of the first products. At 0.3 GFLOPS, what CPUs without bf16 reach, they take 2 ms each."""
ROWS = 512
"""Rows of the largest products: as many tokens as a small batch has. More change no rate."""


@cache
def product_rate(precision: str, outputs: int, inputs: int) -> float:
    """Return the rate at which one core computes a linear layer's products.

    These are the forward `x @ w.T`, the gradient of the input `g @ w` and that of the weight `g.T @ x`, in the layouts
    that autograd uses: a product may be a hundred times slower in one layout than in another. Their sides are doubled
    up to those of the layer while `LIMIT_S` allows. Seconds are those of one thread on its core, since several threads
    that wait for each other measure what else the machine does. The result is kept, so that all engines of a process
    agree.

    Args:
        precision: "fp32", "bf16" or "fp16".
        outputs: Width of the layer's output.
        inputs: Width of the layer's input.

    Returns:
        Operations per second over all three; a multiply-add counts as two.
    """
    started_s, size, best_rate = time.thread_time(), FIRST_SIZE, 0.0
    with one_thread():
        while True:
            rows, n, k = min(ROWS, size), min(outputs, size), min(inputs, size)
            products = _products(DTYPES[precision], rows, n, k)
            _elapsed_s(products)  # libraries prepare the first product of a shape
            seconds = min(_elapsed_s(products) for _ in range(ROUNDS))
            best_rate = max(best_rate, 3 * 2 * rows * n * k / seconds)
            # The next products have up to eight times the operations.
            next_s = time.thread_time() - started_s + 8 * (ROUNDS + 1) * seconds
            if size >= max(ROWS, outputs, inputs) or next_s > LIMIT_S:
                return best_rate
            size *= 2


def _products(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> Callable[[], None]:
    x, w, g = (
        torch.ones(shape, dtype=dtype, device="cpu") for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def run() -> None:
        with torch.no_grad():
            _ = x @ w.T, g @ w, g.T @ x

    return run


def _elapsed_s(action: Callable[[], None]) -> float:
    started_s = time.thread_time()
    action()
    return time.thread_time() - started_s
