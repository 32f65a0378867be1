"""Chunk: a contiguous buffer with a copy on the device, on the host or on disk, or on several of them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from patrickstar._hardware.storage_guard import allow_access, refuse_access
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import PagePool, VMRange
from patrickstar._layout.schema import ITEMSIZE
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.host_arena import ArenaBlock

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk must be fetched back into the storage that
# these views use. Each chunk owns one storage object for its lifetime: its memory is freed and allocated again, and
# every existing view sees the new bytes. Copies write through a fresh alias (`empty(0).set_(storage)`), which has its
# own version counter, so autograd does not treat a transfer as an in-place modification.


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
        self.range = VMRange(nbytes)
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


class MemoryReader(Protocol):
    """Checkpoint writer that may still read a chunk's memory."""

    def release(self, owner: Hashable) -> None:
        """Wait until this reader no longer reads the chunk's memory."""


class Chunk:
    """One chunk of one chunk list. `device_valid`, `host_valid` and `disk_valid` mark the up to date copies."""

    def __init__(
        self, kind: str, index: int, numel: int, dtype: str, device: torch.device, page_pool: PagePool | None = None
    ) -> None:
        self.kind = kind
        self.index = index
        self.numel = numel
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.nbytes = numel * ITEMSIZE[dtype]
        self.memory = device_memory(self.nbytes, device, page_pool)
        self.storage = self.memory.storage
        self.device_resident = False
        self.refusal = ""
        """Error of native code that reads a view of it without device memory, if views leave the engine.

        See [Note: storages that refuse to be read].
        """
        self._host: torch.Tensor | None = None
        self._device_flats: dict[tuple[int, int], torch.Tensor] = {}
        self._host_flats: dict[tuple[int, int], torch.Tensor] = {}
        self.host_block: ArenaBlock | None = None
        """Block of the host arena that holds the host copy."""
        self.disk_offset: int | None = None
        """Byte offset of its block in the swap file, once allocated."""
        self.spare_offset: int | None = None
        """Byte offset of its spare pages in the swap file, once allocated. See [Note: spare pages]."""
        self.held = False
        """True while it is pinned for a whole iteration. See [Note: resident iterations]."""
        self.device_valid = False
        self.host_valid = False
        self.disk_valid = False
        self.sharded = False
        """True if each rank keeps a shard; the device then holds the gathered chunk only while it is needed."""
        self.shards_valid = False
        """True if the shards are up to date. If not, the device memory holds gradients in place of parameters."""
        self.fetch_transfer: Transfer | None = None
        """Transfer in flight to its device memory, which is already allocated."""
        self.eviction_transfer: Transfer | None = None
        """Transfer in flight to a tier below; its device memory is freed when that is complete."""
        self.eviction_tier = Tier.HOST
        self.h2d_transfer: Transfer | None = None
        """H2D copy ordered on the compute stream, not yet synchronized with the host."""
        self.d2h_transfer: Transfer | None = None
        """D2H copy ordered on the compute stream, for which the host waits before it accesses the host copy."""
        self.finish_update: Callable[[], None] | None = None
        """Finishes the update in progress that uses the chunk's memory. See [Note: running updates]."""
        self.renews_host = False
        """True while an update writes the host copy of a chunk that is on the device, too."""
        self.save_reader: MemoryReader | None = None
        """Checkpoint writer that must finish before the chunk's memory is written or freed."""
        self.page_reads: list[Transfer] = []
        """Reads of its disk pages by the optimizer step, in flight; writes of these pages must wait for them."""
        self.page_writes: dict[int, Transfer] = {}
        """Writes of its disk pages by first byte, in flight; a read of such a page must wait for its write."""
        self.version = 0
        """Counts changes of the content, except page-by-page writes of the optimizer step."""
        self.pins = 0
        self.transferred_bytes = 0

    def __repr__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def host(self) -> torch.Tensor | None:
        """Host memory of this chunk, None without any."""
        return self._host

    @host.setter
    def host(self, host: torch.Tensor | None) -> None:
        self._host = host
        self._host_flats.clear()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated to this chunk, whether its host copy is valid or not."""
        return 0 if self.host is None else self.nbytes

    @property
    def device_bytes(self) -> int:
        return self.nbytes if self.device_resident else 0

    @property
    def has_gradients(self) -> bool:
        """True if its device memory holds gradients that are not reduced yet."""
        return self.sharded and not self.shards_valid

    @property
    def has_page_writes(self) -> bool:
        return any(not transfer.done for transfer in self.page_writes.values())

    def writes_page(self, start: int) -> bool:
        """Return whether the disk page that begins at this byte is being written."""
        write = self.page_writes.get(start)
        return write is not None and not write.done

    @property
    def in_memory(self) -> bool:
        """True if an up to date copy in memory can be read without waiting. See [Note: transfers in flight]."""
        return (self.device_valid and self.eviction_transfer is None) or self.host_valid

    def on_device(self, region: Region) -> torch.Tensor:
        """Return a view of the device copy with its own version counter. See [Note: one storage for life]."""
        # On a GPU `set_` resizes a storage that is too small: it would allocate memory outside of the budget.
        assert self.device_resident, f"{self} has no device memory"
        alias = torch.empty(0, dtype=self.dtype, device=self.device)
        return alias.set_(self.storage, region.offset, region.shape, region.strides)

    def device_bytes_view(self) -> torch.Tensor:
        assert self.device_resident, f"{self} has no device memory"
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)[: self.nbytes]

    def on_host(self, region: Region) -> torch.Tensor:
        """Return a view of the host copy, once the device has written it."""
        assert self.host is not None, f"{self} has no host copy"
        self.wait_for_d2h()
        return self._host_view(region)

    def _host_view(self, region: Region) -> torch.Tensor:
        assert self.host is not None, f"{self} has no host copy"
        return self.host.as_strided(region.shape, region.strides, self.host.storage_offset() + region.offset)

    def current(self, region: Region) -> torch.Tensor:
        """Return a view of a valid copy in memory, by preference the device copy."""
        assert self.in_memory, f"{self} is not in memory"
        return self.on_device(region) if self.device_valid else self.on_host(region)

    def flat(self, offset: int, numel: int, *, in_order: bool = False) -> torch.Tensor:
        """Return elements of a valid copy in memory as a 1-D tensor, by preference of the device copy.

        `in_order`: the caller waits for `d2h_transfer` before it accesses a host copy.
        """
        assert self.in_memory, f"{self} is not in memory"
        if not self.device_valid and not in_order:
            self.wait_for_d2h()
        flats = self._device_flats if self.device_valid else self._host_flats
        flat = flats.get((offset, numel))
        if flat is None:
            region = Region(offset, (numel,), (1,))
            flat = flats[offset, numel] = self.on_device(region) if self.device_valid else self._host_view(region)
        return flat

    def flat_on_host(self, offset: int, numel: int) -> torch.Tensor:
        """Return elements of the host memory, to be written: the host copy need not be valid."""
        return self._host_view(Region(offset, (numel,), (1,)))

    def wait_for_d2h(self) -> None:
        """Wait until the device has written the host copy."""
        if self.d2h_transfer is not None:
            self.d2h_transfer.wait()
            self.d2h_transfer = None

    @property
    def read_storage(self) -> torch.UntypedStorage:
        """Storage of a valid copy: the device's, unless only the host copy is valid."""
        if self.host is not None and not self.device_valid:
            return self.host.untyped_storage()
        return self.storage

    def wait_for_update(self) -> None:
        """Finish the update in progress that uses this chunk's memory, before the memory is copied or freed."""
        if self.finish_update is not None:
            self.finish_update()

    def wait_for_save(self) -> None:
        """Wait until no checkpoint writer reads this chunk's memory."""
        if self.save_reader is not None:
            self.save_reader.release(self)
            self.save_reader = None

    @property
    def whole(self) -> Region:
        return Region(0, (self.numel,), (1,))

    def allocate_device(self) -> None:
        if self.refusal:
            allow_access(self.storage)
        self.memory.allocate()
        self.device_resident = True

    def free_device(self, poison: bool) -> None:
        """Free the device memory. `poison` fills it with NaN first, for tests."""
        if poison:
            fill_poison(self.on_device(self.whole))
        self.memory.free()
        if self.refusal:
            refuse_access(self.storage, self.refusal)
        self.device_resident = self.device_valid = False


def fill_poison(buffer: torch.Tensor) -> None:
    """Fill with values that expose any later read: NaN, or the largest integer."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
