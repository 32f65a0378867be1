"""The device's memory of one chunk: one storage for life, whose bytes come and go."""

from typing import Protocol

import torch

from patrickstar._memory.vm_pool import PagePool, VMRange

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk's device memory must come back where they
# look for it. Each chunk owns one storage object for as long as it lives: its memory leaves it and comes back,
# and every view that was ever taken sees the new bytes. Writing goes through a fresh alias (`empty(0).set_(storage)`),
# which has its own version counter: moving bytes is not a modification that autograd has to know of.


class ChunkStorage(Protocol):
    """A storage whose memory can be taken and given back."""

    storage: torch.UntypedStorage

    def allocate(self) -> None:
        """Have memory behind the storage; its content is undefined."""

    def free(self) -> None:
        """Give the memory back; the storage must not be read until it is taken again."""

    def close(self) -> None:
        """Nobody will take it again."""


class ResizableStorage:
    """What PyTorch's allocator gives: the storage is resized to its bytes, and to zero. On a GPU that costs nothing."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def free(self) -> None:
        self.storage.resize_(0)

    def close(self) -> None:
        self.free()


class RemappedStorage:
    """A range of addresses that pages move to and from. See [Note: movable pages]."""

    def __init__(self, nbytes: int, bank: PagePool) -> None:
        self.page_pool = bank
        self.range = VMRange(nbytes)
        self.storage = self.range.storage()

    def allocate(self) -> None:
        self.page_pool.commit(self.range)

    def free(self) -> None:
        self.page_pool.decommit(self.range)

    def close(self) -> None:
        self.page_pool.release(self.range)


def device_memory(nbytes: int, device: torch.device, bank: PagePool | None) -> ChunkStorage:
    """Memory for a chunk of this size; none of it is taken yet."""
    if bank is None or nbytes == 0:
        return ResizableStorage(nbytes, device)
    return RemappedStorage(nbytes, bank)
