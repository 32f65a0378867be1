"""The device that these tests run on, and the memory that a test has on it.

`PATRICKSTAR_TEST_DEVICE=cpu` runs all tests that need no call of CUDA's on a CPU, which shows whether they are written
well. What they are about is the GPU.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._layout.byte_size import parse_size
from patrickstar._memory.cuda_device import CudaDevice
from patrickstar._memory.hardware import Hardware
from patrickstar.testing import NoMeter

DEVICE = torch.device(os.environ.get("PATRICKSTAR_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"

marks = [
    pytest.mark.cuda,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="this machine offers no CUDA device"),
]
"""For tests of what the engine does, on any device."""
gpu_marks = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_GPU or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""For tests that call CUDA themselves."""


def held_bytes(dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the device that no chunk holds: workspaces of libraries, and tensors that are alive."""
    hardware = Hardware(DEVICE)
    library_bytes = hardware.library_bytes(dtype)
    gc.collect()
    return max(library_bytes, hardware.allocator_stats().allocated_bytes)


def budget(size: str, dtype: torch.dtype = torch.bfloat16) -> int:
    """A device budget of `size` for a model and its activations, beside what the process holds of the device now."""
    return parse_size(size) + held_bytes(dtype)


def make_engine(build: Callable[[], nn.Module], config: ps.Config, **options) -> Engine:
    """An engine with the device's meter; on a CPU, whose process is larger than these models, without one."""
    torch.manual_seed(0)
    return Engine(build, config, meter=None if ON_GPU else NoMeter(), **options)


@contextmanager
def memory_limit(more_bytes: int):
    """Inside, the allocator can take so many bytes of the device more than it holds."""
    torch.cuda.empty_cache()
    device = CudaDevice(DEVICE)
    total = torch.cuda.get_device_properties(device.index).total_memory
    limit = device.allocator_stats().reserved_bytes + more_bytes
    torch.cuda.set_per_process_memory_fraction(limit / total, device.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)


def run_program(program: str, **environment: str) -> str:
    """Run Python in a process of its own. Returns what it printed; asserts that it ended well."""
    here = Path(__file__).parent
    # The package that this process has, which need not be the one in `src`: that one may lack its library.
    package = str(Path(ps.__file__).parents[1])
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")]), package])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here.parents[1],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
