"""Fixtures of the tests on a GPU."""

import gc
import os

import pytest
import torch
from cuda_cases import DEVICE

if DEVICE.type == "cuda":
    # Read once by cuBLAS and by PyTorch, when the first matrices are multiplied.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic():
    """Kernels that add in any order would differ from themselves."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
