"""Products with matrices of 4 bits, which bitsandbytes runs as one operator."""

from typing import Any

PRODUCT_4BIT = "bitsandbytes::gemm_4bit"
"""Operator (matrix, packed matrix, shape of the packed one, ...)."""


def is_packed_product(func: Any) -> bool:
    """Return whether an operator multiplies a matrix and a packed one."""
    return bool(func.name() == PRODUCT_4BIT)


def product_sides(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Return the rows of such a product, and the widths of its output and of its input."""
    outputs, inputs = args[2]
    return args[0].numel() // inputs, outputs, inputs


def unpacked_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that such a product reads and writes to unpack its matrix; 0 for other operators."""
    if not is_packed_product(func):
        return 0
    _, outputs, inputs = product_sides(args)
    return int(args[1].nbytes + outputs * inputs * args[0].itemsize)
