"""Rank-local gradient accumulation over several backwards, followed by one reduction across all processes."""

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.schema import KEPT32
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk


class GradAccumulation:
    """Per-chunk gradient sums in fp32 (fp64 for fp64 parameters), on the host until they are reduced."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager
        self._submitted: set[int] = set()
        """Chunks whose sum has been submitted for reduction."""

    def has(self, index: int) -> bool:
        """Return whether the chunk has a sum that has not been submitted for reduction."""
        return (KEPT32, index) in self.manager.chunks and index not in self._submitted

    def fits(self, chunk: Chunk) -> bool:
        """Return whether the host has room for the sum of a chunk, and make room by moving chunks to the disk."""
        return self.manager.free_host(chunk.numel * _dtype_of(chunk).itemsize)

    def add(self, chunk: Chunk) -> None:
        """Add the gradients stored in a gathered chunk to its sum, then drop the chunk from the device."""
        grads = chunk.on_device(chunk.whole)
        self.drop_reduced(chunk.index)
        if self.has(chunk.index):
            sum_chunk = self.manager[KEPT32, chunk.index]
            total = sum_chunk.current(sum_chunk.whole)
            total += grads.to(total.device)
            self.manager.count_transfer(chunk.nbytes, to_device=False)
        else:
            self._copy(chunk, grads)
        self.manager.drop(chunk)

    def _copy(self, chunk: Chunk, grads: torch.Tensor) -> None:
        """Copy the gradients of a chunk to a new sum."""
        dtype = str(_dtype_of(chunk)).removeprefix("torch.")
        sum_chunk = self.manager.new_chunk(KEPT32, chunk.index, chunk.numel, dtype, Tier.HOST)
        sum_chunk.current(sum_chunk.whole).copy_(grads)
        self.manager.count_transfer(chunk.nbytes, to_device=False)

    def copy_submitted(self, chunk: Chunk, reduction: Transfer) -> None:
        """Copy the gradients of a chunk whose reduction has been requested to the host, where it will read them."""
        self._copy(chunk, chunk.on_device(chunk.whole))
        self.submit(chunk.index)
        self.manager[KEPT32, chunk.index].host.reader = reduction

    def submit(self, index: int) -> None:
        """Add no more gradients to the sum of a chunk, whose reduction is about to be requested."""
        self._submitted.add(index)

    def drop_reduced(self, index: int) -> None:
        """Drop the sum of a chunk if it was submitted for reduction, once it is reduced."""
        if index in self._submitted:
            self.manager.remove(self.manager[KEPT32, index])  # waits for the reduction, which reads the sum
            self._submitted.discard(index)

    def indices(self) -> list[int]:
        """Return the chunks that have a sum."""
        return [index for kind, index in self.manager.chunks if kind == KEPT32]

    def reducing(self, index: int) -> torch.Tensor | None:
        """Return the sum of a chunk if it has been submitted for reduction, else None."""
        sum_chunk = self.manager[KEPT32, index] if index in self._submitted else None
        return None if sum_chunk is None else sum_chunk.current(sum_chunk.whole)

    def clear(self) -> None:
        """Drop all sums, whose reductions were withdrawn unless they have started; wait for those."""
        for index in self.indices():
            self.manager.remove(self.manager[KEPT32, index])
        self._submitted.clear()


def _dtype_of(chunk: Chunk) -> torch.dtype:
    """Return the dtype of a chunk's sum."""
    return torch.float64 if chunk.dtype == torch.float64 else torch.float32
