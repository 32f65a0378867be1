"""Device of the GPU tests, memory budgets on it, and the models that they train.

`PATRICKSTAR_TEST_DEVICE=strict` runs all tests that call no CUDA function on a simulated accelerator (`strict_device`),
`PATRICKSTAR_TEST_DEVICE=cpu` on a CPU, as a check of the tests themselves.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import toys
from torch import nn
from toys import outcome, train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.cuda_accelerator import CudaAccelerator
from patrickstar._layout.byte_size import parse_size
from patrickstar._tiers.hardware import Hardware
from patrickstar.testing import NoMeter, ReferenceTrainer, assert_same_bits

if os.environ.get("PATRICKSTAR_TEST_DEVICE") == "strict":
    import strict_device  # It becomes PyTorch's accelerator.

DEVICE = torch.device(os.environ.get("PATRICKSTAR_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
HAS_ACCELERATOR = DEVICE.type != "cpu"

NEEDS_CUDA = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="this machine offers no CUDA device")
marks = [pytest.mark.cuda, NEEDS_CUDA]
"""Marks of tests that run on any device."""
gpu_marks = [*marks, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]
"""Marks of tests that call CUDA functions."""


WIDTH = 256
inputs = partial(toys.inputs, width=WIDTH, rows=32, seed=1)


def layers(width: int = WIDTH, count: int = 8, dropout: float = 0.0) -> nn.Module:
    """Build linear layers with GELUs between them."""
    return toys.layers(width, count, nn.GELU, partial(nn.Dropout, dropout))


def gpt(checkpointing: bool) -> Callable[[], nn.Module]:
    """Return a function that builds a GPT-2 of three layers."""
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        shape = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=128, use_cache=False, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
        if checkpointing:
            # Renamed in transformers 5.23.
            name = "activation_checkpointing_enable"
            getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    return build


def plain_run(config: ps.Config, steps: int, build: Callable[[], nn.Module] = layers) -> list[torch.Tensor]:
    """Return losses, parameters and optimizer states of plain PyTorch, and free its memory."""
    torch.manual_seed(0)
    reference = ReferenceTrainer(build, config)
    return train(reference, inputs(steps)) + outcome(reference)


def held_bytes(dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the device bytes outside chunks: library workspaces and live tensors."""
    hardware = Hardware(DEVICE)
    library_bytes = hardware.library_bytes(dtype)
    gc.collect()
    return max(library_bytes, hardware.allocator_stats().allocated_bytes)


def budget(size: str, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return a device budget of `size` for model and activations, plus the bytes that the process holds now."""
    return parse_size(size) + held_bytes(dtype)


def make_engine(build: Callable[[], nn.Module], config: ps.Config, **options) -> Engine:
    """Create an engine with the meter of a GPU. On a CPU, whose process is larger than these models, use no meter."""
    torch.manual_seed(0)
    return Engine(build, config, meter=None if HAS_ACCELERATOR else NoMeter(), **options)


def check_training(
    config: ps.Config, size: str, steps: int, build: Callable[[], nn.Module] = layers, run=train, **hooks
) -> ps.StepStats:
    """Assert that training within a budget of `size`, has the bits of plain PyTorch; return the statistics."""
    expected = plain_run(config, steps, build)
    config = config.model_copy(update={"device_memory": budget(size)})
    engine = make_engine(build, config, **hooks)
    results = run(engine, inputs(steps))
    assert_same_bits(expected, results + outcome(engine), "results of training")
    engine.close()
    return engine.stats.total


@contextmanager
def memory_limit(more_bytes: int):
    """Limit the allocator temporarily to `more_bytes` more than it holds."""
    torch.accelerator.empty_cache()
    if not ON_GPU:
        reserved_bytes = TorchDevice(DEVICE).allocator_stats().reserved_bytes
        strict_device.limit(reserved_bytes + more_bytes)
        try:
            yield
        finally:
            strict_device.limit(strict_device.UNLIMITED)
        return
    device = CudaAccelerator(DEVICE)
    total = torch.cuda.get_device_properties(device.index).total_memory
    limit = device.allocator_stats().reserved_bytes + more_bytes
    torch.cuda.set_per_process_memory_fraction(limit / total, device.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)


FREE_LAST_GRAPH = "\nimport time\ntime.sleep(0.3)"
"""Lets autograd's thread of the device free the last graph: a process that ends before is aborted by it, with PyTorch
alone, too (pytorch#38228)."""


def run_program(program: str, **environment: str) -> str:
    """Run Python code in a separate process, assert that it succeeds, and return its output."""
    folder = Path(__file__).parent
    # The package that this process imported. The one in `src` may lack its C++ library.
    package = str(Path(ps.__file__).parents[1])
    path = os.pathsep.join([str(folder), str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")]), package])
    env = os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, "-c", program + FREE_LAST_GRAPH]
    done = subprocess.run(command, cwd=folder.parents[1], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout
