"""Chunk: a contiguous buffer with a copy on the device, on the host or on disk, or on several of them."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller

import torch

from patrickstar._hardware.storage_guard import allow_access, refuse_access
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import PagePool
from patrickstar._layout.schema import ITEMSIZE
from patrickstar._tiers.host_arena import ArenaBlock

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk must be fetched back into the storage that
# these views use. Each chunk owns one storage object for its lifetime: its memory is freed and allocated again, and
# every existing view sees the new bytes. Copies write through a fresh alias (`empty(0).set_(storage)`), which has its
# own version counter, so autograd does not treat a transfer as an in-place modification.
#
# [Note: users of a copy]
# Copies to and from other tiers, updates, page I/O and checkpoint writers use the memory of a copy beside the training
# thread. Each is registered, as a `Transfer`, where it uses memory, and whoever reads or writes that memory, frees or
# moves it waits for it: `Copy.settle`. What an accelerator copies stays registered, for the host, once the device's
# work has been ordered after it. An update that ends may change which copies are valid, and exchange their memory.


class ResizableStorage:
    """Memory of PyTorch's allocator: the storage is resized to its bytes or to zero, which is cheap on a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def free(self) -> None:
        if self.storage.nbytes():  # otherwise it may refuse to be read
            self.storage.resize_(0)

    def close(self) -> None:
        self.free()


class RemappedStorage:
    """Address range that pages are remapped to and from. See [Note: movable pages]."""

    def __init__(self, nbytes: int, page_pool: PagePool) -> None:
        self.page_pool = page_pool
        self.range = page_pool.new_range(nbytes)
        self.storage = self.range.storage()

    def allocate(self) -> None:
        self.page_pool.commit(self.range)

    def free(self) -> None:
        self.page_pool.decommit(self.range)

    def close(self) -> None:
        self.page_pool.release(self.range)


def device_memory(nbytes: int, device: torch.device, page_pool: PagePool | None) -> ResizableStorage | RemappedStorage:
    if page_pool is None or nbytes == 0:
        return ResizableStorage(nbytes, device)
    return RemappedStorage(nbytes, page_pool)


@dataclass(frozen=True)
class Region:
    """Strided view into a chunk; offset and strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_wait: Callable[[Transfer], None] = methodcaller("wait")


class Copy:
    """Copy of a chunk in the memory of one tier."""

    __slots__ = "flats", "present", "reader", "save", "update", "valid", "writer"

    def __init__(self) -> None:
        self.present = False
        """True if it has memory."""
        self.flats: dict[tuple[int, int], torch.Tensor] = {}
        """1-D views of its memory, by offset and length."""
        self.valid = False
        """True if it is up to date."""
        self.writer: Transfer | None = None
        """Copy from another tier that writes it; on the device a fetch in flight."""
        self.reader: Transfer | None = None
        """Last copy to another tier that reads it; on the device an eviction in flight, which frees it."""
        self.update: Transfer | None = None
        """Running update that uses it. See [Note: running updates]."""
        self.save: Transfer | None = None
        """Reads of a checkpoint writer."""

    def settle(self, *, write: bool = False, move: bool = False, wait: Callable[[Transfer], None] = _wait) -> None:
        """Wait until the host can read what other tiers write to it.

        `write`: until it can write; `move`: until nothing uses the memory, which is about to be freed or moved.
        """
        if move and self.update is not None:
            self.update.wait()
        if self.writer is not None:
            wait(self.writer)
            self.writer = None
        if (write or move) and self.reader is not None:
            wait(self.reader)
            self.reader = None
        if move and self.save is not None:
            self.save.wait()
            self.save = None


class HostCopy(Copy):
    """Copy of a chunk in a block of the host arena."""

    __slots__ = "block", "memory"

    def __init__(self) -> None:
        super().__init__()
        self.block: ArenaBlock | None = None
        self.memory: torch.Tensor | None = None
        """The block as a tensor of the chunk's elements; None without one."""

    def place(self, block: ArenaBlock | None, memory: torch.Tensor | None) -> None:
        """Keep the copy in a block from now on; its old views are invalid."""
        self.block, self.memory, self.present = block, memory, block is not None
        self.flats.clear()


class DiskCopy:
    """Copy of a chunk in the swap file, and its pages in flight."""

    __slots__ = "offset", "reads", "spare_offset", "valid", "writes"

    def __init__(self) -> None:
        self.valid = False
        """True if it is up to date."""
        self.offset: int | None = None
        """Byte offset of its block in the swap file, once allocated."""
        self.spare_offset: int | None = None
        """Byte offset of its spare pages, once allocated. See [Note: spare pages]."""
        self.reads: list[Transfer] = []
        """Reads of its pages by the optimizer step; writes of these pages must wait for them."""
        self.writes: dict[int, Transfer] = {}
        """Writes of its pages by first byte; a read of such a page must wait for its write."""

    def settle(self, *, write: bool = False, wait: Callable[[Transfer], None] = _wait) -> None:
        """Wait until no page is being written; `write`: nor read."""
        for transfer in (*(self.reads if write else ()), *self.writes.values()):
            wait(transfer)

    @property
    def has_writes(self) -> bool:
        return any(not transfer.done for transfer in self.writes.values())

    def writes_page(self, start: int) -> bool:
        """Return whether the page that begins at this byte is being written."""
        write = self.writes.get(start)
        return write is not None and not write.done


class Chunk:
    """One chunk of one chunk list, with its copies on the tiers."""

    def __init__(
        self, kind: str, index: int, numel: int, dtype: str, device: torch.device, page_pool: PagePool | None = None
    ) -> None:
        self.kind = kind
        self.index = index
        self.numel = numel
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.compute_device = device
        self.nbytes = numel * ITEMSIZE[dtype]
        self.whole = Region(0, (numel,), (1,))
        self.device, self.host, self.disk = Copy(), HostCopy(), DiskCopy()
        self.deferred: Transfer | None = None
        """Queued update of the parameters or gradients in it. See [Note: deferred updates]."""
        self.memory = device_memory(self.nbytes, device, page_pool)
        self.storage = self.memory.storage
        self.refusal = ""
        """Error of native code that reads a view of it without device memory, if views leave the engine.

        See [Note: storages that refuse to be read].
        """
        self.held = False
        """True while it is pinned for a whole iteration. See [Note: resident iterations]."""
        self.sharded = False
        """True if each rank keeps a shard; the device then holds the gathered chunk only while it is needed."""
        self.shards_valid = False
        """True if the shards are up to date. If not, the device memory holds gradients in place of parameters."""
        self.version = 0
        """Counts changes of the content, except page-by-page writes of the optimizer step."""
        self.pins = 0
        self.transferred_bytes = self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated to this chunk, whether its host copy is valid or not."""
        return self.nbytes if self.host.present else 0

    @property
    def device_bytes(self) -> int:
        return self.nbytes if self.device.present else 0

    @property
    def has_gradients(self) -> bool:
        """True if its device memory holds gradients that are not reduced yet."""
        return self.sharded and not self.shards_valid

    @property
    def in_memory(self) -> bool:
        """True if an up to date copy in memory can be read without waiting. See [Note: transfers in flight]."""
        return (self.device.valid and self.device.reader is None) or self.host.valid

    def on_device(self, region: Region) -> torch.Tensor:
        """Return a view of the device copy with its own version counter. See [Note: one storage for life]."""
        # On a GPU `set_` resizes a storage that is too small: it would allocate memory outside of the budget.
        assert self.device.present, f"{self} has no device memory"
        alias = torch.empty(0, dtype=self.dtype, device=self.compute_device)
        return alias.set_(self.storage, region.offset, region.shape, region.strides)

    def device_bytes_view(self) -> torch.Tensor:
        assert self.device.present, f"{self} has no device memory"
        return torch.empty(0, dtype=torch.uint8, device=self.compute_device).set_(self.storage)[: self.nbytes]

    def on_host(self, region: Region) -> torch.Tensor:
        """Return a view of the host copy, once it has been written."""
        if self.host.writer is not None:
            self.host.settle()
        return self._host_view(region)

    def _host_view(self, region: Region) -> torch.Tensor:
        memory = self.host.memory
        assert memory is not None, f"{self} has no host copy"
        return memory.as_strided(region.shape, region.strides, memory.storage_offset() + region.offset)

    def current(self, region: Region) -> torch.Tensor:
        """Return a view of a valid copy in memory, by preference the device copy."""
        assert self.in_memory, f"{self} is not in memory"
        return self.on_device(region) if self.device.valid else self.on_host(region)

    def flat(self, offset: int, numel: int, *, in_order: bool = False) -> torch.Tensor:
        """Return elements of a valid copy in memory as a 1-D tensor, by preference of the device copy.

        `in_order`: the caller settles a host copy before it accesses it.
        """
        assert self.in_memory, f"{self} is not in memory"
        if not self.device.valid and not in_order:
            self.host.settle()
        flats = self.device.flats if self.device.valid else self.host.flats
        flat = flats.get((offset, numel))
        if flat is None:
            region = Region(offset, (numel,), (1,))
            flat = flats[offset, numel] = self.on_device(region) if self.device.valid else self._host_view(region)
        return flat

    def flat_on_host(self, offset: int, numel: int) -> torch.Tensor:
        """Return elements of the host memory, to be written: the host copy need not be valid."""
        return self._host_view(Region(offset, (numel,), (1,)))

    @property
    def read_storage(self) -> torch.UntypedStorage:
        """Storage of a valid copy: the device's, unless only the host copy is valid."""
        if self.host.memory is not None and not self.device.valid:
            return self.host.memory.untyped_storage()
        return self.storage

    @property
    def in_use(self) -> Copy:
        """Copy in memory that `current` and `flat` return views of."""
        return self.device if self.device.valid else self.host

    @property
    def updating(self) -> bool:
        """True while an update uses a copy in memory."""
        return self.device.update is not None or self.host.update is not None

    def finish_update(self) -> None:
        """Finish the update that uses a copy in memory, if any, before the chunk moves."""
        if self.device.update is not None:
            self.device.update.wait()
        if self.host.update is not None:
            self.host.update.wait()

    def complete_update(self) -> None:
        """Finish the update of its content, running or deferred."""
        self.finish_update()
        if self.deferred is not None:
            self.deferred.wait()

    def allocate_device(self) -> None:
        if self.refusal:
            allow_access(self.storage)
        self.memory.allocate()
        self.device.present = True

    def free_device(self, poison: bool) -> None:
        """Free the device memory. `poison` fills it with NaN first, for tests."""
        if poison:
            fill_poison(self.on_device(self.whole))
        self.memory.free()
        if self.refusal:
            refuse_access(self.storage, self.refusal)
        self.device.present = self.device.valid = False


def fill_poison(buffer: torch.Tensor) -> None:
    """Fill with values that expose any later read: NaN, or the largest integer."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
