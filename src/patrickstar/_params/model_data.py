"""Model data in use: access, release, and the gradient that takes its parameter's place (§6.2, Figure 7)."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from patrickstar._distributed.chunk_comm import Peers
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import Manager
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._memory.tracer import Clock
from patrickstar._params.local_shards import OwnLists, follow_rounded
from patrickstar._params.managed_param import Slot
from patrickstar._params.save_in_progress import SaveInProgress
from patrickstar._schedule.coordination import Want
from patrickstar._schedule.placement import Tier, embedding_runs_on_host
from patrickstar._schedule.tensor_state import TensorState, chunk_state
from patrickstar.errors import BudgetError, TrainingError

# [Note: what a Parameter is while its chunk is away]
# The user's Parameter views its chunk's storage while that is on the device. When the chunk leaves, the Parameter is
# given a stand-in of the same shape over one NaN. Operators never see it, since they announce themselves first; what
# gets past that (native code handed the tensor directly) computes NaN instead of reading freed memory.


class ModelData(OwnLists):
    """The slots of one engine over its manager's chunks."""

    def __init__(self, manager: Manager, clock: Clock) -> None:
        super().__init__(manager)
        self.clock = clock
        self.slots: list[Slot] = []
        self.by_chunk: dict[int, list[Slot]] = {}
        self.peers: Peers | None = None
        """The other processes."""
        self.saving: SaveInProgress | None = None
        """A checkpoint that is being written, and copies what it wants of chunks before that changes."""
        self.closed = False
        self.in_backward = False
        self.backward = 0
        self.backwards_in_step = 0
        self.accumulates = False
        self._stand_ins: dict[torch.dtype, torch.Tensor] = {}

    def add(self, slot: Slot) -> None:
        """Take a parameter under management; its payload is in place."""
        self.slots.append(slot)
        self.by_chunk.setdefault(slot.place.chunk, []).append(slot)
        slot.move_to(TensorState.HOLD)
        self._point(slot)

    def chunk_state(self, index: int) -> TensorState:
        """The state of a `param16` chunk, which follows from its tensors'."""
        return chunk_state(slot.state for slot in self.by_chunk[index])

    # Access and release (Algorithms 1 and 2)

    @uninterrupted
    def access(self, slots: Sequence[Slot], belongs: bool, *, gently: bool = False) -> None:
        """Have the parameters of `slots` readable on the device until they are released.

        gently: only other parameters may leave for them.
        """
        if self.closed:
            raise TrainingError(f"parameter {slots[0].name!r} is used by a graph whose engine was closed")
        self._check_not_updated(slots)
        self.uncover(slots)
        chunks = self.chunks_to_bring(slots)
        self.clock.tick(tuple(chunk.index for chunk in chunks), belongs)
        self.bring(chunks, gently=gently)
        self.clock.settled()
        self.pin(slots)
        self.manager.advance()
        self.follow_moves()

    def uncover(self, slots: Sequence[Slot]) -> None:
        """Have parameters where gradients lie over them."""
        for slot in slots:
            if slot.over_param:
                self.give_way(slot)

    @uninterrupted
    def settle_embeddings(self) -> None:
        """Have lookups run on the host from now on where the last step moved more of the weight than they put out.

        What is known of iterations no longer holds then.
        """
        for slot in self.slots:
            if not slot.embedding:
                continue
            chunk = slot.chunk
            fewer = embedding_runs_on_host(chunk.moved_bytes, slot.looked_up_bytes)
            has_room = chunk.host_bytes > 0 or self.manager.host.has_room(chunk.nbytes)
            if not slot.on_host and fewer and has_room:
                self.manager.settle(slot.chunk, Tier.HOST)
                slot.on_host = True
                self.clock.forget()
                self.follow_moves()
                self.point([slot.chunk])
            slot.chunk.moved_bytes = slot.looked_up_bytes = 0

    def bring_back(self, slot: Slot) -> None:
        """An operator other than a lookup wants an embedding's weight: it has to come to the device after all."""
        slot.on_host = False
        self.clock.forget()
        self.point([slot.chunk])

    # A checkpoint that is being written, if there is one

    def about_to_change(self, index: int) -> None:
        """Masters, states or frozen parameters of a chunk will change."""
        if self.saving is not None:
            self.saving.before_update(index)

    def go_on_saving(self) -> None:
        """Between two operators: copy what the disk has room for."""
        if self.saving is not None:
            self.saving.proceed()

    # Other processes, if there are any

    def take_cuts(self, layout: Layout) -> None:
        """Take note of which process has which part of chunks that are new."""

    def meet(self, want: Want) -> None:
        """Wait until all processes have come for the same, and gradients are with their owners."""

    def meet_gradients(self, want: Want) -> None:
        """The same; from then on it is known which parameters have gradients."""

    def together(self) -> AbstractContextManager[None]:
        """After having met: what all processes do now, and none may leave out."""
        return nullcontext()

    def meet_to_drop(self) -> None:
        """The same, if there may be gradients to forget anywhere."""

    def close_step(self, updated: Iterable[Slot]) -> None:
        """After an update. updated: those with a param group; nobody if there was none."""

    def share_memory(self) -> None:
        """Have what optimizers keep of parameters beside the lists, where another process has it."""

    def has_gradient(self, slot: Slot) -> bool:
        """Whether the next step will find a gradient of a parameter, here or, once all have met, anywhere."""
        return slot.has_gradient

    def complete_parts(self, slot: Slot, flat: torch.Tensor) -> None:
        """Fill a parameter's elements, of which each process has put its own in place, from the others."""

    def forget_gathered(self) -> None:
        """Drop what was gathered from other processes, which have other values now."""

    def all_sums(self, sums: dict[Slot, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Sums of squares of all parameters that have a gradient, in creation order."""
        return tuple(sums[slot] for slot in self.slots if slot in sums), not_finite

    def proceed(self) -> None:
        """Between two operators of a backward: go on with what needs no parameter of theirs."""

    def begin_backward(self, accumulate: bool = False) -> None:
        """Gradients that come from here on belong to a new backward. accumulate: others follow before the step."""
        self.in_backward = True
        self.backward += 1
        self.backwards_in_step += 1

    @staticmethod
    def chunks_to_bring(slots: Sequence[Slot]) -> list[Chunk]:
        """The chunks that an access of `slots` needs on the device."""
        return list(dict.fromkeys(slot.chunk for slot in slots if not slot.stays_on_host))

    def pin(self, slots: Sequence[Slot]) -> None:
        """Mark parameters whose chunks are on the device as in use."""
        for slot in slots:
            slot.chunk.pins += 1
            slot.uses += 1
            slot.move_to(TensorState.COMPUTE)

    @uninterrupted
    def release(self, slots: Sequence[Slot], hold: TensorState) -> None:
        """End one use of each; the last use of a parameter leaves it in `hold`, or as a gradient if that has come."""
        for slot in slots:
            slot.chunk.pins -= 1
            slot.uses -= 1
            if slot.uses == 0:
                slot.move_to(TensorState.HOLD_AFTER_BWD if slot.over_param else hold)

    @uninterrupted
    def boundary(self, belongs: bool) -> None:
        """An operator has ended: keep the budget for what comes until the next."""
        self.clock.tick((), belongs)
        try:
            self._keep_budget()
            self.manager.advance()
        finally:
            self.follow_moves()
        self.clock.settled()

    def _keep_budget(self) -> None:
        """Have room for what non-model data has come to."""
        self.manager.make_room(0, protect=())

    def reset_after_forward(self) -> None:
        """Forward is over: whoever was held after it is plainly held."""
        for slot in self.slots:
            if slot.state is TensorState.HOLD_AFTER_FWD:
                slot.move_to(TensorState.HOLD)

    @uninterrupted
    def drop_uses(self) -> None:
        """End every use: an exception has unwound the operators that began them."""
        for slot in self.slots:
            slot.chunk.pins, slot.uses = 0, 0
            if slot.state is TensorState.COMPUTE:
                slot.move_to(TensorState.HOLD_AFTER_BWD if slot.over_param else TensorState.HOLD)
        self.reset_after_forward()

    def bring(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Move chunks to the device, and point Parameters at what came and away from what left."""
        try:
            self.manager.bring(chunks, gently=gently)
        finally:
            self.follow_moves()

    @uninterrupted
    def follow_moves(self) -> None:
        """Point the Parameters of chunks that moved at their device memory, or at nothing if that is gone."""
        self.point(self.manager.drain_moved())

    def point(self, chunks: Iterable[Chunk]) -> None:
        """Point the Parameters of `chunks` at where these are; once the engine is closed they are their owners'."""
        for chunk in () if self.closed else chunks:
            for slot in self.by_chunk.get(chunk.index, ()):
                if slot.chunk is chunk:
                    self._point(slot)

    def _point(self, slot: Slot) -> None:
        """See [Note: what a Parameter is while its chunk is away]."""
        with torch._C.DisableTorchFunctionSubclass():
            if slot.chunk.device_valid:
                if slot.device_view is None:
                    slot.device_view = slot.chunk.on_device(slot.region)
                slot.param.data = slot.device_view
            elif slot.stays_on_host:
                slot.param.data = slot.chunk.on_host(slot.region)
            else:
                slot.param.data = self.absent(slot.chunk.dtype).expand(slot.shape)

    def absent(self, dtype: torch.dtype) -> torch.Tensor:
        """One element that stands in for parameters that are away."""
        if dtype not in self._stand_ins:
            fill = float("nan") if dtype.is_floating_point else 0
            self._stand_ins[dtype] = torch.full((), fill, dtype=dtype, device=self.manager.device)
        return self._stand_ins[dtype]

    # Writing

    @uninterrupted
    def written(self, slot: Slot) -> None:
        """The user wrote to a parameter in place: its chunk has changed, and so has its master copy."""
        self.about_to_change(slot.place.chunk)
        self.manager.mark_written(slot.chunk, on_device=slot.chunk.device_valid)
        if slot.scheme.trained:
            master = self.manager[PARAM32, slot.place.chunk]
            self._count(slot.chunk, master, slot.place.numel * slot.chunk.dtype.itemsize)
            payload = slot.flat(slot.chunk)
            for where, part in self.parts(slot, PARAM32, write=True):
                follow_rounded(part, payload[where])

    @uninterrupted
    def put_gradient(self, slot: Slot, grad: torch.Tensor) -> None:
        """Write a complete gradient over its parameter.

        Reentrant checkpointing completes a gradient several times in one backward; as in plain PyTorch these are added
        in the compute dtype. Gradients of earlier backwards wait in the gradient list.
        """
        self._check_not_updated((slot,))
        if slot.unfinished is not None:
            slot.unfinished.add_(grad)
            return
        if slot.over_param and slot.backward == self.backward:
            slot.grows = True
            self._write_gradient(slot, grad, add=True)
            return
        if slot.over_param:
            self.give_way(slot)
        slot.version_before_gradient = slot.param._version
        self._write_gradient(slot, grad, add=False)
        slot.over_param, slot.backward = True, self.backward
        if slot.uses == 0:
            slot.move_to(TensorState.HOLD_AFTER_BWD)

    def _write_gradient(self, slot: Slot, grad: torch.Tensor, add: bool) -> None:
        """Write a gradient where its parameter lies.

        What lies on disk comes to the device for that, but where the window that is open leaves no room: then pages do.
        """
        with suppress(BudgetError):
            self.have(slot)
        if slot.chunk.in_memory:
            slot.payload().add_(grad) if add else slot.payload().copy_(grad)
            self._note_write(slot)
            return
        flat = slot.flattened(grad)
        for where, part in self.parts(slot, PARAM16, write=True):
            part.add_(flat[where].to(part.device)) if add else part.copy_(flat[where])
        torch.autograd.graph.increment_version(slot.param)

    def give_way(self, slot: Slot) -> None:
        """Move a gradient off its parameter, and put the parameter back.

        The parameter is the master rounded, the very bits that were there, so its version counter is set back too:
        what autograd saved of it is true again. A gradient of an earlier backward goes to the gradient list; one that
        may yet grow waits for the end of its backward.
        """
        self.have(slot)
        if self.in_backward and slot.backward == self.backward:
            slot.unfinished, slot.grows = slot.payload().clone(), True
        else:
            self._accumulate(slot)
        self._restore(slot)

    def _check_not_updated(self, slots: Sequence[Slot]) -> None:
        """See [Note: updating before backward has ended]."""
        late = [slot for slot in slots if self.in_backward and slot.updated_in == self.backward]
        for slot in late:
            slot.grows = True
        if late:
            raise TrainingError(
                f"parameter {late[0].name!r} is read, or gets more gradient, after it was updated in the same "
                f"backward, as in no step before. This step's update is done in part; from the next on it comes "
                f"later. Where steps differ like this, leave update=True out of engine.backward"
            )

    @uninterrupted
    def finish_gradients(self) -> None:
        """Backward has ended: no gradient will grow any more."""
        self.in_backward = False
        for slot in self.slots:
            if slot.unfinished is not None:
                grad, slot.unfinished = slot.unfinished, None
                self.put_gradient(slot, grad)

    def discard_gradients(self) -> None:
        """Forget all gradients; parameters that lie under one are put back."""
        for slot in self.slots:
            self.discard_gradient(slot)

    @uninterrupted
    def discard_gradient(self, slot: Slot) -> None:
        """Forget one, unless its update is under way."""
        if slot.pending:
            return
        if slot.over_param:
            self.have(slot)
            self._restore(slot)
        slot.in_list, slot.unfinished = False, None

    @uninterrupted
    def end_step(self) -> bool:
        """Keep the gradient list if the step accumulated, else drop it; True if that differs from the step before."""
        accumulated, self.backwards_in_step = self.backwards_in_step > 1, 0
        lists = [chunk for (kind, _), chunk in self.manager.chunks.items() if kind == GRAD32]
        if not accumulated:
            for chunk in lists:
                if not any(slot.pending for slot in self.by_chunk[chunk.index]):
                    self.manager.remove(chunk)
        changed = accumulated != self.accumulates
        self.accumulates = accumulated
        return changed

    @uninterrupted
    def updated(self, slots: Iterable[Slot]) -> None:
        """An update has made parameters of what lay over these."""
        for slot in slots:
            slot.steps += 1
            slot.watched = True
            torch.autograd.graph.increment_version(slot.param)
            slot.over_param = slot.reduced = slot.in_list = slot.pending = False
            slot.move_to(TensorState.HOLD)

    def _note_write(self, slot: Slot) -> None:
        """A payload was written: autograd must catch whoever still wants what was there."""
        torch.autograd.graph.increment_version(slot.param)
        self.manager.mark_written(slot.chunk, on_device=slot.chunk.device_valid)

    @uninterrupted
    def have(self, slot: Slot) -> None:
        """Have a parameter's chunk in memory, to be written."""
        self.manager.have(slot.chunk)
        self.follow_moves()

    def _restore(self, slot: Slot) -> None:
        self._restore_own(slot)
        torch._C._autograd._unsafe_set_version_counter((slot.param,), (slot.version_before_gradient,))
        slot.over_param = False
        if slot.uses == 0:
            slot.move_to(TensorState.HOLD)
