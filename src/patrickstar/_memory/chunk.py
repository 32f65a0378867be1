"""A chunk: a contiguous buffer that lies on the device, on the host or on disk, duplicates possible."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from patrickstar._layout.schema import ITEMSIZE
from patrickstar._memory.chunk_storage import device_memory
from patrickstar._memory.host_arena import ArenaBlock
from patrickstar._memory.vm_pool import PagePool
from patrickstar._memory.worker_pool import Transfer
from patrickstar._schedule.placement import Tier


@dataclass(frozen=True)
class Region:
    """Elements of a chunk seen as a tensor: first element, shape and strides, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class MemoryReader(Protocol):
    """Writes a checkpoint."""

    def release(self, owner: Hashable) -> None:
        """Read nothing more of a chunk's memory when this returns."""
        ...


class Chunk:
    """One chunk of one list. `device_valid`, `host_valid` and `disk_valid` say which copies hold the current bytes."""

    def __init__(
        self, kind: str, index: int, numel: int, dtype: str, device: torch.device, bank: PagePool | None = None
    ) -> None:
        self.kind = kind
        self.index = index
        self.numel = numel
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.nbytes = numel * ITEMSIZE[dtype]
        self.memory = device_memory(self.nbytes, device, bank)
        self.storage = self.memory.storage
        self.device_resident = False
        self.host: torch.Tensor | None = None
        self.host_block: ArenaBlock | None = None
        """Where its host memory lies in the slab."""
        self.disk_offset: int | None = None
        """Where its place in the scratch file begins, once it has one."""
        self.device_valid = False
        self.host_valid = False
        self.disk_valid = False
        self.sharded = False
        """Whether its bytes lie in parts with several processes, and here on the device only while they are needed."""
        self.shards_valid = False
        """Whether these have the current bytes. If not, gradients lie over the parameters here."""
        self.fetch_transfer: Transfer | None = None
        """Its bytes are on their way to device memory that it has already taken."""
        self.eviction_transfer: Transfer | None = None
        """Its bytes are being written to a tier below, after which it leaves the device."""
        self.eviction_tier = Tier.HOST
        self.h2d_transfer: Transfer | None = None
        """A copy from its host memory that those who compute on a GPU wait for, and nobody else has yet."""
        self.save_reader: MemoryReader | None = None
        """Who reads its memory for a checkpoint, and has to be done with that before it changes or goes."""
        self.page_reads: list[Transfer] = []
        """Pages on their way from its place on disk to an update's, past which nothing may write them."""
        self.page_writes: list[Transfer] = []
        """Pages on their way to its place on disk, past which nothing may read them."""
        self.disk_version = 0
        """Counts changes of what lies on disk, but for those that an update makes page by page."""
        self.pins = 0
        self.transferred_bytes = 0

    def __repr__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory this chunk takes, whether they hold its current content or not."""
        return 0 if self.host is None else self.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory this chunk takes."""
        return self.nbytes if self.device_resident else 0

    @property
    def has_gradients(self) -> bool:
        """Whether it holds gradients that have to be added to those of other processes."""
        return self.sharded and not self.shards_valid

    @property
    def has_page_writes(self) -> bool:
        """Whether pages are on their way to its place on disk."""
        return any(not transfer.done for transfer in self.page_writes)

    @property
    def in_memory(self) -> bool:
        """Whether its current bytes can be read without waiting, and stay. See [Note: what is on its way]."""
        return (self.device_valid and self.eviction_transfer is None) or self.host_valid

    def on_device(self, region: Region) -> torch.Tensor:
        """Return a view of the device copy with its own version counter. See [Note: one storage for life]."""
        # On a GPU `set_` resizes a storage that is too small: it would take memory that no budget knows of.
        assert self.device_resident, f"{self} has no memory on the device"
        alias = torch.empty(0, dtype=self.dtype, device=self.device)
        return alias.set_(self.storage, region.offset, region.shape, region.strides)

    def device_bytes_view(self) -> torch.Tensor:
        """Return the device's memory of this chunk as flat bytes."""
        assert self.device_resident, f"{self} has no memory on the device"
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)[: self.nbytes]

    def on_host(self, region: Region) -> torch.Tensor:
        """A view of the host copy."""
        assert self.host is not None, f"{self} has no host copy"
        return self.host.as_strided(region.shape, region.strides, self.host.storage_offset() + region.offset)

    def current(self, region: Region) -> torch.Tensor:
        """A view of a copy in memory that holds the current bytes, the device's if there are two."""
        assert self.in_memory, f"{self} is not in memory"
        return self.on_device(region) if self.device_valid else self.on_host(region)

    @property
    def read_storage(self) -> torch.UntypedStorage:
        """The storage that readers find: the device's, unless only the host has the bytes."""
        if self.host is not None and not self.device_valid:
            return self.host.untyped_storage()
        return self.storage

    def wait_for_save(self) -> None:
        """No checkpoint reads its memory when this returns."""
        if self.save_reader is not None:
            self.save_reader.release(self)
            self.save_reader = None

    @property
    def whole(self) -> Region:
        """All elements, in a row."""
        return Region(0, (self.numel,), (1,))

    def allocate_device(self) -> None:
        """Take device memory; its content is undefined."""
        self.memory.allocate()
        self.device_resident = True

    def free_device(self, poison: bool) -> None:
        """Give the device memory back, filled with NaN first where a test asks for it."""
        if poison:
            fill_poison(self.on_device(self.whole))
        self.memory.free()
        self.device_resident = self.device_valid = False


def fill_poison(buffer: torch.Tensor) -> None:
    """Fill with what no computation survives unnoticed: NaN, or the largest integer."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
