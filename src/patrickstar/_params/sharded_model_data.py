"""Model data sharded over processes: each rank owns and updates a shard of every chunk (§7, Algorithms 3 and 4)."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._layout.schema import PARAM16, PARAM32, SHARD16, SUM32
from patrickstar._params.local_shards import follow_written
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.owned_shards import OwnedShards
from patrickstar._params.row_gradient import RowGradient
from patrickstar._schedule.coordination import Request
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, TrainingError

# [Note: sharded gradients]
# As with one process, a gradient is stored in place of its parameter in the gathered chunk. Once the chunk has all its
# gradients it is submitted: the gradients of all ranks are reduced, each rank's part of the result replaces its own
# shard of the parameters, and the gathered chunk leaves the device. From then on the owner's shard holds the gradient;
# before any rank can gather the parameter again, its owner restores the shard from the master. Gradients of later
# backwards are reduced as well, and the owner adds them in fp32.
#
# In one backward a chunk is reduced once: in which order the gradients of the ranks are added decides the bits of their
# sum. A chunk that must leave the device before it is complete is accumulated on the host until backward ends.
#
# Whether a parameter has a gradient is known only after all ranks have synchronized: a rank without one counts as zero.
# If no rank has one, the parameter is not updated, as with one process.


class ShardedModelData(OwnedShards):
    """The managed parameters of one rank, which owns a shard of each chunk."""

    def __init__(self, manager: ChunkManager, tracer: Tracer, comm: ChunkComm, *, reduce_in_fp32: bool = False) -> None:
        super().__init__(manager, tracer, comm, reduce_in_fp32)
        self.accumulates_locally = False
        """True if gradients of this backward are accumulated on this rank and reduced after a later backward."""
        self._overlaid: set[int] = set()
        """Chunks with gradients stored in place of parameters."""
        self._dropping = False
        """True while all ranks discard gradients."""
        self._nothing_to_drop = False
        """True right after a step, when no rank has gradients to discard."""
        self._written: set[Chunk] = set()
        """Gathered chunks that this rank wrote to in place; other ranks may have written other values."""

    # Operators

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Restore these parameters where gradients are or were stored in their place."""
        super().restore_params(managed_params)
        for managed in managed_params:
            if managed.state.reducing:
                # The gathered bits equal the old ones, so tensors that autograd saved are valid again.
                torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.state.version_before,))
                managed.state.follow_regather()

    def move_out_gradient(self, managed: ManagedParam) -> None:
        """Keep the gradients of a chunk apart until backward ends, and gather the chunk again."""
        self.manager.ensure_in_memory(managed.chunk)
        for other in self.by_chunk[managed.chunk.index]:
            if other.state.overlays_param:
                other.state.keep_partial(other.payload().clone())
                other.state.submit()
        self._overlaid.discard(managed.chunk.index)
        self.manager.regather(managed.chunk)
        self.update_param_views()

    def on_in_place_write(self, managed: ManagedParam, values: torch.Tensor | None = None) -> None:
        """Copy an in-place write, which the user makes on every rank, to the owner's shard and master.

        Synchronizes first: a slower rank must still gather the old values.
        """
        self.before_update(managed.location.chunk)
        part = managed.flattened(managed.payload())[managed.shard_slice].clone()
        self.synchronize_processes(Request.WRITE)
        self.comm.invalidate([managed.chunk.index])
        self._written.add(managed.chunk)
        if not managed.location.numel:
            return
        self.parameters(managed.chunk.index)  # moves a gradient out of the shard
        managed.flat(managed.shard_chunk).copy_(part)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
        if managed.schema.trained:
            written = part if values is None else managed.flattened(values)[managed.shard_slice]
            for part_slice, master in self.parts(managed, PARAM32, write=True):
                follow_written(master, written[part_slice], exactly=values is not None)

    # Gradients

    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient) -> None:
        """Store a complete gradient in place of its parameter. See [Note: sharded gradients]."""
        state = managed.state
        state.set_ready(True)
        self.tracer.note_gradient(managed.chunk.index)
        if self.manager.timeline is not None:
            self.manager.timeline.holds_gradients(managed.chunk.index, True)
        if state.partial is not None:
            state.partial.add_(grad.to_dense())
            return
        self.ensure_in_memory(managed)
        version = managed.param._version
        self._write_in_memory(managed, grad, add=state.overlays_param)
        state.overlay(self.backward_id, version)
        managed.set_data(managed.absent_view)
        self._overlaid.add(managed.chunk.index)

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Fetch chunks to the device; if there is no room, reduce chunks with incomplete gradients early."""
        try:
            super().fetch(chunks, gently=gently)
        except BudgetError:
            if not self._reduce_idle(chunks):
                raise
            super().fetch(chunks, gently=gently)

    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Gather a parameter's chunk if it is not in memory."""
        if not managed.chunk.in_memory:
            self.fetch([managed.chunk])

    def _keep_budget(self) -> None:
        """Drop gathered chunks written in place, then evict chunks until non-model data fits beside them."""
        for chunk in [chunk for chunk in self._written if not chunk.pins]:
            self._written.discard(chunk)
            if chunk.device.valid and not chunk.has_gradients and chunk.device.reader is None:
                self.manager.drop(chunk)
        try:
            super()._keep_budget()
        except BudgetError:
            if not self._reduce_idle(()):
                raise
            super()._keep_budget()

    def _reduce_idle(self, protect: Sequence[Chunk]) -> bool:
        idle = [
            chunk.index
            for chunk in self.manager.param16.values()
            if chunk.has_gradients and chunk.device.reader is None and not chunk.pins and chunk not in protect
        ]
        for index in idle:
            self._reduce_chunk(index, complete=False)
        return bool(idle)

    def begin_backward(self, accumulate: bool = False) -> None:
        super().begin_backward(accumulate)
        self.accumulates_locally = accumulate

    def end_window(self, managed_params: Sequence[ManagedParam]) -> None:
        """Let chunks that an operator's backward has used wait for their reduction, in linked processes alike."""
        if self.tracer.linked is None:
            return
        for managed in managed_params:
            if managed.param.requires_grad and managed.chunk.device.valid:
                managed.chunk.shards_valid = False
                self._overlaid.add(managed.chunk.index)

    def progress(self) -> None:
        """Reduce unpinned chunks that have the gradients of all their trained parameters.

        Linked processes reduce a chunk after its last use in the trace: whether it has gradients may differ.
        """
        if not self.in_backward:
            return
        for index in sorted(self._overlaid):
            managed_params = self.by_chunk[index]
            if managed_params[0].chunk.pins:
                continue
            if self.tracer.linked is not None:
                trace, now = self.tracer.followed, self.manager.cache.now
                if trace is not None and trace.is_last_use(index, now):
                    self._reduce_chunk(index)
                continue
            if all(managed.state.overlays_param for managed in managed_params if managed.param.requires_grad):
                self._reduce_chunk(index)

    def finish_backward_gradients(self) -> None:
        """End the backward: reduce all remaining gradients, unless they are accumulated on this rank."""
        super().finish_backward_gradients()
        for index in sorted(self._overlaid):
            self._reduce_chunk(index)
        if not self.accumulates_locally:
            self.grad_accumulation.reduce_rest()

    def _reduce_chunk(self, index: int, *, complete: bool = True) -> None:
        """Reduce the gradients in a chunk, or add them to those accumulated on this rank.

        `complete`: no more gradients of the chunk follow in this backward. Until then they are accumulated, if the host
        has room: in a second reduction other ranks' gradients of the same parameter would be added in another order.
        Linked processes reduce the same gradients together anyway.
        """
        managed_params = self.by_chunk[index]
        chunk = managed_params[0].chunk
        self._overlaid.discard(index)
        for managed in managed_params:
            if managed.state.overlays_param:
                managed.state.submit()
            else:
                managed.payload().zero_()
        waits = not complete and self.tracer.linked is None and self.grad_accumulation.fits(chunk)
        if self.accumulates_locally or self.grad_accumulation.has(index) or waits:
            self.grad_accumulation.add(chunk)
            if complete and not self.accumulates_locally:
                self.grad_accumulation.reduce(index)
        else:
            self.grad_accumulation.drop_reduced(index)
            self.manager.transfers.evict_by_reduction(chunk)
        self.update_param_views()

    def collective_section(self) -> AbstractContextManager[None]:
        return self.comm.coordinator.collective_section()

    def synchronize_to_drop(self) -> None:
        """Synchronize all ranks to discard gradients, unless there were none since the last step."""
        fresh, self._nothing_to_drop = self._nothing_to_drop, False
        if not fresh or any(managed.state.ready for managed in self.managed_params):
            self.grad_accumulation.clear()
            self.synchronize_processes(Request.DROP)

    def discard_gradients(self) -> None:
        """Discard all gradients on all ranks, and restore the shards that they replaced."""
        self.grad_accumulation.clear()
        self._dropping = True
        try:
            super().discard_gradients()
        finally:
            self._dropping = False
        self.update_param_views()

    def discard_gradient(self, managed: ManagedParam) -> None:
        """Discard the gradient of a parameter, unless its deferred update is unfinished. All ranks must be in sync."""
        if managed.state.update_pending:
            return
        if not self._dropping:
            if managed.state.ready:
                raise TrainingError(
                    f"the gradient of {managed.name!r} is being reduced across processes and can't be discarded "
                    f"alone; call optimizer.zero_grad() in all processes"
                )
            return
        if managed.state.overlays_param:
            managed.state.submit()
            managed.chunk.shards_valid = not any(
                other.state.overlays_param for other in self.by_chunk[managed.chunk.index]
            )
            if managed.chunk.shards_valid:
                self._overlaid.discard(managed.chunk.index)
                self.manager.regather(managed.chunk)
        self._discard_shard_gradient(managed)

    def _discard_shard_gradient(self, managed: ManagedParam) -> None:
        """Discard the reduced gradient of this rank's shard, and restore the shard."""
        self._finish_reduction(managed.chunk.index)
        if managed.state.reduced:
            self.restore_own(managed)
        managed.state.discard_moved()

    # Synchronization of all ranks

    def synchronize_processes(self, want: Request) -> None:
        self.comm.synchronize_processes(want)
        for chunk in list(self.manager.transfers.in_flight):
            if chunk.sharded and chunk.device.reader is not None:
                self.manager.transfers.complete(chunk)
        for index in self.by_chunk:
            if not self.manager[SHARD16, index].updating:  # an update begins after the reduction
                self._finish_reduction(index)
        self.update_param_views()

    def gradients_are_reduced(self, index: int) -> bool:
        """Return whether the reductions that this rank knows of have ended, and fold their result; does not wait."""
        if index in self._overlaid or self.manager[PARAM16, index].device.reader is not None:
            return False
        if self.comm.waits_for_reduction(index):
            return False
        own = self.manager[SHARD16, index]
        transfer = self.manager.chunks.get((SUM32, index), own).host.reader
        if transfer is not None and not transfer.done:
            return False
        if not own.updating:
            self._finish_reduction(index)
        return True

    def synchronize_gradients(self, want: Request) -> None:
        self.grad_accumulation.reduce_rest()
        self.synchronize_processes(want)
        self.grad_accumulation.clear()
        ready = [managed.state.ready for managed in self.managed_params]
        listed = [bool(self.gradient_sums(index)) for index in self.by_chunk]
        on_this_rank = torch.tensor(ready + listed, dtype=torch.uint8, device="cpu")
        on_any_rank = self.comm.world.all_gather(on_this_rank).any(0).tolist()
        if self.tracer.linked is not None:
            self._create_lists(on_any_rank[len(ready) :])
        for managed, gradient_ready in zip(self.managed_params, on_any_rank[: len(ready)], strict=True):
            stored = managed.state.reduced or managed.state.accumulated
            if stored and not gradient_ready and not managed.state.update_pending:
                self._discard_shard_gradient(managed)
            elif gradient_ready and not stored and not managed.state.update_pending:
                self._store_zero_gradient(managed)
            managed.state.set_ready(gradient_ready)

    def _create_lists(self, listed: Sequence[bool]) -> None:
        """Create the gradient lists that other processes have: an update moves the same chunks in linked processes."""
        for managed_params, needed in zip(self.by_chunk.values(), listed, strict=True):
            if needed:
                self._ensure_list(managed_params[0])

    def _store_zero_gradient(self, managed: ManagedParam) -> None:
        """Give this rank's shard the gradient zero: other processes have one for their part of the parameter."""
        if managed.location.numel:
            self.parameters(managed.chunk.index)
            managed.flat(managed.shard_chunk).zero_()
            self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
            managed.state.store_reduced()

    def close_step(self, updated: Iterable[ManagedParam]) -> None:
        """Finish an optimizer step: drop gathered chunks, which are stale. See `ModelData.close_step`."""
        updated_set = set(updated)
        for managed in self.managed_params:
            if managed.state.ready and managed in updated_set and not managed.location.numel:
                managed.begin_update()
                self.end_update((managed,))
            managed.state.end_step()
        self.drop_gathered(index for index, params in self.by_chunk.items() if params[0].schema.trained)
        self._nothing_to_drop = True

    def drop_gathered(self, indices: Iterable[int] | None = None) -> None:
        self._written.clear()
        changed = list(self.by_chunk if indices is None else indices)
        self.comm.invalidate(changed)
        self.manager.drop_gathered(changed)
        self.update_param_views()

    def has_gradient(self, managed: ManagedParam) -> bool:
        return managed.state.ready
