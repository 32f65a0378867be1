"""Fixtures of the tests on a GPU."""

import gc
import os

import pytest
import torch
from cuda_cases import DEVICE

if DEVICE.type == "cuda":
    # cuBLAS and PyTorch read it once, at the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic():
    """Use deterministic kernels; others add in varying order."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
