"""Model data in use: access, release, and the gradient that takes its parameter's place (§6.2, Figure 7)."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from patrickstar._distributed.chunk_comm import ChunkComm
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._memory.tracer import Tracer
from patrickstar._params.local_shards import LocalShards, follow_rounded
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.save_in_progress import SaveInProgress
from patrickstar._schedule.coordination import Request
from patrickstar._schedule.placement import Tier, embedding_runs_on_host
from patrickstar._schedule.tensor_state import TensorState, chunk_state
from patrickstar.errors import BudgetError, TrainingError

# [Note: what a Parameter is while its chunk is away]
# The user's Parameter views its chunk's storage while that is on the device. When the chunk leaves, the Parameter is
# given a stand-in of the same shape over one NaN. Operators never see it, since they announce themselves first; what
# gets past that (native code handed the tensor directly) computes NaN instead of reading freed memory.


class ModelData(LocalShards):
    """The slots of one engine over its manager's chunks."""

    def __init__(self, manager: ChunkManager, clock: Tracer) -> None:
        super().__init__(manager)
        self.tracer = clock
        self.managed_params: list[ManagedParam] = []
        self.by_chunk: dict[int, list[ManagedParam]] = {}
        self.comm: ChunkComm | None = None
        """The other processes."""
        self.saving: SaveInProgress | None = None
        """A checkpoint that is being written, and copies what it wants of chunks before that changes."""
        self.closed = False
        self.in_backward = False
        self.backward_id = 0
        self.backwards_in_step = 0
        self.accumulates = False
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}

    def add(self, managed: ManagedParam) -> None:
        """Take a parameter under management; its payload is in place."""
        self.managed_params.append(managed)
        self.by_chunk.setdefault(managed.location.chunk, []).append(managed)
        managed.move_to(TensorState.HOLD)
        self._set_param_view(managed)

    def chunk_state(self, index: int) -> TensorState:
        """The state of a `param16` chunk, which follows from its tensors'."""
        return chunk_state(managed.state for managed in self.by_chunk[index])

    # Access and release (Algorithms 1 and 2)

    @defer_sigint
    def access(self, managed_params: Sequence[ManagedParam], belongs: bool, *, gently: bool = False) -> None:
        """Have the parameters of `managed_params` readable on the device until they are released.

        gently: only other parameters may leave for them.
        """
        if self.closed:
            raise TrainingError(f"parameter {managed_params[0].name!r} is used by a graph whose engine was closed")
        self._check_not_updated(managed_params)
        self.restore_params(managed_params)
        chunks = self.chunks_to_fetch(managed_params)
        self.tracer.begin_moment(tuple(chunk.index for chunk in chunks), belongs)
        self.fetch(chunks, gently=gently)
        self.tracer.transfers_done()
        self.pin(managed_params)
        self.manager.poll_transfers()
        self.update_param_views()

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Have parameters where gradients lie over them."""
        for managed in managed_params:
            if managed.overlays_param:
                self.move_out_gradient(managed)

    @defer_sigint
    def place_embeddings(self) -> None:
        """Have lookups run on the host from now on where the last step moved more of the weight than they put out.

        What is known of iterations no longer holds then.
        """
        for managed in self.managed_params:
            if not managed.embedding:
                continue
            chunk = managed.chunk
            fewer = embedding_runs_on_host(chunk.transferred_bytes, managed.lookup_bytes)
            has_room = chunk.host_bytes > 0 or self.manager.host_tier.has_room(chunk.nbytes)
            if not managed.on_host and fewer and has_room:
                self.manager.move_to_tier(managed.chunk, Tier.HOST)
                managed.on_host = True
                self.tracer.invalidate()
                self.update_param_views()
                self.set_param_views([managed.chunk])
            managed.chunk.transferred_bytes = managed.lookup_bytes = 0

    def move_embedding_to_device(self, managed: ManagedParam) -> None:
        """An operator other than a lookup wants an embedding's weight: it has to come to the device after all."""
        managed.on_host = False
        self.tracer.invalidate()
        self.set_param_views([managed.chunk])

    # A checkpoint that is being written, if there is one

    def before_update(self, index: int) -> None:
        """Masters, states or frozen parameters of a chunk will change."""
        if self.saving is not None:
            self.saving.before_update(index)

    def continue_save(self) -> None:
        """Between two operators: copy what the disk has room for."""
        if self.saving is not None:
            self.saving.progress()

    # Other processes, if there are any

    def register_shards(self, layout: Layout) -> None:
        """Take note of which process has which part of chunks that are new."""

    def synchronize_processes(self, want: Request) -> None:
        """Wait until all processes have come for the same, and gradients are with their owners."""

    def synchronize_gradients(self, want: Request) -> None:
        """The same; from then on it is known which parameters have gradients."""

    def collective_section(self) -> AbstractContextManager[None]:
        """After having met: what all processes do now, and none may leave out."""
        return nullcontext()

    def synchronize_to_drop(self) -> None:
        """The same, if there may be gradients to forget anywhere."""

    def close_step(self, updated: Iterable[ManagedParam]) -> None:
        """After an update. updated: those with a param group; nobody if there was none."""

    def share_optimizer_memory(self) -> None:
        """Have what optimizers keep of parameters beside the lists, where another process has it."""

    def has_gradient(self, managed: ManagedParam) -> bool:
        """Whether the next step will find a gradient of a parameter, here or, once all have met, anywhere."""
        return managed.has_gradient

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        """Fill a parameter's elements, of which each process has put its own in place, from the others."""

    def drop_gathered(self) -> None:
        """Drop what was gathered from other processes, which have other values now."""

    def all_sums(self, sums: dict[ManagedParam, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Sums of squares of all parameters that have a gradient, in creation order."""
        return tuple(sums[managed] for managed in self.managed_params if managed in sums), not_finite

    def progress(self) -> None:
        """Between two operators of a backward: go on with what needs no parameter of theirs."""

    def begin_backward(self, accumulate: bool = False) -> None:
        """Gradients that come from here on belong to a new backward. accumulate: others follow before the step."""
        self.in_backward = True
        self.backward_id += 1
        self.backwards_in_step += 1

    @staticmethod
    def chunks_to_fetch(managed_params: Sequence[ManagedParam]) -> list[Chunk]:
        """The chunks that an access of `managed_params` needs on the device."""
        return list(dict.fromkeys(managed.chunk for managed in managed_params if not managed.stays_on_host))

    def pin(self, managed_params: Sequence[ManagedParam]) -> None:
        """Mark parameters whose chunks are on the device as in use."""
        for managed in managed_params:
            managed.chunk.pins += 1
            managed.uses += 1
            managed.move_to(TensorState.COMPUTE)

    @defer_sigint
    def release(self, managed_params: Sequence[ManagedParam], hold: TensorState) -> None:
        """End one use of each; the last use of a parameter leaves it in `hold`, or as a gradient if that has come."""
        for managed in managed_params:
            managed.chunk.pins -= 1
            managed.uses -= 1
            if managed.uses == 0:
                managed.move_to(TensorState.HOLD_AFTER_BWD if managed.overlays_param else hold)

    @defer_sigint
    def op_boundary(self, belongs: bool) -> None:
        """An operator has ended: keep the budget for what comes until the next."""
        self.tracer.begin_moment((), belongs)
        try:
            self._keep_budget()
            self.manager.poll_transfers()
        finally:
            self.update_param_views()
        self.tracer.transfers_done()

    def _keep_budget(self) -> None:
        """Have room for what non-model data has come to."""
        self.manager.make_room(0, protect=())

    def finish_forward(self) -> None:
        """Forward is over: whoever was held after it is plainly held."""
        for managed in self.managed_params:
            if managed.state is TensorState.HOLD_AFTER_FWD:
                managed.move_to(TensorState.HOLD)

    @defer_sigint
    def release_all(self) -> None:
        """End every use: an exception has unwound the operators that began them."""
        for managed in self.managed_params:
            managed.chunk.pins, managed.uses = 0, 0
            if managed.state is TensorState.COMPUTE:
                managed.move_to(TensorState.HOLD_AFTER_BWD if managed.overlays_param else TensorState.HOLD)
        self.finish_forward()

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Move chunks to the device, and point Parameters at what came and away from what left."""
        try:
            self.manager.fetch(chunks, gently=gently)
        finally:
            self.update_param_views()

    @defer_sigint
    def update_param_views(self) -> None:
        """Point the Parameters of chunks that moved at their device memory, or at nothing if that is gone."""
        self.set_param_views(self.manager.drain_moved())

    def set_param_views(self, chunks: Iterable[Chunk]) -> None:
        """Point the Parameters of `chunks` at where these are; once the engine is closed they are their owners'."""
        for chunk in () if self.closed else chunks:
            for managed in self.by_chunk.get(chunk.index, ()):
                if managed.chunk is chunk:
                    self._set_param_view(managed)

    def _set_param_view(self, managed: ManagedParam) -> None:
        """See [Note: what a Parameter is while its chunk is away]."""
        with torch._C.DisableTorchFunctionSubclass():
            if managed.chunk.device_valid:
                if managed.device_view is None:
                    managed.device_view = managed.chunk.on_device(managed.region)
                managed.param.data = managed.device_view
            elif managed.stays_on_host:
                managed.param.data = managed.chunk.on_host(managed.region)
            else:
                managed.param.data = self.placeholder(managed.chunk.dtype).expand(managed.shape)

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        """One element that stands in for parameters that are away."""
        if dtype not in self._placeholders:
            fill = float("nan") if dtype.is_floating_point else 0
            self._placeholders[dtype] = torch.full((), fill, dtype=dtype, device=self.manager.device)
        return self._placeholders[dtype]

    # Writing

    @defer_sigint
    def on_in_place_write(self, managed: ManagedParam) -> None:
        """The user wrote to a parameter in place: its chunk has changed, and so has its master copy."""
        self.before_update(managed.location.chunk)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device_valid)
        if managed.schema.trained:
            master = self.manager[PARAM32, managed.location.chunk]
            self._count(managed.chunk, master, managed.location.numel * managed.chunk.dtype.itemsize)
            payload = managed.flat(managed.chunk)
            for where, part in self.parts(managed, PARAM32, write=True):
                follow_rounded(part, payload[where])

    @defer_sigint
    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Write a complete gradient over its parameter.

        Reentrant checkpointing completes a gradient several times in one backward; as in plain PyTorch these are added
        in the compute dtype. Gradients of earlier backwards wait in the gradient list.
        """
        self._check_not_updated((managed,))
        if managed.partial_grad is not None:
            managed.partial_grad.add_(grad)
            return
        if managed.overlays_param and managed.backward_id == self.backward_id:
            managed.may_grow = True
            self._write_gradient(managed, grad, add=True)
            return
        if managed.overlays_param:
            self.move_out_gradient(managed)
        managed.version_before_gradient = managed.param._version
        self._write_gradient(managed, grad, add=False)
        managed.overlays_param, managed.backward_id = True, self.backward_id
        if managed.uses == 0:
            managed.move_to(TensorState.HOLD_AFTER_BWD)

    def _write_gradient(self, managed: ManagedParam, grad: torch.Tensor, add: bool) -> None:
        """Write a gradient where its parameter lies.

        What lies on disk comes to the device for that, but where the window that is open leaves no room: then pages do.
        """
        with suppress(BudgetError):
            self.ensure_in_memory(managed)
        if managed.chunk.in_memory:
            managed.payload().add_(grad) if add else managed.payload().copy_(grad)
            self._bump_version(managed)
            return
        flat = managed.flattened(grad)
        for where, part in self.parts(managed, PARAM16, write=True):
            part.add_(flat[where].to(part.device)) if add else part.copy_(flat[where])
        torch.autograd.graph.increment_version(managed.param)

    def move_out_gradient(self, managed: ManagedParam) -> None:
        """Move a gradient off its parameter, and put the parameter back.

        The parameter is the master rounded, the very bits that were there, so its version counter is set back too:
        what autograd saved of it is true again. A gradient of an earlier backward goes to the gradient list; one that
        may yet grow waits for the end of its backward.
        """
        self.ensure_in_memory(managed)
        if self.in_backward and managed.backward_id == self.backward_id:
            managed.partial_grad, managed.may_grow = managed.payload().clone(), True
        else:
            self._accumulate(managed)
        self._restore(managed)

    def _check_not_updated(self, managed_params: Sequence[ManagedParam]) -> None:
        """See [Note: updating before backward has ended]."""
        late = [
            managed
            for managed in managed_params
            if self.in_backward and managed.updated_in_backward == self.backward_id
        ]
        for managed in late:
            managed.may_grow = True
        if late:
            raise TrainingError(
                f"parameter {late[0].name!r} is read, or gets more gradient, after it was updated in the same "
                f"backward, as in no step before. This step's update is done in part; from the next on it comes "
                f"later. Where steps differ like this, leave update=True out of engine.backward"
            )

    @defer_sigint
    def finish_backward_gradients(self) -> None:
        """Backward has ended: no gradient will grow any more."""
        self.in_backward = False
        for managed in self.managed_params:
            if managed.partial_grad is not None:
                grad, managed.partial_grad = managed.partial_grad, None
                self.accept_gradient(managed, grad)

    def discard_gradients(self) -> None:
        """Forget all gradients; parameters that lie under one are put back."""
        for managed in self.managed_params:
            self.discard_gradient(managed)

    @defer_sigint
    def discard_gradient(self, managed: ManagedParam) -> None:
        """Forget one, unless its update is under way."""
        if managed.update_pending:
            return
        if managed.overlays_param:
            self.ensure_in_memory(managed)
            self._restore(managed)
        managed.in_grad_list, managed.partial_grad = False, None

    @defer_sigint
    def end_step(self) -> bool:
        """Keep the gradient list if the step accumulated, else drop it; True if that differs from the step before."""
        accumulated, self.backwards_in_step = self.backwards_in_step > 1, 0
        lists = [chunk for (kind, _), chunk in self.manager.chunks.items() if kind == GRAD32]
        if not accumulated:
            for chunk in lists:
                if not any(managed.update_pending for managed in self.by_chunk[chunk.index]):
                    self.manager.remove(chunk)
        changed = accumulated != self.accumulates
        self.accumulates = accumulated
        return changed

    @defer_sigint
    def mark_updated(self, managed_params: Iterable[ManagedParam]) -> None:
        """An update has made parameters of what lay over these."""
        for managed in managed_params:
            managed.steps += 1
            managed.observed = True
            torch.autograd.graph.increment_version(managed.param)
            managed.overlays_param = managed.reduced = managed.in_grad_list = managed.update_pending = False
            managed.move_to(TensorState.HOLD)

    def _bump_version(self, managed: ManagedParam) -> None:
        """A payload was written: autograd must catch whoever still wants what was there."""
        torch.autograd.graph.increment_version(managed.param)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device_valid)

    @defer_sigint
    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Have a parameter's chunk in memory, to be written."""
        self.manager.ensure_in_memory(managed.chunk)
        self.update_param_views()

    def _restore(self, managed: ManagedParam) -> None:
        self._restore_own(managed)
        torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.version_before_gradient,))
        managed.overlays_param = False
        if managed.uses == 0:
            managed.move_to(TensorState.HOLD)
