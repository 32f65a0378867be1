"""Test the measurement of cuBLAS workspaces against a fake of PyTorch's CUDA calls."""

import pytest
import torch
from fake_cuda import MIB, FakeCuda, install

from patrickstar._memory import workspaces
from patrickstar._memory.cuda_accelerator import CudaAccelerator
from patrickstar._memory.hardware import Hardware
from patrickstar.errors import BudgetError

SECOND = torch.device("cuda", 1)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Replace PyTorch's CUDA calls."""
    return install(monkeypatch)


@pytest.fixture
def multiplied(fake_cuda: FakeCuda, monkeypatch):
    """Fake matrix products; each thread's first allocates a workspace. Return the threads that have one."""
    threads: set[str] = set()
    monkeypatch.setattr(workspaces, "_known", {})
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: torch.zeros(*size, **options))

    def product(x, weight, bias):
        if "caller" not in threads:
            fake_cuda.allocated["allocated"] += 32 * MIB
            threads.add("caller")
        return x @ weight

    def grad(out, weight):
        if "backward" not in threads:
            fake_cuda.allocated["allocated"] += 32 * MIB
            threads.add("backward")

    monkeypatch.setattr(workspaces, "_product", product)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    return threads


@pytest.mark.parametrize("before", [(), ("caller",), ("backward",), ("caller", "backward")])
def test_workspaces_of_both_threads_count(fake_cuda: FakeCuda, multiplied, before):
    multiplied.update(before)
    hardware = Hardware(SECOND)
    with torch.no_grad():
        assert hardware.library_bytes(torch.bfloat16) == 64 * MIB
    assert multiplied == {"caller", "backward"}
    assert hardware.library_bytes(torch.float32) == 64 * MIB, "the second call measures no difference"
    multiplied.clear()
    with torch.inference_mode():
        assert Hardware(SECOND).library_bytes(torch.float16) == 64 * MIB, "the workspaces were cleared"


@pytest.mark.parametrize(
    ("config", "capability", "expected"),
    [
        (None, (9, 0), 32 * MIB),
        (None, (10, 0), 32 * MIB),
        (None, (8, 0), 8320 << 10),
        (":4096:8", (8, 0), 32 * MIB),
        (":4096:2:16:8", (9, 0), 8320 << 10),
        (":16:8", (9, 0), 128 << 10),
        (":0:0", (9, 0), 0),
    ],
)
def test_workspace_size_follows_pytorchs_rule(fake_cuda: FakeCuda, monkeypatch, config, capability, expected):
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert workspaces.workspace_bytes(CudaAccelerator(SECOND)) == expected


def test_full_device_is_a_budget_error(fake_cuda: FakeCuda, monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(BudgetError, match=r"cuda:1 has no memory left for the workspaces"):
        Hardware(SECOND).library_bytes(torch.bfloat16)


def test_products_are_differentiable():
    """Run the real products on a CPU, to check their shapes."""
    weight = torch.ones(4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(workspaces._product(torch.ones(4, 4), weight, torch.ones(4)).sum(), weight)
    assert grad.shape == (4, 4)
