"""Activation offload: saved tensors are on the host between forward and backward, within the host budget.

[Note: copies of activations]
Beside an accelerator copies run on the streams of chunks. A tensor on its way to the host stays on the device until
later work there is ordered after its copy; one on its way back has its memory from the beginning. Both hold at most two
times the largest tensor, so that the one is copied while the other is computed. In forward, tensors may also stay while
their bytes fit in what the tensors that are not offloaded have not taken yet: nothing has to wait for the copies of the
first layers, beside those of the last update. What a step allocates follows from the order in which it saves tensors,
not from the speed of copies. In backward, tensors come back in the reverse order, each ahead of its use. The last ones
of forward, which are still on the device, do not go through the host.

A share of the bytes goes to the host, as evenly over forward as tensors allow, since copies take longer than the
operators between them.
"""

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import MAX_TRACES
from patrickstar._hardware.sigint_gate import deferring_sigint
from patrickstar._hardware.transfer import Transfer
from patrickstar._tiers.host_arena import ArenaBlock
from patrickstar.errors import TrainingError

MIN_OFFLOAD_BYTES = 4096
"""Smaller tensors are not offloaded: a transfer costs more than the memory that it saves."""
OFFLOADED = "an offloaded activation"
"""Name of what is allocated and copied, for errors and records."""
BUFFERS = 2
"""Tensors in flight, in sizes of the largest one: one is copied while another is computed."""


@dataclass(eq=False)
class _DeviceActivation:
    """A saved tensor that is not offloaded."""

    tensor: torch.Tensor
    source: StorageWeakRef | None = None


@dataclass(eq=False)
class _Moving:
    """Device memory that a copy reads or writes."""

    tensor: torch.Tensor
    copy: Transfer
    saved: "weakref.ref[_HostActivation]"
    nbytes: int
    version: int

    @property
    def changed(self) -> bool:
        """True if the tensor was changed in place, perhaps before it was copied."""
        return self.tensor._version != self.version


class _HostActivation:
    """A saved tensor on the host.

    Args:
        position: Its place among the offloaded tensors of all graphs.
    """

    def __init__(self, tensor: torch.Tensor, source: StorageWeakRef, block: ArenaBlock, position: int) -> None:
        self.source, self.block, self.position = source, block, position
        self.dtype, self.device, self.nbytes = tensor.dtype, tensor.device, tensor.numel() * tensor.element_size()
        self.shape, self.strides = tensor.shape, _dense_strides(tensor)
        self.leaving: _Moving | None = None
        """The tensor itself, until the device is ordered after its copy to the host."""
        self.coming: _Moving | None = None
        """Its copy on the device, until it is used."""
        self.is_used = self._is_spoilt = False
        self.uses_left = 0
        """Operators that saved it and have not used it."""

    @property
    def changed(self) -> bool:
        """True if the tensor was changed in place before its copy had certainly ended."""
        return self._is_spoilt or (self.leaving is not None and self.leaving.changed)

    def leave(self) -> None:
        """Forget the tensor on the device."""
        self._is_spoilt, self.leaving = self.changed, None


class ActivationOffload:
    """Offloads tensors that autograd saves. Parameters are recognized by their chunk's storage and not offloaded.

    Args:
        manager: Manager of the chunks.
        share: Share of the saved bytes that is offloaded.
    """

    def __init__(self, manager: ChunkManager, share: float) -> None:
        self.manager, self._share = manager, share
        self._saved: weakref.WeakValueDictionary[tuple[object, ...], _HostActivation | _DeviceActivation]
        self._saved = weakref.WeakValueDictionary()
        self._due_bytes = 0.0
        """Bytes by which the share exceeds what was offloaded; negative if more was."""
        self._offloaded: list[weakref.ref[_HostActivation]] = []
        """Those of all graphs, in the order of forward."""
        self._leaving: deque[_Moving] = deque()
        self._coming: list[_Moving] = []
        self._used: deque[_Moving] = deque()
        """What another operator will use, too, at most as large as the largest tensor."""
        self._stored: dict[Hashable, int] = {}
        """Bytes of saved tensors that were not offloaded, of the last forward of each kind."""
        self._largest_bytes = self._most_bytes = self._stored_bytes = 0

    @contextmanager
    def saving(self, key: Hashable) -> Iterator[None]:
        """Return a context in which tensors saved by autograd are offloaded to the host.

        Args:
            key: Kind of forward; those of one kind save the same tensors.
        """
        self._begin(key)
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
                saved = self._saved.get(key)
                if saved is None or saved.source is None or saved.source.expired():
                    saved = self._saved[key] = self._save(tensor, storage)
                if isinstance(saved, _HostActivation):
                    saved.uses_left += 1
                return saved

        def unpack(saved: _DeviceActivation | _HostActivation) -> torch.Tensor:
            if isinstance(saved, _DeviceActivation):
                return saved.tensor
            with deferring_sigint():
                return self._use(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._stored[key] = self._stored_bytes
        if len(self._stored) > MAX_TRACES:
            del self._stored[next(iter(self._stored))]

    def _begin(self, key: Hashable) -> None:
        """Begin a forward of a kind, in which the same tensors are offloaded as in the last one of this kind."""
        self._due_bytes = 0.0
        self._most_bytes, self._stored_bytes = self._stored.pop(key, 0), 0
        while self._leaving:
            self._leave()
        self._free_unused()
        alive = [saved for each in self._offloaded if (saved := each()) is not None]
        for position, saved in enumerate(alive):
            saved.position = position
        self._offloaded = [weakref.ref(saved) for saved in alive]

    def _save(self, tensor: torch.Tensor, storage: StorageWeakRef) -> _DeviceActivation | _HostActivation:
        """Offload a tensor, or keep it on the device if that comes closer to the share."""
        nbytes = tensor.numel() * tensor.element_size()
        self._due_bytes += self._share * nbytes
        if self._due_bytes < nbytes / 2:
            self._stored_bytes += nbytes
            return _DeviceActivation(tensor, storage)
        self._due_bytes -= nbytes
        block = self.manager.allocate_host(nbytes, OFFLOADED)
        saved = _HostActivation(tensor, storage, block, len(self._offloaded))
        weakref.finalize(saved, self.manager.host_tier.release_block, block).atexit = False
        self._offloaded.append(weakref.ref(saved))
        self._free_unused()
        # Below autograd a view would have a version of its own.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            source = tensor.detach()
        copy = self._copy(saved, source, to_device=False)
        if self.manager.hardware.has_gpu:
            saved.leaving = copy
            self._leaving.append(copy)
            self._largest_bytes = max(self._largest_bytes, nbytes)
            while _bytes(self._leaving) > max(BUFFERS * self._largest_bytes, self._most_bytes - self._stored_bytes):
                self._leave()
        return saved

    def _leave(self) -> None:
        """Free the device memory of the tensor that has been leaving the longest."""
        moving = self._leaving.popleft()
        self.manager.io_dispatch.order(moving.copy)
        if (saved := moving.saved()) is not None:
            saved.leave()

    def _free_unused(self) -> None:
        """Free the device memory of tensors whose graph was freed before they were used, or used again."""
        self._used = deque(moving for moving in self._used if moving.saved() is not None)
        for moving in [each for each in self._coming if each.saved() is None]:
            self._coming.remove(moving)
            self.manager.io_dispatch.order(moving.copy)

    def _use(self, saved: _HostActivation) -> torch.Tensor:
        """Return a tensor on the device, and begin to copy those that backward uses after it."""
        if saved.changed:
            raise TrainingError(
                f"a saved tensor of shape {tuple(saved.shape)} was changed in place while its {saved.nbytes} "
                f"bytes were copied to the host; use an operator that is not in place, or activation_offload=False"
            )
        moving = self._claim(saved)
        self.manager.io_dispatch.order(moving.copy)
        saved.is_used, saved.uses_left = True, saved.uses_left - 1
        if self.manager.hardware.has_gpu:
            if saved.uses_left > 0:
                self._used.append(moving)
            while _bytes(self._used) > self._largest_bytes:
                self._used.popleft()
            self._fetch_before(saved.position)
        return moving.tensor

    def _claim(self, saved: _HostActivation) -> _Moving:
        """Return a tensor on the device, or on its way there, and give it up."""
        for moving in self._used:
            if moving.saved() is saved:
                self._used.remove(moving)
                return moving
        if (leaving := saved.leaving) is not None:
            self._leaving.remove(leaving)
            saved.leave()
            return leaving
        if (coming := saved.coming) is not None:
            self._coming.remove(coming)
            saved.coming = None
            return coming
        return self._fetch(saved)

    def _fetch(self, saved: _HostActivation) -> _Moving:
        tensor = torch.empty_strided(saved.shape, saved.strides, dtype=saved.dtype, device=saved.device)
        return self._copy(saved, tensor, to_device=True)

    def _fetch_before(self, position: int) -> None:
        """Copy tensors that were saved before one that is used."""
        self._free_unused()
        room = BUFFERS * self._largest_bytes - _bytes(self._coming)
        for reference in reversed(self._offloaded[:position]):
            saved = reference()
            if saved is None or saved.is_used or saved.leaving is not None or saved.coming is not None:
                continue
            room -= saved.nbytes
            if room < 0:
                return
            saved.coming = self._fetch(saved)
            self._coming.append(saved.coming)

    def _copy(self, saved: _HostActivation, tensor: torch.Tensor, to_device: bool) -> _Moving:
        """Copy a tensor of the device to the host or from there."""
        host = self.manager.host_tier
        flat = host.view(saved.block, saved.dtype)  # the arena may have moved the block since the last copy
        view = flat.as_strided(saved.shape, saved.strides, flat.storage_offset())
        target, source = (tensor, view) if to_device else (view, tensor)
        copy = self.manager.io_dispatch.copy_part(target, source, OFFLOADED, to_device=to_device)
        host.copy_issued(saved.block, copy)
        return _Moving(tensor, copy, weakref.ref(saved), saved.nbytes, tensor._version)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy, those of the tensor if it has no gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    with _disable_current_modes():  # a dry run would count its bytes
        return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _bytes(moving: Iterable[_Moving]) -> int:
    return sum(each.nbytes for each in moving)
