"""Fake CUDA devices that record calls, devices and threads, with an allocator that counts bytes."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

MIB = 1 << 20
OUT_OF_MEMORY = 2


class FakeCuda:
    """Fake of the parts of `torch.cuda` that `_hardware/cuda_accelerator.py` and `_hardware/workspaces.py` call."""

    def __init__(self) -> None:
        self.free_bytes = 80 << 30
        self.allocated = {"allocated": 0, "reserved": 0, "inactive_split": 0}
        self.retries = 0
        self.fraction = 1.0
        """Limit of the process, of all memory of a device."""
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
        self.configured: list[str] = []
        self.current = threading.local()
        self.entered: list[tuple[str, int]] = []
        """Thread name and device index of each call of `set_device`."""
        self.registered: dict[int, int] = {}
        self.calls: list[tuple] = []
        """Calls that register, unregister or synchronize, with the current device."""
        self.lockable_bytes = 1 << 60
        self.latched = False
        """True if a call failed and its error was not queried."""

    @property
    def device(self) -> int:
        """Current device of the calling thread, by default the first one."""
        return getattr(self.current, "index", 0)

    def set_device(self, index: int) -> None:
        self.current.index = index
        self.entered.append((threading.current_thread().name, index))

    @contextmanager
    def on(self, index: int):
        before, self.current.index = self.device, index
        yield
        self.current.index = before

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock memory, unless more than `lockable_bytes` would be locked."""
        self.calls.append(("register", self.device, address, nbytes, flags))
        if sum(self.registered.values()) + nbytes > self.lockable_bytes:
            self.latched = True
            return OUT_OF_MEMORY
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", self.device, address))
        del self.registered[address]
        return 0

    def set_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction

    def launch(self, *_, **__) -> torch.Tensor:
        """Simulate a kernel launch, which raises the error of an earlier call, like the check in PyTorch."""
        if self.latched:
            self.latched = False
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(1)

    def stats(self, index: int) -> dict:
        """Return the entries of `torch._C._cuda_memoryStats` that are read."""
        counted = {f"{name}_bytes": {"all": {"current": n, "peak": 2 * n}} for name, n in self.allocated.items()}
        return {**counted, "num_alloc_retries": self.retries}

    def configure(self, text: str) -> None:
        self.configured.append(text)
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": "segments:True" in text}


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the CUDA calls of PyTorch for a test."""
    fake = FakeCuda()
    cudart = SimpleNamespace(cudaHostRegister=fake.register, cudaHostUnregister=fake.unregister)
    cudart.cudaGetErrorString = lambda status: "out of memory" if int(status) == OUT_OF_MEMORY else "?"
    for name, value in {
        "init": lambda: None,
        "current_device": lambda: fake.device,
        "set_device": fake.set_device,
        "device": fake.on,
        "cudart": lambda: cudart,
        "synchronize": lambda *_: fake.calls.append(("synchronize", fake.device)),
        "mem_get_info": lambda index: (fake.free_bytes, 80 << 30),
        "get_allocator_backend": lambda: "native",
        "get_device_name": lambda device: "H100",
        "get_device_capability": lambda index: (9, 0),
        "get_device_properties": lambda index: SimpleNamespace(total_memory=80 << 30),
        "get_per_process_memory_fraction": lambda index: fake.fraction,
        "set_per_process_memory_fraction": fake.set_fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": fake.settings})
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", fake.stats, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.configure, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return fake
