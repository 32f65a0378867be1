"""Device memory of one chunk: a permanent storage object whose bytes are allocated and freed."""

from typing import Protocol

import torch

from patrickstar._memory.vm_pool import PagePool, VMRange

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk must be fetched back into the storage that
# these views use. Each chunk owns one storage object for its lifetime: its memory is freed and allocated again, and
# every existing view sees the new bytes. Copies write through a fresh alias (`empty(0).set_(storage)`), which has its
# own version counter, so autograd does not treat a transfer as an in-place modification.


class ChunkStorage(Protocol):
    """Storage whose memory can be allocated and freed."""

    storage: torch.UntypedStorage

    def allocate(self) -> None:
        """Allocate the memory of the storage; its content is undefined."""

    def free(self) -> None:
        """Free the memory; the storage must not be read until it is allocated again."""

    def close(self) -> None:
        """Free the memory for good."""


class ResizableStorage:
    """Memory of PyTorch's allocator: the storage is resized to its bytes or to zero, which is cheap on a GPU."""

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


def device_memory(nbytes: int, device: torch.device, page_pool: PagePool | None) -> ChunkStorage:
    """Return a storage for a chunk of this size, with no memory allocated yet."""
    if page_pool is None or nbytes == 0:
        return ResizableStorage(nbytes, device)
    return RemappedStorage(nbytes, page_pool)
