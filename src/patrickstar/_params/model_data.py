"""Access and release of managed parameters, and gradients stored in their place (PatrickStar §6.2, Figure 7)."""

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.garbage import free_garbage
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._distributed.process_group import Processes
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.sigint_gate import deferring_sigint
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._params.local_shards import LocalShards, follow_written
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.process_hooks import ProcessHooks
from patrickstar._params.residency import Residency
from patrickstar._params.row_gradient import RowGradient
from patrickstar._params.save_in_progress import SaveInProgress
from patrickstar._params.shard_collectives import add_over_ranks
from patrickstar._schedule.placement import Tier, embedding_runs_on_host
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, TrainingError


class ModelData(LocalShards, ProcessHooks):
    """The managed parameters of one engine."""

    def __init__(self, manager: ChunkManager, tracer: Tracer, world: Processes) -> None:
        super().__init__(manager)
        self.tracer = tracer
        self.world = world
        self.managed_params: list[ManagedParam] = []
        self.comm: ChunkComm | None = None
        """Chunk communication with the other ranks; None with one process."""
        self.saving: SaveInProgress | None = None
        """Checkpoint in progress, which copies what it needs of a chunk before the chunk changes."""
        self.residency = Residency(manager, tracer, self.by_chunk)
        self.in_backward = False
        self.backward_id = self.backwards_in_step = 0
        self.accumulates = False
        self.lists_gradients = False
        """True if gradients of delayed parameters go to the gradient list. See [Note: delayed updates]."""

    @property
    def batches(self) -> int:
        """Number of distinct batches whose gradients a step averages."""
        return 1 if self.comm is None else self.comm.coordinator.group.size

    def add(self, managed: ManagedParam) -> None:
        """Register a parameter whose values are already in its chunk."""
        self.managed_params.append(managed)
        self.by_chunk.setdefault(managed.location.chunk, []).append(managed)
        managed.state.initialize()
        self._prepare_refusals(managed)
        managed.show_values()

    # Access and release (Algorithms 1 and 2)

    def access(self, managed_params: Sequence[ManagedParam], belongs: bool | None, *, gently: bool = False) -> None:
        """Fetch parameters to the device and pin them until `release`. `gently`: evict only `param16` chunks for them.

        `belongs`: its moment is part of the traced iteration or not; None: no moment, nor prefetch, for it begins.
        """
        if self.closed:
            raise TrainingError(f"parameter {managed_params[0].name!r} is used by a graph whose engine is closed")
        if self.in_backward:
            self._check_not_updated(managed_params)
        with_gradients = [managed for managed in managed_params if managed.state.overlays_param]
        if with_gradients and self.manager.hardware.has_gpu:
            # The device moves evicted gradients out too: see [Note: lists on the host beside an accelerator].
            self.fetch(self.chunks_to_fetch(with_gradients), gently=gently)
        self.restore_params(managed_params)
        chunks = self.chunks_to_fetch(managed_params)
        if belongs is not None:
            self._begin_moment(tuple([chunk.index for chunk in chunks]), belongs)
        if not (at_rest := self.manager.cache.at_rest(chunks)):
            with profiler_range("access", *managed_params):
                self._fetch_in_budget(chunks, managed_params[0].name, gently)
        self.tracer.transfers_done()
        self.manager.device_tier.note_non_model_bytes()
        self.pin(managed_params)
        if self.residency.active:
            for chunk in chunks:
                self.manager.cache.hold(chunk)
        if not at_rest and belongs is not None:
            self.manager.cache.poll_transfers()
        self.update_param_views()

    def _fetch_in_budget(self, chunks: Sequence[Chunk], name: str, gently: bool) -> None:
        """Fetch the chunks of an access; without room, free garbage and try again, unless the caller makes room."""
        for last in (gently, True):
            try:
                return self.fetch(chunks, gently=gently)
            except BudgetError as error:
                error.parameter = name
                if last or not free_garbage(self.tracer, chunks):
                    raise

    def _begin_moment(self, chunks: tuple[int, ...], belongs: bool) -> None:
        self.tracer.begin_moment(chunks, belongs)
        if (timeline := self.manager.timeline) is not None:
            timeline.moment(self.manager.cache.now, chunks)
            timeline.non_model_bytes(self.manager.device_tier.non_model_bytes, settled=False)

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Move out gradients that are stored in place of these parameters, and restore the parameters."""
        for managed in managed_params:
            if managed.state.overlays_param:
                self.move_out_gradient(managed)

    def place_embeddings(self) -> None:
        """Switch embeddings to host lookups if the last step transferred more weight bytes than lookup output bytes.

        Each switch invalidates the traces. Where all model data fits on the device, later steps transfer nothing.
        """
        for managed in [each for each in self.managed_params if each.embedding]:
            chunk = managed.chunk
            saves_transfers = embedding_runs_on_host(chunk.transferred_bytes, managed.lookup_bytes)
            has_room = chunk.host_bytes > 0 or self.manager.host_tier.has_room(chunk.nbytes)
            if not managed.on_host and saves_transfers and has_room and not self._fits_on_device():
                self.manager.move_to_tier(managed.chunk, Tier.HOST)
                managed.on_host = True
                self.tracer.invalidate()
                self.update_param_views()
                self.set_param_views([managed.chunk])
            managed.chunk.transferred_bytes = managed.lookup_bytes = 0

    def _fits_on_device(self) -> bool:
        """Return whether all model data fits on the device beside the step's non-model data."""
        nbytes = sum(chunk.nbytes for chunk in self.manager.chunks.values()) + self.tracer.non_model_peak
        return nbytes <= self.manager.device_tier.budget_bytes and not self.manager.cache.evict_everything

    def move_embedding_to_device(self, managed: ManagedParam) -> None:
        """Disable host lookups of an embedding, since an operator other than a lookup reads its weight."""
        with deferring_sigint():
            managed.on_host = False
            self.tracer.invalidate()
            self.set_param_views([managed.chunk])

    # Checkpoint in progress, if any

    def before_update(self, index: int) -> None:
        """Notify a checkpoint in progress that masters, states or frozen parameters of a chunk will change."""
        if self.saving is not None:
            self.saving.before_update(index)

    def continue_save(self) -> None:
        """Let a checkpoint in progress copy as much as the disk accepts without waiting."""
        if self.saving is not None:
            self.saving.progress()

    # Coordination with other processes

    def has_gradient(self, managed: ManagedParam) -> bool:
        """Return whether a parameter has a gradient for the next step on any rank, as of the last synchronization."""
        return managed.has_gradient

    def all_sums(self, sums: dict[ManagedParam, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Return the squared gradient sums over all ranks, in creation order, and the count of non-finite elements."""
        values = [sums.get(managed, 0.0) if managed.counts else 0.0 for managed in self.managed_params]
        values.append(float(not_finite))
        *squares, non_finite_total = add_over_ranks(values, self.world)
        with_gradient = zip(self.managed_params, squares, strict=True)
        return tuple(square for managed, square in with_gradient if self.has_gradient(managed)), int(non_finite_total)

    def begin_backward(self, accumulate: bool = False) -> None:
        """Start a new backward. `accumulate`: more backwards follow before the step."""
        self.in_backward = True
        self.lists_gradients |= accumulate
        self.backward_id += 1
        self.backwards_in_step += 1

    @staticmethod
    def chunks_to_fetch(managed_params: Sequence[ManagedParam]) -> list[Chunk]:
        """Return the chunks that an access of `managed_params` needs on the device."""
        return list(dict.fromkeys([each.chunk for each in managed_params if not (each.on_host and each.stays_on_host)]))

    def pin(self, managed_params: Sequence[ManagedParam]) -> None:
        """Pin parameters whose chunks are on the device."""
        for managed in managed_params:
            managed.chunk.pins += 1
            managed.state.begin_use()

    def release(self, managed_params: Sequence[ManagedParam], hold: TensorState) -> None:
        """End one use of each parameter; after its last use its state is `hold`, or HOLD_AFTER_BWD with a gradient."""
        for managed in managed_params:
            managed.chunk.pins -= 1
            managed.state.end_use(hold)

    def op_boundary(self, belongs: bool) -> None:
        """Enforce the device budget after an operator."""
        self._begin_moment((), belongs)
        if self.comm is not None or not self.manager.cache.at_rest(()):
            try:
                self._keep_budget()
                self.manager.cache.poll_transfers()
            finally:
                self.update_param_views()
        self.tracer.transfers_done()

    def _keep_budget(self) -> None:
        """Evict chunks until non-model data fits beside them."""
        try:
            self.manager.cache.make_room(0, protect=())
        except BudgetError:
            if not free_garbage(self.tracer, ()):
                raise
            self.manager.cache.make_room(0, protect=())

    def make_room_for_step(self) -> None:
        """Let chunks fill the budget; evict parameters from an accelerator if more is there than the plan expected."""
        self.manager.device_tier.soft_limit_bytes = self.manager.device_tier.budget_bytes
        if self.manager.hardware.has_gpu:
            self.manager.cache.evict_idle(0, protect=())
            self.update_param_views()

    def finish_forward(self) -> None:
        for managed in self.managed_params:
            managed.state.end_forward()

    def release_all(self) -> None:
        """End all uses after an exception has unwound the operators that started them."""
        self.residency.end()
        for managed in self.managed_params:
            managed.chunk.pins = 0
            managed.state.end_all_uses()
        self.finish_forward()

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Fetch chunks to the device, and update the views of all parameters whose chunks moved."""
        try:
            self.manager.cache.fetch(chunks, gently=gently)
        finally:
            self.update_param_views()

    # Writing

    def on_in_place_write(self, managed: ManagedParam, values: torch.Tensor | None = None) -> None:
        """Update the master after an in-place write to a parameter by the user, of `values` if they are known."""
        self.check_writable(managed)
        self.before_update(managed.location.chunk)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device.valid)
        if managed.schema.trained:
            master = self.manager[PARAM32, managed.location.chunk]
            self._count_transfer(managed, managed.chunk, master)
            written = managed.flat(managed.chunk) if values is None else managed.flattened(values)
            for part_slice, part in self.parts(managed, PARAM32, write=True):
                follow_written(part, written[part_slice], exactly=values is not None)

    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient) -> None:
        """Store a complete gradient in place of its parameter.

        Reentrant checkpointing completes a gradient several times in one backward; as in plain PyTorch these are added
        in the compute dtype. Gradients of earlier backwards are accumulated in the gradient list.
        """
        state = managed.state
        if self.in_backward and state.updated_in_backward == self.backward_id:
            self._check_not_updated((managed,))
        if state.partial is not None:
            state.partial.add_(grad.to_dense())
            return
        lists = self.lists_gradients or (self.in_backward and state.may_grow)
        if lists and state.late and not state.overlays_param:
            self._list_at_once(managed, grad.to_dense())
            return
        grows = state.overlays_param and state.backward_id == self.backward_id
        if state.overlays_param and not grows:
            self.move_out_gradient(managed)
        version = managed.param._version
        self._write_gradient(managed, grad, add=grows)
        state.overlay(self.backward_id, version)
        managed.set_data(managed.absent_view)
        if self.manager.timeline is not None:
            self.manager.timeline.holds_gradients(managed.location.chunk, True)

    def _list_at_once(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Add a gradient to the gradient list; if it may grow, once its backward has ended."""
        state = managed.state
        if self.in_backward and state.may_grow:
            state.keep_partial(grad.clone())
            return
        if self.in_backward and state.listed_in == self.backward_id:
            state.expect_growth()
            self.check_restorable(managed)
        self._ensure_list(managed)
        chunk, on_device = self.manager[GRAD32, managed.location.chunk], grad.device.type == self.manager.device.type
        self._add_to(chunk, managed, managed.flattened(grad), on_device=on_device)
        state.accumulate(self.backward_id)

    def _write_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient, add: bool) -> None:
        """Write a gradient over its parameter; fetch its chunk from disk, or write page by page if there is no room."""
        if not managed.chunk.held:
            with suppress(BudgetError):
                self.ensure_in_memory(managed)
        if managed.chunk.in_memory:
            self._write_in_memory(managed, grad, add)
            return
        flat = managed.flattened(grad.to_dense())
        for part_slice, part in self.parts(managed, PARAM16, write=True):
            part.add_(flat[part_slice].to(part.device)) if add else part.copy_(flat[part_slice])
        torch.autograd.graph.increment_version(managed.param)

    def _write_in_memory(self, managed: ManagedParam, grad: torch.Tensor | RowGradient, add: bool) -> None:
        """Write a gradient over its parameter, and let autograd detect backwards that need the old values."""
        payload = managed.payload()
        if add:
            payload.add_(grad.to_dense().to(payload.device))
        else:
            payload.copy_(grad) if isinstance(grad, torch.Tensor) else grad.write(payload)
        torch.autograd.graph.increment_version(managed.param)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device.valid)

    def move_out_gradient(self, managed: ManagedParam) -> None:
        """Move a gradient out of its parameter's chunk, and restore the parameter.

        The rounded master has the same bits as the parameter had, so the version counter is reset too: saved tensors
        of autograd are valid again. A gradient of an earlier backward is added to the gradient list; one of the
        running backward may still grow and is kept apart until that backward ends.
        """
        if may_grow := self.in_backward and managed.state.backward_id == self.backward_id:
            managed.state.expect_growth()
        self.check_restorable(managed)
        self.ensure_in_memory(managed)
        if may_grow:
            managed.state.keep_partial(managed.payload().clone())
        else:
            self.list_gradient(managed)
        self._restore(managed)

    def _check_not_updated(self, managed_params: Sequence[ManagedParam]) -> None:
        """See [Note: updating before backward has ended]."""
        updated = [each for each in managed_params if each.state.updated_in_backward == self.backward_id]
        for managed in updated:
            managed.state.expect_growth()
        if updated:
            raise TrainingError(
                f"parameter {updated[0].name!r} is read, or its gradient grows, after it was updated in the same "
                f"backward; this did not happen in earlier steps. This step's update is incomplete. Later steps will "
                f"update this parameter in optimizer.step(). If steps differ in this way, omit update=True in "
                f"engine.backward"
            )

    def finish_backward_gradients(self) -> None:
        """End the backward: store moved-out gradients, which no longer grow, in place of their parameters."""
        self.in_backward = False
        for managed in self.managed_params:
            if (grad := managed.state.take_partial()) is not None:
                self.accept_gradient(managed, grad)

    def discard_gradients(self) -> None:
        """Discard all gradients, and restore the parameters that they replaced."""
        for managed in [each for each in self.managed_params if each.state.has_any_gradient]:
            self.discard_gradient(managed)

    def discard_gradient(self, managed: ManagedParam) -> None:
        """Discard the gradient of a parameter, unless its deferred update is unfinished."""
        if managed.state.update_pending:
            return
        if managed.state.overlays_param:
            self.ensure_in_memory(managed)
            self._restore(managed)
        managed.state.discard_moved()

    def end_step(self) -> bool:
        """Drop the gradient list unless the step accumulated; return whether that differs from the previous step."""
        accumulated, self.backwards_in_step = self.backwards_in_step > 1, 0
        self.lists_gradients |= accumulated
        lists = [chunk for (kind, _), chunk in self.manager.chunks.items() if kind == GRAD32]
        if not accumulated:
            for chunk in lists:
                if not any(each.state.update_pending or each.state.late for each in self.by_chunk[chunk.index]):
                    self.manager.remove(chunk)
        changed, self.accumulates = accumulated != self.accumulates, accumulated
        return changed

    def end_update(self, managed_params: Collection[ManagedParam]) -> None:
        """Mark parameters whose gradients an update has replaced by new values."""
        torch.autograd.graph.increment_version([managed.param for managed in managed_params])
        timeline = self.manager.timeline
        for managed in managed_params:
            managed.state.consume()
            managed.show_values()
            if timeline is not None:
                timeline.holds_gradients(managed.location.chunk, False)

    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Ensure that a parameter's chunk is in memory and writable."""
        self.manager.ensure_in_memory(managed.chunk)
        self.update_param_views()

    def _restore(self, managed: ManagedParam) -> None:
        self.restore_own(managed)
        torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.state.version_before,))
        managed.state.remove_overlay()
        managed.show_values()
