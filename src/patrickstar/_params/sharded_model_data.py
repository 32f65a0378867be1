"""Model data that several processes share: each owns a part of every chunk and updates that (§7, Algorithms 3, 4)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._layout.schema import ITEMSIZE, PARAM16, PARAM32, SHARD16, SUM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.tracer import Tracer
from patrickstar._params.grad_accumulation import GradAccumulation
from patrickstar._params.local_shards import follow_rounded
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.coordination import Request
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.tensor_state import TensorState
from patrickstar.errors import BudgetError, TrainingError

# [Note: gradients of several processes]
# A gradient is written over its parameter in the gathered chunk, as with one process. When the chunk has all that it
# will get, it is handed over: the gradients of all processes are added up, each part goes over its owner's own part of
# the parameters, and the gathered chunk leaves the device. From then on the owner has "the gradient over the
# parameter", and whoever wants the parameter has it put back first, by the owner, from its master. If more gradient
# comes for the same chunk, it is reduced too, and added in fp32 by the owner.
#
# Whether a parameter has a gradient at all is known only when all have met: one process may have none, and counts as
# zero. Where none has any, the parameter is not updated, as with one process.


def _plain(memory: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and tensors of one, as JSON can say them."""
    return {
        key: {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
        if isinstance(value, torch.Tensor)
        else value
        for key, value in memory.items()
    }


def _with_tensors(memory: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]), device="cpu")
        if isinstance(value, dict)
        else value
        for key, value in memory.items()
    }


class ShardedModelData(ModelData):
    """The slots of one process over its parts of the chunks."""

    def __init__(self, manager: ChunkManager, clock: Tracer, comm: ChunkComm, *, in_full: bool = False) -> None:
        super().__init__(manager, clock)
        self.comm: ChunkComm = comm
        self.reduces_in_fp32 = in_full
        """Whether gradients are sent, and their sums kept, in fp32."""
        self.accumulates_locally = False
        """Whether gradients of this backward stay in this process, since more are to come."""
        self._overlaid: set[int] = set()
        """Chunks with gradients over their parameters."""
        self._dropping = False
        """Whether gradients are being forgotten, in all processes."""
        self._nothing_to_drop = False
        """Whether no process has had anything to forget since the last step."""
        self._written: set[Chunk] = set()
        """Gathered chunks that were written to here, and perhaps otherwise elsewhere."""
        self.grad_accumulation = GradAccumulation(manager, comm)
        """Gradients that have not been averaged since more were to come."""
        self.complete: Callable[[Sequence[ManagedParam]], None] = lambda managed_params: None
        """Has these parameters updated, where that was asked for and has not ended."""
        self._arrived_gradients: set[ManagedParam] = set()
        """Those that have had a gradient here since the last step."""
        self._unused: set[ManagedParam] = set()
        """Those that had no gradient here in the last step."""

    # What the other processes ask for

    def parameters(self, index: int) -> torch.Tensor:
        """The part of a chunk that this process owns, parameters in it, where it lies."""
        managed_params = self._own_managed_params(index)
        self.complete(managed_params)
        own = self.manager[SHARD16, index]
        self._finish_reduction(index)
        for managed in managed_params:
            if managed.reduced:
                self._accumulate(managed)
                self._restore_own(managed)
                managed.reduced = False
        self._ensure_in_memory(own)
        return own.current(own.whole)

    def _finish_reduction(self, index: int) -> None:
        """What the processes add up of a chunk is there, in its place."""
        self.manager.transfers.wait_idle(self.manager[SHARD16, index])
        found = self.manager.chunks.get((SUM32, index))
        if found is not None:
            self.manager.transfers.wait_idle(found)
            for managed in self._own_managed_params(index):
                self._add_to_list(managed, managed.flat(found))
            self.manager.remove(found)

    def begin_reduction(self, index: int, ranks: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Gradients of these ranks will be added up: this process's own, and where the sum of its part goes."""
        self.parameters(index)  # and an earlier sum is out of the way
        own = self.manager[SHARD16, index]
        mine = None
        if self.comm.world.rank in ranks:
            chunk, kept = self.manager[PARAM16, index], self.grad_accumulation.reducing(index)
            mine = kept if kept is not None else chunk.on_device(chunk.whole)
        if self.reduces_in_fp32 and own.dtype.itemsize < ITEMSIZE["float32"]:
            found = self.manager.new_chunk(SUM32, index, own.numel, "float32", Tier.HOST)
            return mine, found.current(found.whole), found
        self.manager.mark_written(own, on_device=own.device_valid)
        for managed in self._own_managed_params(index):
            managed.reduced = True
        return mine, own.current(own.whole), own

    def _grad_list_tier(self, beside: Chunk) -> Tier:
        """Where a chunk of the gradient list is made: where nothing has to make way, which could wait for others."""
        tier, compute = super()._grad_list_tier(beside), self.manager.device_tier
        if tier is Tier.DEVICE and compute.used + beside.nbytes > compute.chunkable_bytes:
            return Tier.HOST
        return tier

    def _ensure_in_memory(self, chunk: Chunk) -> None:
        if not chunk.in_memory:
            self.manager.ensure_in_memory(chunk)
            self.update_param_views()

    def _own_managed_params(self, index: int) -> list[ManagedParam]:
        return [managed for managed in self.by_chunk[index] if managed.location.numel]

    # Operators

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Have parameters where gradients lie over them, or did."""
        super().restore_params(managed_params)
        for managed in managed_params:
            if managed.reducing:
                # What comes back is what was there, so what autograd saved of it is true again.
                torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.version_before_gradient,))
                managed.reducing = False

    def move_out_gradient(self, managed: ManagedParam) -> None:
        """Move the gradients that lie over a chunk off it, until backward ends, and gather it again."""
        self.manager.ensure_in_memory(managed.chunk)
        for other in self.by_chunk[managed.chunk.index]:
            if other.overlays_param:
                other.partial_grad, other.may_grow = other.payload().clone(), True
                self._uncovered(other)
        self._overlaid.discard(managed.chunk.index)
        self.manager.regather(managed.chunk)
        self.update_param_views()

    def _uncovered(self, managed: ManagedParam) -> None:
        managed.overlays_param, managed.reducing = False, True
        if managed.uses == 0:
            managed.move_to(TensorState.HOLD)

    @defer_sigint
    def on_in_place_write(self, managed: ManagedParam) -> None:
        """The user wrote to a parameter in place, in every process: its owner takes it over.

        Not before all have written: who comes later must find what was there before.
        """
        self.before_update(managed.location.chunk)
        part = managed.flattened(managed.payload())[managed.shard_slice].clone()
        self.synchronize_processes(Request.WRITE)
        self._written.add(managed.chunk)
        if not managed.location.numel:
            return
        self.parameters(managed.chunk.index)  # a gradient that lies over the old one makes way
        managed.flat(managed.shard_chunk).copy_(part)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device_valid)
        if managed.schema.trained:
            for where, master in self.parts(managed, PARAM32, write=True):
                follow_rounded(master, part[where])

    # Gradients

    @defer_sigint
    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Write a complete gradient over its parameter. See [Note: gradients of several processes]."""
        managed.gradient_ready = True
        self._arrived_gradients.add(managed)
        if managed.partial_grad is not None:
            managed.partial_grad.add_(grad)
            return
        self.ensure_in_memory(managed)
        if managed.overlays_param:
            managed.may_grow = True
            managed.payload().add_(grad)
        else:
            if not managed.reducing:
                managed.version_before_gradient = managed.param._version
            managed.payload().copy_(grad)
        self._bump_version(managed)
        managed.overlays_param, managed.backward_id = True, self.backward_id
        self._overlaid.add(managed.chunk.index)
        if managed.uses == 0:
            managed.move_to(TensorState.HOLD_AFTER_BWD)

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Move chunks to the device; where gradients take the room, these are handed over as they are."""
        try:
            super().fetch(chunks, gently=gently)
        except BudgetError:
            if not self._reduce_idle(chunks):
                raise
            super().fetch(chunks, gently=gently)

    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Have a parameter's chunk gathered, to be written."""
        if not managed.chunk.in_memory:
            self.fetch([managed.chunk])

    def _keep_budget(self) -> None:
        """Have room for what non-model data has come to; what was written to is gathered again when it is needed."""
        for chunk in [chunk for chunk in self._written if not chunk.pins]:
            self._written.discard(chunk)
            if chunk.device_valid and not chunk.has_gradients and chunk.eviction_transfer is None:
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
            if chunk.has_gradients and chunk.eviction_transfer is None and not chunk.pins and chunk not in protect
        ]
        for index in idle:
            self._reduce_chunk(index)
        return bool(idle)

    def begin_backward(self, accumulate: bool = False) -> None:
        super().begin_backward(accumulate)
        self.accumulates_locally = accumulate

    def progress(self) -> None:
        """Hand over the chunks that have all the gradients they will get, and that no operator uses."""
        if not self.in_backward:
            return
        for index in sorted(self._overlaid):
            managed_params = self.by_chunk[index]
            if managed_params[0].chunk.pins:
                continue
            expected = [
                managed for managed in managed_params if managed.param.requires_grad and managed not in self._unused
            ]
            if all(managed.overlays_param for managed in expected):
                self._reduce_chunk(index)

    @defer_sigint
    def finish_backward_gradients(self) -> None:
        """Backward has ended: no gradient will grow any more, and all are handed over."""
        super().finish_backward_gradients()
        for index in sorted(self._overlaid):
            self._reduce_chunk(index)
        if not self.accumulates_locally:
            self.grad_accumulation.reduce_rest()

    @defer_sigint
    def _reduce_chunk(self, index: int) -> None:
        managed_params = self.by_chunk[index]
        chunk = managed_params[0].chunk
        self._overlaid.discard(index)
        for managed in managed_params:
            if managed.overlays_param:
                self._uncovered(managed)
            else:
                managed.payload().zero_()
        if self.accumulates_locally or self.grad_accumulation.has(index):
            self.grad_accumulation.add(chunk)
            if not self.accumulates_locally:
                self.grad_accumulation.reduce(index)
        else:
            self.manager.reduce_gradients(chunk)
        self.update_param_views()

    def collective_section(self) -> AbstractContextManager[None]:
        """After having met: what all processes do now, and none may leave out."""
        return self.comm.coordinator.collective_section()

    def synchronize_to_drop(self) -> None:
        """Wait until all processes have come to drop gradients, unless they have just come from a step."""
        fresh, self._nothing_to_drop = self._nothing_to_drop, False
        if not fresh or any(managed.gradient_ready for managed in self.managed_params):
            self.grad_accumulation.clear()
            self.synchronize_processes(Request.DROP)

    def discard_gradients(self) -> None:
        """Forget all gradients, which all processes do now; parts that lie under one are put back."""
        self.grad_accumulation.clear()
        self._arrived_gradients.clear()
        self._dropping = True
        try:
            super().discard_gradients()
        finally:
            self._dropping = False
        self.update_param_views()

    @defer_sigint
    def discard_gradient(self, managed: ManagedParam) -> None:
        """Forget one, unless its update is under way; all processes have met for that."""
        if managed.update_pending:
            return
        if not self._dropping:
            if managed.gradient_ready:
                raise TrainingError(
                    f"the gradient of {managed.name!r} is on its way to other processes, and can't be "
                    f"dropped by itself: "
                    f"call optimizer.zero_grad() in all of them"
                )
            return
        if managed.overlays_param:
            self._uncovered(managed)
            managed.chunk.shards_valid = not any(one.overlays_param for one in self.by_chunk[managed.chunk.index])
            if managed.chunk.shards_valid:
                self._overlaid.discard(managed.chunk.index)
                self.manager.regather(managed.chunk)
        self._forget(managed)

    def _forget(self, managed: ManagedParam) -> None:
        """Have this process's part of the parameter again, whatever lies over it."""
        self._finish_reduction(managed.chunk.index)
        if managed.reduced:
            self._ensure_in_memory(managed.shard_chunk)
            self._restore_own(managed)
        managed.reduced = managed.in_grad_list = managed.gradient_ready = False
        managed.partial_grad = None

    # All processes together

    def register_shards(self, layout: Layout) -> None:
        """Take note of which process has which part of chunks that are new."""
        self.comm.shard_bounds |= {chunk.index: chunk.shard_bounds for chunk in layout.chunks}

    def synchronize_processes(self, want: Request) -> None:
        """Wait until all processes have come for the same, and gradients are with their owners."""
        self.comm.synchronize_processes(want)
        for chunk in list(self.manager.transfers.in_flight):
            if chunk.sharded and chunk.eviction_transfer is not None:
                self.manager.transfers.complete(chunk)
        for index in self.by_chunk:
            self._finish_reduction(index)
        self.update_param_views()

    def synchronize_gradients(self, want: Request) -> None:
        """The same; from then on it is known which parameters have gradients."""
        self.grad_accumulation.reduce_rest()
        self.synchronize_processes(want)
        self.grad_accumulation.clear()
        here = torch.tensor(
            [managed.gradient_ready for managed in self.managed_params], dtype=torch.uint8, device="cpu"
        )
        for managed, gradient_ready in zip(
            self.managed_params, self.comm.world.all_gather(here).any(0).tolist(), strict=True
        ):
            if not gradient_ready and (managed.reduced or managed.in_grad_list):
                self._forget(managed)
            managed.gradient_ready = gradient_ready
        self._unused = {
            managed
            for managed in self.managed_params
            if managed.schema.trained and managed not in self._arrived_gradients
        }

    def close_step(self, updated: Iterable[ManagedParam]) -> None:
        """After an update: what was gathered is old. updated: those with a param group; nobody if there was none."""
        belongs = set(updated)
        for managed in self.managed_params:
            if managed.gradient_ready and managed in belongs and not managed.location.numel:
                self.mark_updated((managed,))
            managed.gradient_ready = managed.reducing = False
        self._arrived_gradients.clear()
        self._drop_gathered(
            index for index, managed_params in self.by_chunk.items() if managed_params[0].schema.trained
        )
        self._nothing_to_drop = True

    def drop_gathered(self) -> None:
        """Drop what was gathered from other processes, which have other values now."""
        self._drop_gathered(self.by_chunk)

    def _drop_gathered(self, indices: Iterable[int]) -> None:
        self._written.clear()
        self.manager.drop_gathered(indices)
        self.update_param_views()

    def share_optimizer_memory(self) -> None:
        """Have what optimizers keep of parameters beside the lists from those that have a part of them."""
        mine = {
            managed.name: _plain(managed.optimizer_extra)
            for managed in self.managed_params
            if managed.location.numel and managed.optimizer_extra
        }
        known: dict[str, Any] = {}
        for said in reversed(self.comm.world.all_gather_object(mine)):
            known |= said
        for managed in self.managed_params:
            if not managed.location.numel and managed.name in known:
                managed.optimizer_extra = _with_tensors(known[managed.name])

    def has_gradient(self, managed: ManagedParam) -> bool:
        """Whether the next step will find a gradient of a parameter, once all have met anywhere."""
        return managed.gradient_ready

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        """Fill a parameter's elements, of which each process has put its own in place, from the others."""
        begin, end = managed.region.offset, managed.region.offset + managed.numel
        shard_bounds = self.comm.shard_bounds[managed.chunk.index]
        for rank, (first, last) in enumerate(pairwise(shard_bounds)):
            if max(first, begin) < min(last, end):
                self.comm.world.broadcast(flat[max(first, begin) - begin : min(last, end) - begin], rank)

    def all_sums(self, sums: dict[ManagedParam, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Sums of squares of all parameters that have a gradient, in creation order, of all processes' parts.

        Parts of one parameter are added in the order of ranks.
        """
        row = torch.tensor(
            [*(sums.get(managed, 0.0) for managed in self.managed_params), float(not_finite)],
            dtype=torch.float64,
            device="cpu",
        )
        rows = self.comm.world.all_gather(row)
        total = torch.zeros_like(row)
        for one in rows:
            total += one
        gradient_ready = [managed.gradient_ready for managed in self.managed_params]
        values = total.tolist()
        return tuple(value for value, has in zip(values, gradient_ready, strict=False) if has), int(values[-1])
