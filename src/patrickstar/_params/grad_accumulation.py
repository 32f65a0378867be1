"""Gradients that a process adds up by itself, over several backwards, before all processes average them once."""

import torch

from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._layout.schema import KEPT32, PARAM16
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._schedule.placement import Tier


class GradAccumulation:
    """Sums in fp32 (fp64 for fp64) of whole chunks, on the host. They are sent from there."""

    def __init__(self, manager: ChunkManager, comm: ChunkComm) -> None:
        self.manager = manager
        self.comm = comm
        self._sent: set[int] = set()
        """Chunks whose sum has been handed over."""

    def has(self, index: int) -> bool:
        """Whether there is a sum of a chunk that has not been handed over."""
        return (KEPT32, index) in self.manager.chunks and index not in self._sent

    def add(self, chunk: Chunk) -> None:
        """Add the gradients over a gathered chunk, which leaves the device then."""
        grads = chunk.on_device(chunk.whole)
        if chunk.index in self._sent:
            self._sent.discard(chunk.index)
            self.manager.remove(self.manager[KEPT32, chunk.index])
        if self.has(chunk.index):
            kept = self.manager[KEPT32, chunk.index]
            total = kept.current(kept.whole)
            total += grads.to(total.device)
        else:
            dtype = "float64" if chunk.dtype == torch.float64 else "float32"
            kept = self.manager.new_chunk(KEPT32, chunk.index, chunk.numel, dtype, Tier.HOST)
            kept.current(kept.whole).copy_(grads)
        self.manager.count_transfer(chunk.nbytes, to_device=False)
        self.manager.drop(chunk)

    def reduce(self, index: int) -> None:
        """Have the sum of a chunk averaged."""
        self._sent.add(index)
        self.manager[KEPT32, index].h2d_transfer = self.comm.reduce(self.manager[PARAM16, index])

    def reduce_rest(self) -> None:
        """The same of all that have not been."""
        for kind, index in list(self.manager.chunks):
            if kind == KEPT32 and index not in self._sent:
                self.reduce(index)

    def reducing(self, index: int) -> torch.Tensor | None:
        """A sum that is being averaged."""
        kept = self.manager[KEPT32, index] if index in self._sent else None
        return None if kept is None else kept.current(kept.whole)

    def clear(self) -> None:
        """Drop all sums; those that are being averaged end first."""
        for (kind, index), chunk in list(self.manager.chunks.items()):
            if kind == KEPT32:
                self.comm.cancel_reduction(index)
                self.manager.remove(chunk)
        self._sent.clear()
