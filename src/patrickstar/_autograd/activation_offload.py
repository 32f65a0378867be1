"""Activation offload: saved tensors are on the host between forward and backward, within the host budget.

Copies run in the order of the device's compute, and the host does not wait for them. So the device's memory is used
again in that order too, and its peak does not depend on the speed of copies.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.sigint_gate import deferring_sigint

MIN_OFFLOAD_BYTES = 4096
"""Smaller tensors are not offloaded: a transfer costs more than the memory that it saves."""
OFFLOADED = "an offloaded activation"
"""Name of what is allocated and copied, for errors and records."""


@dataclass(eq=False)
class _DeviceActivation:
    """A saved tensor that is not offloaded."""

    tensor: torch.Tensor


class _HostActivation:
    """A saved tensor on the host. Its arena block is released when this object is freed."""

    def __init__(self, tensor: torch.Tensor, source: StorageWeakRef, manager: ChunkManager) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.block = manager.allocate_host(nbytes, OFFLOADED)
        weakref.finalize(self, manager.host_tier.release_block, self.block).atexit = False
        self.source = source
        self.meta = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        self.device, self.manager, self.nbytes = tensor.device, manager, nbytes
        with manager.io_dispatch.stalled(OFFLOADED):
            self._host_view(manager).copy_(tensor, non_blocking=True)
            self._issued(to_device=False)

    def _issued(self, to_device: bool) -> None:
        """Count a copy, and keep the block until it has ended."""
        self.manager.count_transfer(self.nbytes, to_device=to_device)
        copy = self.manager.io_dispatch.copies.issued(OFFLOADED)
        if copy is not None:
            self.manager.host_tier.copy_issued(self.block, copy)

    def _host_view(self, manager: ChunkManager) -> torch.Tensor:
        """Return a view of the host copy; the arena may have moved its block since the last call."""
        flat = manager.host_tier.view(self.block, self.meta.dtype)
        return flat.as_strided(self.meta.shape, self.meta.stride(), flat.storage_offset())

    def to_device(self) -> torch.Tensor:
        with deferring_sigint(), self.manager.io_dispatch.stalled(OFFLOADED):
            tensor = torch.empty_like(self.meta, device=self.device)
            tensor.copy_(self._host_view(self.manager), non_blocking=True)
            self._issued(to_device=True)
        return tensor


class ActivationOffload:
    """Offloads tensors that autograd saves. Parameters are recognized by their chunk's storage and not offloaded."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager
        self._seen: weakref.WeakValueDictionary[tuple[object, ...], _HostActivation] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which tensors saved by autograd are offloaded to the host."""
        chunk_storages = {chunk.storage._cdata for chunk in self.manager.chunks.values()}

        def pack(tensor: torch.Tensor) -> _DeviceActivation | _HostActivation:
            with deferring_sigint(), torch._C.DisableTorchFunctionSubclass():
                offloadable = (
                    tensor.layout is torch.strided and tensor.numel() * tensor.element_size() >= MIN_OFFLOAD_BYTES
                )
                is_user_leaf = tensor.is_leaf and tensor.requires_grad
                if not offloadable or is_user_leaf or tensor.untyped_storage()._cdata in chunk_storages:
                    return _DeviceActivation(tensor)
                # The entry's weak reference keeps other storages from reusing this one's identity.
                storage = StorageWeakRef(tensor.untyped_storage())
                key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
                offloaded = self._seen.get(key)
                if offloaded is None or offloaded.source.expired():
                    offloaded = _HostActivation(tensor.detach(), storage, self.manager)
                    self._seen[key] = offloaded
                return offloaded

        def unpack(saved: _DeviceActivation | _HostActivation) -> torch.Tensor:
            return saved.tensor if isinstance(saved, _DeviceActivation) else saved.to_device()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
