"""Saved activations on the host between forward and backward, within the host budget."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from patrickstar._memory.chunk_manager import ChunkManager

SMALLEST_BYTES = 4096
"""Below a page of memory, moving a tensor costs more than keeping it."""


@dataclass(eq=False)
class _DeviceActivation:
    """A saved tensor that stays where it is."""

    tensor: torch.Tensor


class _HostActivation:
    """A saved tensor on the host; its bytes are given back to the budget with it."""

    def __init__(self, tensor: torch.Tensor, source: StorageWeakRef, manager: ChunkManager) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.block = manager.allocate_host(nbytes, "an offloaded activation")
        weakref.finalize(self, manager.host_tier.release_block, self.block).atexit = False
        self.source = source
        self.like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        with manager.io_dispatch.stalled():
            self._host(manager).copy_(tensor)
            manager.count_transfer(nbytes, to_device=False)
        self.device, self.manager, self.nbytes = tensor.device, manager, nbytes

    def _host(self, manager: ChunkManager) -> torch.Tensor:
        """The tensor's copy, in a place that may have moved."""
        flat = manager.host_tier.view(self.block, self.like.dtype)
        return flat.as_strided(self.like.shape, self.like.stride(), flat.storage_offset())

    def back(self) -> torch.Tensor:
        """A copy on the device."""
        with self.manager.io_dispatch.stalled():
            tensor = torch.empty_like(self.like, device=self.device).copy_(self._host(self.manager))
            self.manager.count_transfer(self.nbytes, to_device=True)
        return tensor


class ActivationOffload:
    """Moves what autograd saves to the host. Weights are recognised by their chunk's storage and left alone."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager
        self._seen: weakref.WeakValueDictionary[tuple[object, ...], _HostActivation] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, saved tensors go to the host."""
        chunk_storages = {chunk.storage._cdata for chunk in self.manager.chunks.values()}

        def pack(tensor: torch.Tensor) -> _DeviceActivation | _HostActivation:
            with torch._C.DisableTorchFunctionSubclass():
                movable = tensor.layout is torch.strided and tensor.numel() * tensor.element_size() >= SMALLEST_BYTES
                users_leaf = tensor.is_leaf and tensor.requires_grad
                if not movable or users_leaf or tensor.untyped_storage()._cdata in chunk_storages:
                    return _DeviceActivation(tensor)
                # While the entry lives its weak reference keeps the storage's identity from being given to another.
                storage = StorageWeakRef(tensor.untyped_storage())
                key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
                away = self._seen.get(key)
                if away is None or away.source.expired():
                    away = _HostActivation(tensor.detach(), storage, self.manager)
                    self._seen[key] = away
                return away

        def unpack(saved: _DeviceActivation | _HostActivation) -> torch.Tensor:
            return saved.tensor if isinstance(saved, _DeviceActivation) else saved.back()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
