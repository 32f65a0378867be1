"""A CUDA device made of Python: which calls reached which device from which thread, and an allocator that counts."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

MIB = 1 << 20
OUT_OF_MEMORY = 2


class FakeCuda:
    """Stands in for the parts of `torch.cuda` that `_memory/cuda_device.py` and `_memory/workspaces.py` call."""

    def __init__(self) -> None:
        self.free_bytes = 80 << 30
        self.allocated = {"allocated": 0, "reserved": 0, "inactive_split": 0}
        self.retries = 0
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
        self.configured: list[str] = []
        self.current = threading.local()
        self.entered: list[tuple[str, int]] = []
        """Name of the thread and index of the device of each `set_device`."""
        self.registered: dict[int, int] = {}
        self.calls: list[tuple] = []
        """Registrations and what follows them, with the device that was current."""
        self.lockable_bytes = 1 << 60
        self.latched = False
        """Whether the last call failed, and nobody has asked for its error."""

    @property
    def device(self) -> int:
        """The calling thread's current device: the first one, until it is set."""
        return getattr(self.current, "index", 0)

    def set_device(self, index: int) -> None:
        """Set it."""
        self.current.index = index
        self.entered.append((threading.current_thread().name, index))

    @contextmanager
    def on(self, index: int):
        """Set it for a while."""
        before, self.current.index = self.device, index
        yield
        self.current.index = before

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Lock memory as far as there is some."""
        self.calls.append(("register", self.device, address, nbytes, flags))
        if sum(self.registered.values()) + nbytes > self.lockable_bytes:
            self.latched = True
            return OUT_OF_MEMORY
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        """Unlock what was locked."""
        self.calls.append(("unregister", self.device, address))
        del self.registered[address]
        return 0

    def launch(self, *_, **__) -> torch.Tensor:
        """A kernel, which raises the error of the call before, as PyTorch's check after a launch does."""
        if self.latched:
            self.latched = False
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(1)

    def stats(self, index: int) -> dict:
        """What `torch._C._cuda_memoryStats` returns, as far as it is read."""
        counted = {f"{name}_bytes": {"all": {"current": n, "peak": 2 * n}} for name, n in self.allocated.items()}
        return {**counted, "num_alloc_retries": self.retries}

    def configure(self, text: str) -> None:
        """Take settings of the allocator."""
        self.configured.append(text)
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": "segments:True" in text}


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace PyTorch's calls for a test."""
    fake = FakeCuda()
    cudart = SimpleNamespace(
        cudaHostRegister=fake.register,
        cudaHostUnregister=fake.unregister,
        cudaGetErrorString=lambda status: "out of memory" if int(status) == OUT_OF_MEMORY else "?",
    )
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
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": fake.settings})
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", fake.stats, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.configure, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return fake
