"""Test the measurement of cuBLAS workspaces against a fake of PyTorch's CUDA calls."""

import threading
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import MIB, FakeCuda

from patrickstar._hardware import workspaces
from patrickstar._tiers.hardware import Hardware
from patrickstar.errors import BudgetError

SECOND = torch.device("cuda", 1)


@pytest.fixture
def multiplied(fake_cuda: FakeCuda, monkeypatch):
    """Fake matrix products; each thread's first allocates its workspaces. Return the threads that have them."""
    threads: set[str] = set()
    in_thread = ["caller"]
    monkeypatch.setattr(workspaces, "_known", {})
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: torch.zeros(*size, **options))

    def products(x, bias):
        name = in_thread[0] if threading.current_thread() is threading.main_thread() else "worker"
        if name not in threads:
            fake_cuda.allocated["allocated"] += 33 * MIB
            threads.add(name)

    def in_backward(x):
        def run(operation):
            in_thread[0] = "backward"
            operation()
            in_thread[0] = "caller"

        return run

    monkeypatch.setattr(workspaces, "_products", products)
    monkeypatch.setattr(workspaces, "_in_backward", in_backward)
    return threads


@pytest.mark.parametrize("in_updates", [False, True])
@pytest.mark.parametrize("before", [(), ("caller",), ("backward",), ("caller", "backward", "worker")])
def test_workspaces_of_all_threads_count(fake_cuda: FakeCuda, multiplied, before, in_updates):
    multiplied.update(before)
    hardware = Hardware(SECOND)
    nbytes = (2 + in_updates) * 33 * MIB
    with torch.no_grad():
        assert hardware.library_bytes(torch.bfloat16, in_updates) == nbytes
    assert {"caller", "backward"} | ({"worker"} if in_updates else set()) <= multiplied
    assert hardware.library_bytes(torch.float32, in_updates) == nbytes, "the second call measures no difference"
    multiplied.clear()
    with torch.inference_mode():
        assert hardware.library_bytes(torch.float16, in_updates) == nbytes, "the workspaces were cleared"


@pytest.mark.parametrize(
    ("config", "lt_kib", "major", "expected"),
    [
        (None, None, 9, 33 * MIB),
        (None, None, 10, 33 * MIB),
        (None, None, 8, (8320 << 10) + MIB),
        (":4096:8", None, 8, 33 * MIB),
        (":4096:2:16:8", None, 9, (8320 << 10) + MIB),
        (":16:8", "4096", 9, (128 << 10) + 4 * MIB),
        (":0:0", "0", 9, 0),
    ],
)
def test_workspace_size_follows_pytorchs_rule(monkeypatch, config, lt_kib, major, expected):
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", config), ("CUBLASLT_WORKSPACE_SIZE", lt_kib)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert workspaces.workspace_bytes(major) == expected


def test_full_device_is_a_budget_error(fake_cuda: FakeCuda, monkeypatch):
    monkeypatch.setattr(torch, "ones", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(BudgetError, match=r"cuda:1 has no memory left for the workspaces"):
        Hardware(SECOND).library_bytes(torch.bfloat16)


def test_an_operation_runs_in_backward():
    """Run the real products on a CPU, to check their shapes."""
    called = []
    x, bias = torch.ones(4, 4), torch.ones(4)
    workspaces._in_backward(x)(lambda: called.append(workspaces._products(x, bias)))
    assert called == [None]
