"""Shards of chunks that a rank owns: what it sends to others, and the sums of gradients that it receives."""

from collections.abc import Callable, Mapping

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._layout.schema import ITEMSIZE, PARAM16, SHARD16, SUM32
from patrickstar._params.grad_accumulation import GradAccumulation
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk


class OwnedShards(ModelData):
    """The part of `ShardedModelData` that other ranks request: see `ShardOwner`."""

    def __init__(self, manager: ChunkManager, tracer: Tracer, comm: ChunkComm, reduce_in_fp32: bool) -> None:
        super().__init__(manager, tracer, comm.world)
        self.comm: ChunkComm = comm
        self.chunks: Mapping[tuple[str, int], Chunk] = manager.chunks
        self.settle: Callable[[Chunk], None] = manager.transfers.settle
        self.has_gpu = manager.hardware.has_gpu
        comm.attach(self)
        self.reduces_in_fp32 = reduce_in_fp32
        """True if gradients are sent, and their sums stored, in fp32."""
        self.grad_accumulation = GradAccumulation(manager, comm)
        """Gradients accumulated on this rank and not yet reduced."""

    def parameters(self, index: int) -> torch.Tensor:
        """Return this rank's shard of a chunk with its parameters restored, on its current tier."""
        managed_params, own = self._own_managed_params(index), self.manager[SHARD16, index]
        own.complete_update()
        self._finish_reduction(index)
        for managed in managed_params:
            if managed.state.reduced:
                self.list_gradient(managed)
                self.restore_own(managed)
                managed.state.restore_shard()
        if not own.in_memory:
            self.manager.ensure_in_memory(own)
            self.update_param_views()
        return own.current(own.whole)

    def _finish_reduction(self, index: int) -> None:
        """Finish the pending reduction of a chunk and fold it into grad32."""
        self.manager.transfers.settle(self.manager[SHARD16, index])
        sum_chunk = self.manager.chunks.get((SUM32, index))
        if sum_chunk is not None:
            self.manager.transfers.settle(sum_chunk)
            for managed in self._own_managed_params(index):
                self._add_to_list(managed, sum_chunk)
            self.manager.remove(sum_chunk)

    def begin_reduction(self, index: int, contributes: bool) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Return this rank's gradients, the buffer for the sum of its shard, and the buffer's chunk."""
        self.parameters(index)  # moves an earlier sum out of the buffer
        own = self.manager[SHARD16, index]
        gradients = None
        if contributes:
            chunk, accumulated = self.manager[PARAM16, index], self.grad_accumulation.reducing(index)
            gradients = accumulated if accumulated is not None else chunk.on_device(chunk.whole)
        if self.reduces_in_fp32 and own.dtype.itemsize < ITEMSIZE["float32"]:
            sum_chunk = self.manager.new_chunk(SUM32, index, own.numel, "float32", Tier.HOST)
            return gradients, sum_chunk.current(sum_chunk.whole), sum_chunk
        self.manager.mark_written(own, on_device=own.device.valid)
        for managed in self._own_managed_params(index):
            managed.state.store_reduced()
        return gradients, own.current(own.whole), own

    def fits_host(self, chunk: Chunk) -> bool:
        """Return whether a chunk's gradients on the device can be moved to the host.

        Linked processes move the same chunks, and reduce the same gradients together.
        """
        sums = self.grad_accumulation
        return self.tracer.linked is None and sums.reducing(chunk.index) is None and sums.fits(chunk)

    def move_gradients_to_host(self, chunk: Chunk, reduction: Transfer) -> None:
        """Copy a chunk's gradients to the host, until their reduction, which reads them there."""
        self.grad_accumulation.copy_submitted(chunk, reduction)

    def _grad_list_tier(self, master_chunk: Chunk) -> Tier:
        """Return a tier that needs no eviction, since an eviction may wait for other ranks."""
        tier, device = super()._grad_list_tier(master_chunk), self.manager.device_tier
        has_room = device.used + master_chunk.nbytes <= device.chunkable_bytes
        # Whether there are earlier gradients differs between linked processes.
        if tier is Tier.DEVICE and (self.manager.cache.decides_alike or not has_room):
            return Tier.HOST
        return tier

    def _own_managed_params(self, index: int) -> list[ManagedParam]:
        return [managed for managed in self.by_chunk[index] if managed.location.numel]

    def register_shards(self, layout: Layout) -> None:
        self.comm.register(chunk for chunk in layout.chunks if chunk.index not in self.comm.transports)

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        self.comm.transports[managed.chunk.index].assemble(flat, managed.region.offset)

    def assemble(self, managed: ManagedParam, part: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty_strided(managed.full_shape, managed.full_strides, dtype=part.dtype, device="cpu")
        assert managed.sharding is not None, "with several processes every parameter has a sharding"
        managed.sharding.assemble(part, out, self.comm.world)
        return out
