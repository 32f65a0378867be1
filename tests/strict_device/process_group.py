"""Process group of strict devices: collectives over gloo, whose results reach the device by queued copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "strictccl"


class _Done(dist._Work):
    """Collective whose results are queued on the stream that was current when it was called."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class StrictProcessGroup(dist.ProcessGroup):
    """Collectives on the current stream, like NCCL's: they wait for its earlier work, and later work for them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, uncounted: Callable[[], Any]):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._uncounted = uncounted

    @contextmanager
    def _on_host(self, *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield copies on the host, and queue their copies back."""
        with self._uncounted():
            copies = [tensor.cpu().pin_memory() for tensor in tensors]
        yield copies
        with self._uncounted():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> dist._Work:
        with self._on_host(output, own) as (whole, part):
            self._gloo._allgather_base(whole, part).wait()
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist._Work:
        with self._on_host(*tensors) as copies:
            self._gloo.broadcast(copies, options).wait()
        return _Done()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist._Work:
        with self._on_host(*tensors) as copies:
            self._gloo.allreduce(copies, options or dist.AllreduceOptions()).wait()
        return _Done()

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> dist._Work:
        with self._on_host(*tensors) as copies:
            self._gloo.reduce(copies, options).wait()
        return _Done()

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> dist._Work:
        """Add in fp32 in rank order, whatever the dtype, and round once."""
        with self._uncounted():
            parts = [torch.empty_like(whole, device="cpu") for _ in range(self.size())]
            self._gloo.allgather([parts], [whole.cpu()]).wait()
        total = torch.zeros(whole.numel(), dtype=torch.float64 if whole.dtype == torch.float64 else torch.float32)
        for part in parts:
            total += part
        own = total.view(self.size(), -1)[self.rank()].to(whole.dtype).pin_memory()
        with self._uncounted():
            output.view(-1).copy_(own, non_blocking=True)
        return _Done()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist._Work:
        with self._uncounted():
            copies = [tensor.cpu() for tensor in tensors]
        return self._gloo.send(copies, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist._Work:
        with self._on_host(*tensors) as copies:
            self._gloo.recv(copies, rank, tag).wait()
        return _Done()

    def barrier(self, options: Any = None) -> dist._Work:
        return self._gloo.barrier(options or dist.BarrierOptions())

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


def register(uncounted: Callable[[], Any]) -> None:
    """Make it the default backend of strict devices; `uncounted` returns a context that counts no waits or copies."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StrictProcessGroup:
        return StrictProcessGroup(store, rank, size, timeout, uncounted)

    dist.Backend.register_backend(BACKEND, create, devices=["strict"])
