"""Implementations that must give the same bits: PyTorch's operators, and the C++ kernel for each instruction set."""

import pytest

from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.eager_backend import EagerBackend

VARIANTS = ("avx512", "avx2", "baseline")

NOT_BUILT = "patrickstar was installed without its C++ kernel: no compiler was found; install one, and it again"

native = CppBackend.find()
needs_native = pytest.mark.skipif(native is None, reason=NOT_BUILT)


def _needs(variant: str) -> list[pytest.MarkDecorator]:
    placeholder = native is not None and variant not in native.variants()
    return [needs_native, pytest.mark.skipif(placeholder, reason=f"this machine does not run the variant {variant!r}")]


NATIVE = [pytest.param(variant, marks=_needs(variant)) for variant in VARIANTS]
"""Parameters of a test: names of the kernel's variants."""

ALL = [
    pytest.param(EagerBackend(), id="listed"),
    *(pytest.param(CppBackend.find(variant, 2), id=variant, marks=_needs(variant)) for variant in VARIANTS),
]
"""Parameters of a test: the implementations."""
