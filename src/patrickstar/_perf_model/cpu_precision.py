"""Which precision a CPU is faster in, by its rates of products."""

import math

LEAST_GAIN = 16 / 14
"""How much faster than bf16 fp32 has to be: by the ratio of their bytes per parameter, with Adam."""


def faster_on_cpu(bf16: float, fp32: float) -> str:
    """Return the precision to choose for these rates of products: fp32 if it gains more than its memory costs."""
    return "fp32" if fp32 > LEAST_GAIN * bf16 else "bf16"


def gflops(rate: float) -> str:
    """Format a rate in operations per second."""
    digits = max(0, 1 - math.floor(math.log10(rate / 1e9)))  # two digits of a small one
    return f"{rate / 1e9:,.{digits}f} GFLOPS"
