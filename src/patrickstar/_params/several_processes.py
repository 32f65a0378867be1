"""Chunks that several processes share: each rank owns and updates a shard of every chunk (§7, Algorithms 3 and 4)."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from patrickstar._distributed.tensor_json import from_json, to_json
from patrickstar._layout.schema import GRAD32, KEPT32, PARAM16, PARAM32, SHARD16
from patrickstar._params.chunk_comm import ChunkComm
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.one_process import OneProcess
from patrickstar._params.param_values import follow_written
from patrickstar._params.row_gradient import RowGradient
from patrickstar._schedule.coordination import Request
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, TrainingError

# [Note: sharded gradients]
# As with one process, a gradient is stored in place of its parameter in the gathered chunk. Once the chunk has all its
# gradients it is submitted: the gradients of all ranks are reduced, each rank's part of the result replaces its own
# shard of the parameters, and the gathered chunk leaves the device. From then on the owner's shard holds the gradient;
# before any rank can gather the parameter again, its owner restores the shard from the master. Gradients of later
# backwards are reduced as well, and the owner adds them in fp32. While an update is late, the shard is not the rounded
# master, and no rank knows whether another one gathers it again: the sum goes to `sum32`, then to the gradient list.
#
# In one backward a chunk is reduced once: in which order the gradients of the ranks are added decides the bits of their
# sum. A chunk that must leave the device before it is complete is accumulated on the host until backward ends.
#
# Whether a parameter has a gradient is known only after all ranks have synchronized: a rank without one counts as zero.
# If no rank has one, the parameter is not updated, as with one process.


class SeveralProcesses:
    """Sharing of chunks with the other ranks: their gradients are reduced, and this rank owns a shard of each chunk."""

    def __init__(self, shards: LocalShards, comm: ChunkComm, reduce_dtype: str) -> None:
        self.shards, self.manager, self.tracer = shards, shards.manager, shards.tracer
        comm.attach(shards, reduce_dtype)
        self.comm, self.sums = comm, comm.sums
        self.batches = comm.coordinator.group.size
        """Number of distinct batches whose gradients a step averages."""
        self.written: set[Chunk] = set()
        """Gathered chunks that this rank wrote to in place; other ranks may have written other values."""
        self._overlaid: set[int] = set()
        """Chunks with gradients stored in place of parameters."""
        self._nothing_to_drop = False
        """True right after a step, when no rank has gradients to discard."""

    # Operators

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Restore these parameters where gradients are or were stored in their place."""
        for managed in managed_params:
            if managed.state.overlays_param:
                self._move_out_gradients(managed)
        for managed in managed_params:
            if managed.state.reducing:
                # The gathered bits equal the old ones, so tensors that autograd saved are valid again.
                torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.state.version_before,))
                managed.state.reducing = False

    def _move_out_gradients(self, managed: ManagedParam) -> None:
        """Keep the gradients of a parameter's chunk apart until backward ends, and gather the chunk again."""
        self.manager.ensure_in_memory(managed.chunk)
        for other in self.shards.by_chunk[managed.chunk.index]:
            if other.state.overlays_param:
                other.state.keep_partial(other.payload().clone())
                other.state.submit()
        self._overlaid.discard(managed.chunk.index)
        self.manager.regather(managed.chunk)
        self.shards.update_param_views()

    def on_in_place_write(
        self, managed: ManagedParam, values: torch.Tensor | None = None, before: torch.Tensor | None = None
    ) -> None:
        """Copy an in-place write, which the user makes on every rank, to the owner's shard and master.

        Synchronizes first: a slower rank must still gather the old values.
        """
        shards = self.shards
        shards.check_writable(managed)
        shards.before_update(managed.location.chunk)
        part = managed.flattened(managed.payload())[managed.shard_slice].clone()
        self.synchronize_processes(Request.WRITE)
        self.comm.transports.invalidate([managed.chunk.index])
        self.written.add(managed.chunk)
        self.manager.cache.withdraw_hold(managed.chunk)
        self.drop_written()
        if not managed.location.numel:
            return
        self.comm.restore_shard(managed.chunk.index)  # moves a gradient out of the shard
        managed.flat(managed.shard_chunk).copy_(part)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
        if managed.schema.trained:
            written = part if values is None else managed.flattened(values)[managed.shard_slice]
            for part_slice, master in shards.parts(managed, PARAM32, write=True):
                follow_written(master, written[part_slice], exactly=values is not None)

    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Gather a parameter's chunk if it is not in memory."""
        if managed.chunk.in_memory:
            return
        try:
            self.manager.cache.fetch([managed.chunk])
        except BudgetError:
            if not self.reduce_idle([managed.chunk]):
                raise
            self.manager.cache.fetch([managed.chunk])
        finally:
            self.shards.update_param_views()

    def drop_written(self) -> None:
        """Drop gathered chunks that this rank wrote to in place, once no operator uses them."""
        for chunk in [chunk for chunk in self.written if not chunk.pins]:
            self.written.discard(chunk)
            if chunk.device.valid and not chunk.has_gradients and chunk.device.reader is None:
                self.manager.drop(chunk)
        self.shards.update_param_views()

    def reduce_idle(self, protect: Sequence[Chunk]) -> bool:
        """Reduce chunks with incomplete gradients early, for the memory they use; return whether there were any."""
        idle = [
            chunk.index
            for chunk in self.manager.param16.values()
            if chunk.has_gradients and chunk.device.reader is None and chunk.pins == chunk.held and chunk not in protect
        ]
        for index in idle:
            self._reduce_chunk(index, complete=False)
        return bool(idle)

    # Gradients

    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient) -> None:
        """Store a complete gradient in place of its parameter. See [Note: sharded gradients]."""
        state = managed.state
        state.ready = True
        self.tracer.note_gradient(managed.chunk.index)
        if self.manager.timeline is not None:
            self.manager.timeline.holds_gradients(managed.chunk.index, True)
        if state.partial is not None:
            state.partial.add_(grad.to_dense())
            return
        self.ensure_in_memory(managed)
        version = managed.param._version
        managed.write_over(grad, add=state.overlays_param)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device.valid)
        state.overlay(self.shards.backward_id, version)
        managed.set_data(managed.absent_view)
        self._overlaid.add(managed.chunk.index)

    def end_window(self, managed_params: Sequence[ManagedParam]) -> None:
        """Reduce unpinned chunks that have the gradients of all their trained parameters.

        Linked processes reduce a chunk after its last use in the trace: whether it has gradients may differ.

        Args:
            managed_params: Parameters that an operator's backward accessed, and may have computed gradients of.
        """
        for managed in managed_params if self.tracer.linked is not None else ():
            if managed.param.requires_grad and managed.chunk.device.valid:
                managed.chunk.shards_valid = False
                self._overlaid.add(managed.chunk.index)
        for index in sorted(self._overlaid) if self.shards.in_backward else ():
            managed_params = self.shards.by_chunk[index]
            if managed_params[0].chunk.pins > managed_params[0].chunk.held:
                continue
            if self.tracer.linked is not None:
                trace, now = self.tracer.followed, self.manager.cache.now
                if trace is not None and trace.is_last_use(index, now):
                    self._reduce_chunk(index)
                continue
            if all(managed.state.overlays_param for managed in managed_params if managed.param.requires_grad):
                self._reduce_chunk(index)

    def finish_backward(self) -> None:
        """Reduce all remaining gradients, unless more backwards follow: then they are accumulated on this rank."""
        for index in sorted(self._overlaid):
            self._reduce_chunk(index)
        if not self.shards.more_backwards:
            self._reduce_sums()

    def _reduce_chunk(self, index: int, *, complete: bool = True) -> None:
        """Reduce the gradients in a chunk, or add them to those accumulated on this rank.

        `complete`: no more gradients of the chunk follow in this backward. Until then they are accumulated, if the host
        has room: in a second reduction other ranks' gradients of the same parameter would be added in another order.
        Linked processes reduce the same gradients together anyway.
        """
        chunk = self.manager[PARAM16, index]
        self.manager.cache.withdraw_hold(chunk)
        self._overlaid.discard(index)
        for managed in self.shards.by_chunk[index]:
            if managed.state.overlays_param:
                managed.state.submit()
            else:
                managed.payload().zero_()
        waits = not complete and self.tracer.linked is None and self.sums.fits(chunk)
        if self.shards.more_backwards or self.sums.has(index) or waits:
            self.sums.add(chunk)
            if complete and not self.shards.more_backwards:
                self._reduce_sum(index)
        else:
            self.sums.drop_reduced(index)
            self.manager.transfers.evict_by_reduction(chunk)
        self.shards.update_param_views()

    def _reduce_sum(self, index: int) -> None:
        """Reduce the gradients of a chunk that are accumulated on this rank."""
        self.sums.submit(index)
        self.manager[KEPT32, index].host.reader = self.comm.request_reduction(self.manager[PARAM16, index])

    def _reduce_sums(self) -> None:
        for index in filter(self.sums.has, self.sums.indices()):
            self._reduce_sum(index)

    def _drop_sums(self) -> None:
        """Drop gradients that are accumulated on this rank; cancel or finish their reductions first."""
        for index in self.sums.indices():
            self.comm.cancel_reduction(index)
        self.sums.clear()

    def collective_section(self) -> AbstractContextManager[None]:
        """Return a context for work that every process must do after a synchronization."""
        return self.comm.coordinator.collective_section()

    def synchronize_to_drop(self) -> bool:
        """Synchronize all ranks to discard gradients, unless a step has left none; return whether there are any."""
        fresh, self._nothing_to_drop = self._nothing_to_drop, False
        ready = any(managed.state.ready for managed in self.shards.managed_params)
        if fresh and not ready:
            return False
        self._drop_sums()
        self.synchronize_processes(Request.DROP)
        return bool(self.comm.world.all_gather(torch.tensor([ready], device="cpu")).any())

    def discard_gradients(self) -> None:
        """Discard all gradients on all ranks, and restore the shards that they replaced."""
        self._drop_sums()
        for managed in [each for each in self.shards.managed_params if each.state.has_any_gradient]:
            if not managed.state.update_pending:
                self._drop_gradient(managed)
        self.shards.update_param_views()

    def discard_gradient(self, managed: ManagedParam) -> None:
        """Raise TrainingError if the parameter has a gradient: all ranks have to discard all of theirs together."""
        if managed.state.ready and not managed.state.update_pending:
            raise TrainingError(
                f"the gradient of {managed.name!r} is being reduced across processes and can't be discarded "
                f"alone; call optimizer.zero_grad() in all processes"
            )

    def _drop_gradient(self, managed: ManagedParam) -> None:
        if managed.state.overlays_param:
            managed.state.submit()
            managed.chunk.shards_valid = not any(
                other.state.overlays_param for other in self.shards.by_chunk[managed.chunk.index]
            )
            if managed.chunk.shards_valid:
                self._overlaid.discard(managed.chunk.index)
                self.manager.regather(managed.chunk)
        self._discard_shard_gradient(managed)

    def _discard_shard_gradient(self, managed: ManagedParam) -> None:
        """Discard the reduced gradient of this rank's shard, and restore the shard."""
        self.comm.finish_reduction(managed.chunk.index)
        if managed.state.reduced:
            self.shards.restore_own(managed)
        managed.state.discard_moved()

    # Synchronization of all ranks

    def synchronize_processes(self, want: Request) -> None:
        """Synchronize all processes on `want`, and complete all reductions."""
        self.comm.synchronize_processes(want)
        for chunk in list(self.manager.transfers.in_flight):
            if chunk.sharded and chunk.device.reader is not None:
                self.manager.transfers.complete(chunk)
        for index in self.shards.by_chunk:
            if not self.manager[SHARD16, index].updating:  # an update begins after the reduction
                self.comm.finish_reduction(index)
        self.shards.update_param_views()

    def gradients_are_reduced(self, index: int) -> bool:
        """Return whether the reductions that this rank knows of have ended, and fold their result; does not wait."""
        if index in self._overlaid or self.manager[PARAM16, index].device.reader is not None:
            return False
        if index in self.comm.pending:
            return False
        own = self.manager[SHARD16, index]
        transfer = self.comm.sum_of(index).host.reader
        if transfer is not None and not transfer.done:
            return False
        if not own.updating:
            self.comm.finish_reduction(index)
        return True

    def synchronize_gradients(self, want: Request) -> None:
        """Synchronize all processes, and agree on which parameters have gradients."""
        self._reduce_sums()
        self.synchronize_processes(want)
        self._drop_sums()
        ready = [managed.state.ready for managed in self.shards.managed_params]
        listed = [bool(self.shards.gradient_sums(index)) for index in self.shards.by_chunk]
        on_this_rank = torch.tensor(ready + listed, dtype=torch.uint8, device="cpu")
        on_any_rank = self.comm.world.all_gather(on_this_rank).any(0).tolist()
        if self.tracer.linked is not None:
            self._create_lists(on_any_rank[len(ready) :])
        for managed, gradient_ready in zip(self.shards.managed_params, on_any_rank[: len(ready)], strict=True):
            stored = managed.state.reduced or managed.state.accumulated
            if stored and not gradient_ready and not managed.state.update_pending:
                self._discard_shard_gradient(managed)
            elif gradient_ready and not stored and not managed.state.update_pending:
                self._store_zero_gradient(managed)
            managed.state.ready = gradient_ready

    def _create_lists(self, listed: Sequence[bool]) -> None:
        """Create the gradient lists that other processes have: an update moves the same chunks in linked processes."""
        for managed_params, needed in zip(self.shards.by_chunk.values(), listed, strict=True):
            if needed:
                self.shards.ensure_list(managed_params[0])

    def _store_zero_gradient(self, managed: ManagedParam) -> None:
        """Give this rank's shard the gradient zero: other processes have one for their part of the parameter."""
        if managed.location.numel and managed.state.late:
            zeros = torch.zeros(managed.location.numel, device="cpu")
            self.shards.ensure_list(managed)
            self.shards.add_to(self.manager[GRAD32, managed.chunk.index], managed, zeros, on_device=False)
        elif managed.location.numel:
            self.comm.restore_shard(managed.chunk.index)
            managed.flat(managed.shard_chunk).zero_()
            self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
            managed.state.reduced = True

    def close_step(self, updated: Collection[ManagedParam], *, late: bool) -> None:
        """Finish an optimizer step: drop gathered chunks, which are stale.

        `updated`: parameters in a param group; empty if the update was skipped. `late`: operators read them later.
        """
        for managed in self.shards.managed_params:
            if managed.state.ready and managed in updated and not managed.location.numel:
                managed.begin_update()
                self.shards.end_update((managed,))
                managed.state.late = late
            if late:  # an owner may have renewed it
                torch.autograd.graph.increment_version(managed.param)
            managed.state.ready = managed.state.reducing = False
        self.drop_gathered(index for index, params in self.shards.by_chunk.items() if params[0].schema.trained)
        self._nothing_to_drop = True

    def drop_gathered(self, indices: Iterable[int] | None = None) -> None:
        """Drop gathered chunks (default: all), whose values have changed on other ranks."""
        self.written.clear()
        changed = list(self.shards.by_chunk if indices is None else indices)
        self.comm.transports.invalidate(changed)
        self.manager.drop_gathered(changed)
        self.shards.update_param_views()

    # Values

    def share_optimizer_extra(self) -> None:
        """Copy `optimizer_extra` of each parameter from the lowest rank with a shard of it to ranks without one.

        Agree on the number of updates, which differs between shards if updates are lock-free.
        """
        self.shards.agree_on_steps()
        managed_params = self.shards.managed_params
        owned = [each for each in managed_params if each.location.numel and each.optimizer_extra]
        own = {managed.name: to_json(managed.optimizer_extra) for managed in owned}
        merged: dict[str, Any] = {}
        for extra_by_name in reversed(self.comm.world.all_gather_object(own)):
            merged |= extra_by_name
        for managed in managed_params:
            if not managed.location.numel and managed.name in merged:
                managed.optimizer_extra = from_json(merged[managed.name])

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        """All-gather a parameter's elements into `flat`, which already contains this rank's shard."""
        self.comm.transports[managed.chunk.index].assemble(flat, managed.region.offset)


Sharing = OneProcess | SeveralProcesses
"""What other processes have to do with the chunks: they share them, or there are none."""
