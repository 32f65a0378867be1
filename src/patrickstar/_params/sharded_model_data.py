"""Model data that several processes share: each owns a part of every chunk and updates that (§7, Algorithms 3, 4)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from patrickstar._distributed.chunk_comm import Peers
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._layout.schema import ITEMSIZE, PARAM16, PARAM32, SHARD16, SUM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import Manager
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._memory.tracer import Clock
from patrickstar._params.grad_accumulation import Kept
from patrickstar._params.local_shards import follow_rounded
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.coordination import Want
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


class SharedModelData(ModelData):
    """The slots of one process over its parts of the chunks."""

    def __init__(self, manager: Manager, clock: Clock, peers: Peers, *, in_full: bool = False) -> None:
        super().__init__(manager, clock)
        self.peers: Peers = peers
        self.in_full = in_full
        """Whether gradients are sent, and their sums kept, in fp32."""
        self.keeps = False
        """Whether gradients of this backward stay in this process, since more are to come."""
        self._lying: set[int] = set()
        """Chunks with gradients over their parameters."""
        self._dropping = False
        """Whether gradients are being forgotten, in all processes."""
        self._fresh = False
        """Whether no process has had anything to forget since the last step."""
        self._written: set[Chunk] = set()
        """Gathered chunks that were written to here, and perhaps otherwise elsewhere."""
        self.kept = Kept(manager, peers)
        """Gradients that have not been averaged since more were to come."""
        self.complete: Callable[[Sequence[Slot]], None] = lambda slots: None
        """Has these parameters updated, where that was asked for and has not ended."""
        self._came_here: set[Slot] = set()
        """Those that have had a gradient here since the last step."""
        self._unused: set[Slot] = set()
        """Those that had no gradient here in the last step."""

    # What the other processes ask for

    def parameters(self, index: int) -> torch.Tensor:
        """The part of a chunk that this process owns, parameters in it, where it lies."""
        slots = self._mine(index)
        self.complete(slots)
        own = self.manager[SHARD16, index]
        self._settle_sum(index)
        for slot in slots:
            if slot.reduced:
                self._accumulate(slot)
                self._restore_own(slot)
                slot.reduced = False
        self._have_in_memory(own)
        return own.current(own.whole)

    def _settle_sum(self, index: int) -> None:
        """What the processes add up of a chunk is there, in its place."""
        self.manager.moves.settle(self.manager[SHARD16, index])
        found = self.manager.chunks.get((SUM32, index))
        if found is not None:
            self.manager.moves.settle(found)
            for slot in self._mine(index):
                self._add_to_list(slot, slot.flat(found))
            self.manager.remove(found)

    def begin_sum(self, index: int, ranks: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Gradients of these ranks will be added up: this process's own, and where the sum of its part goes."""
        self.parameters(index)  # and an earlier sum is out of the way
        own = self.manager[SHARD16, index]
        mine = None
        if self.peers.world.rank in ranks:
            chunk, kept = self.manager[PARAM16, index], self.kept.handed_over(index)
            mine = kept if kept is not None else chunk.on_device(chunk.whole)
        if self.in_full and own.dtype.itemsize < ITEMSIZE["float32"]:
            found = self.manager.new_chunk(SUM32, index, own.numel, "float32", Tier.HOST)
            return mine, found.current(found.whole), found
        self.manager.mark_written(own, on_device=own.device_valid)
        for slot in self._mine(index):
            slot.reduced = True
        return mine, own.current(own.whole), own

    def _list_tier(self, beside: Chunk) -> Tier:
        """Where a chunk of the gradient list is made: where nothing has to make way, which could wait for others."""
        tier, compute = super()._list_tier(beside), self.manager.compute
        if tier is Tier.DEVICE and compute.used + beside.nbytes > compute.chunkable_bytes:
            return Tier.HOST
        return tier

    def _have_in_memory(self, chunk: Chunk) -> None:
        if not chunk.in_memory:
            self.manager.have(chunk)
            self.follow_moves()

    def _mine(self, index: int) -> list[Slot]:
        return [slot for slot in self.by_chunk[index] if slot.place.numel]

    # Operators

    def uncover(self, slots: Sequence[Slot]) -> None:
        """Have parameters where gradients lie over them, or did."""
        super().uncover(slots)
        for slot in slots:
            if slot.handed_over:
                # What comes back is what was there, so what autograd saved of it is true again.
                torch._C._autograd._unsafe_set_version_counter((slot.param,), (slot.version_before_gradient,))
                slot.handed_over = False

    def give_way(self, slot: Slot) -> None:
        """Move the gradients that lie over a chunk off it, until backward ends, and gather it again."""
        self.manager.have(slot.chunk)
        for other in self.by_chunk[slot.chunk.index]:
            if other.over_param:
                other.unfinished, other.grows = other.payload().clone(), True
                self._uncovered(other)
        self._lying.discard(slot.chunk.index)
        self.manager.refresh(slot.chunk)
        self.follow_moves()

    def _uncovered(self, slot: Slot) -> None:
        slot.over_param, slot.handed_over = False, True
        if slot.uses == 0:
            slot.move_to(TensorState.HOLD)

    @uninterrupted
    def written(self, slot: Slot) -> None:
        """The user wrote to a parameter in place, in every process: its owner takes it over.

        Not before all have written: who comes later must find what was there before.
        """
        self.about_to_change(slot.place.chunk)
        part = slot.flattened(slot.payload())[slot.part].clone()
        self.meet(Want.WRITE)
        self._written.add(slot.chunk)
        if not slot.place.numel:
            return
        self.parameters(slot.chunk.index)  # a gradient that lies over the old one makes way
        slot.flat(slot.own).copy_(part)
        self.manager.mark_written(slot.own, on_device=slot.own.device_valid)
        if slot.scheme.trained:
            for where, master in self.parts(slot, PARAM32, write=True):
                follow_rounded(master, part[where])

    # Gradients

    @uninterrupted
    def put_gradient(self, slot: Slot, grad: torch.Tensor) -> None:
        """Write a complete gradient over its parameter. See [Note: gradients of several processes]."""
        slot.came = True
        self._came_here.add(slot)
        if slot.unfinished is not None:
            slot.unfinished.add_(grad)
            return
        self.have(slot)
        if slot.over_param:
            slot.grows = True
            slot.payload().add_(grad)
        else:
            if not slot.handed_over:
                slot.version_before_gradient = slot.param._version
            slot.payload().copy_(grad)
        self._note_write(slot)
        slot.over_param, slot.backward = True, self.backward
        self._lying.add(slot.chunk.index)
        if slot.uses == 0:
            slot.move_to(TensorState.HOLD_AFTER_BWD)

    def bring(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Move chunks to the device; where gradients take the room, these are handed over as they are."""
        try:
            super().bring(chunks, gently=gently)
        except BudgetError:
            if not self._hand_over_idle(chunks):
                raise
            super().bring(chunks, gently=gently)

    def have(self, slot: Slot) -> None:
        """Have a parameter's chunk gathered, to be written."""
        if not slot.chunk.in_memory:
            self.bring([slot.chunk])

    def _keep_budget(self) -> None:
        """Have room for what non-model data has come to; what was written to is gathered again when it is needed."""
        for chunk in [chunk for chunk in self._written if not chunk.pins]:
            self._written.discard(chunk)
            if chunk.device_valid and not chunk.has_gradients and chunk.leaving is None:
                self.manager.drop(chunk)
        try:
            super()._keep_budget()
        except BudgetError:
            if not self._hand_over_idle(()):
                raise
            super()._keep_budget()

    def _hand_over_idle(self, protect: Sequence[Chunk]) -> bool:
        idle = [
            chunk.index
            for chunk in self.manager.param16.values()
            if chunk.has_gradients and chunk.leaving is None and not chunk.pins and chunk not in protect
        ]
        for index in idle:
            self._hand_over(index)
        return bool(idle)

    def begin_backward(self, accumulate: bool = False) -> None:
        super().begin_backward(accumulate)
        self.keeps = accumulate

    def proceed(self) -> None:
        """Hand over the chunks that have all the gradients they will get, and that no operator uses."""
        if not self.in_backward:
            return
        for index in sorted(self._lying):
            slots = self.by_chunk[index]
            if slots[0].chunk.pins:
                continue
            expected = [slot for slot in slots if slot.param.requires_grad and slot not in self._unused]
            if all(slot.over_param for slot in expected):
                self._hand_over(index)

    @uninterrupted
    def finish_gradients(self) -> None:
        """Backward has ended: no gradient will grow any more, and all are handed over."""
        super().finish_gradients()
        for index in sorted(self._lying):
            self._hand_over(index)
        if not self.keeps:
            self.kept.hand_over_rest()

    @uninterrupted
    def _hand_over(self, index: int) -> None:
        slots = self.by_chunk[index]
        chunk = slots[0].chunk
        self._lying.discard(index)
        for slot in slots:
            if slot.over_param:
                self._uncovered(slot)
            else:
                slot.payload().zero_()
        if self.keeps or self.kept.has(index):
            self.kept.add(chunk)
            if not self.keeps:
                self.kept.hand_over(index)
        else:
            self.manager.hand_over(chunk)
        self.follow_moves()

    def together(self) -> AbstractContextManager[None]:
        """After having met: what all processes do now, and none may leave out."""
        return self.peers.rounds.together()

    def meet_to_drop(self) -> None:
        """Wait until all processes have come to drop gradients, unless they have just come from a step."""
        fresh, self._fresh = self._fresh, False
        if not fresh or any(slot.came for slot in self.slots):
            self.kept.forget()
            self.meet(Want.DROP)

    def discard_gradients(self) -> None:
        """Forget all gradients, which all processes do now; parts that lie under one are put back."""
        self.kept.forget()
        self._came_here.clear()
        self._dropping = True
        try:
            super().discard_gradients()
        finally:
            self._dropping = False
        self.follow_moves()

    @uninterrupted
    def discard_gradient(self, slot: Slot) -> None:
        """Forget one, unless its update is under way; all processes have met for that."""
        if slot.pending:
            return
        if not self._dropping:
            if slot.came:
                raise TrainingError(
                    f"the gradient of {slot.name!r} is on its way to other processes, and can't be dropped by itself: "
                    f"call optimizer.zero_grad() in all of them"
                )
            return
        if slot.over_param:
            self._uncovered(slot)
            slot.chunk.owners_valid = not any(one.over_param for one in self.by_chunk[slot.chunk.index])
            if slot.chunk.owners_valid:
                self._lying.discard(slot.chunk.index)
                self.manager.refresh(slot.chunk)
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        """Have this process's part of the parameter again, whatever lies over it."""
        self._settle_sum(slot.chunk.index)
        if slot.reduced:
            self._have_in_memory(slot.own)
            self._restore_own(slot)
        slot.reduced = slot.in_list = slot.came = False
        slot.unfinished = None

    # All processes together

    def take_cuts(self, layout: Layout) -> None:
        """Take note of which process has which part of chunks that are new."""
        self.peers.cuts |= {chunk.index: chunk.cuts for chunk in layout.chunks}

    def meet(self, want: Want) -> None:
        """Wait until all processes have come for the same, and gradients are with their owners."""
        self.peers.meet(want)
        for chunk in list(self.manager.moves.in_flight):
            if chunk.shared and chunk.leaving is not None:
                self.manager.moves.land(chunk)
        for index in self.by_chunk:
            self._settle_sum(index)
        self.follow_moves()

    def meet_gradients(self, want: Want) -> None:
        """The same; from then on it is known which parameters have gradients."""
        self.kept.hand_over_rest()
        self.meet(want)
        self.kept.forget()
        here = torch.tensor([slot.came for slot in self.slots], dtype=torch.uint8, device="cpu")
        for slot, came in zip(self.slots, self.peers.world.collect(here).any(0).tolist(), strict=True):
            if not came and (slot.reduced or slot.in_list):
                self._forget(slot)
            slot.came = came
        self._unused = {slot for slot in self.slots if slot.scheme.trained and slot not in self._came_here}

    def close_step(self, updated: Iterable[Slot]) -> None:
        """After an update: what was gathered is old. updated: those with a param group; nobody if there was none."""
        belongs = set(updated)
        for slot in self.slots:
            if slot.came and slot in belongs and not slot.place.numel:
                self.updated((slot,))
            slot.came = slot.handed_over = False
        self._came_here.clear()
        self._drop_gathered(index for index, slots in self.by_chunk.items() if slots[0].scheme.trained)
        self._fresh = True

    def forget_gathered(self) -> None:
        """Drop what was gathered from other processes, which have other values now."""
        self._drop_gathered(self.by_chunk)

    def _drop_gathered(self, indices: Iterable[int]) -> None:
        self._written.clear()
        self.manager.forget_gathered(indices)
        self.follow_moves()

    def share_memory(self) -> None:
        """Have what optimizers keep of parameters beside the lists from those that have a part of them."""
        mine = {slot.name: _plain(slot.memory) for slot in self.slots if slot.place.numel and slot.memory}
        known: dict[str, Any] = {}
        for said in reversed(self.peers.world.tell(mine)):
            known |= said
        for slot in self.slots:
            if not slot.place.numel and slot.name in known:
                slot.memory = _with_tensors(known[slot.name])

    def has_gradient(self, slot: Slot) -> bool:
        """Whether the next step will find a gradient of a parameter, once all have met anywhere."""
        return slot.came

    def complete_parts(self, slot: Slot, flat: torch.Tensor) -> None:
        """Fill a parameter's elements, of which each process has put its own in place, from the others."""
        begin, end = slot.region.offset, slot.region.offset + slot.numel
        cuts = self.peers.cuts[slot.chunk.index]
        for rank, (first, last) in enumerate(pairwise(cuts)):
            if max(first, begin) < min(last, end):
                self.peers.world.spread(flat[max(first, begin) - begin : min(last, end) - begin], rank)

    def all_sums(self, sums: dict[Slot, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Sums of squares of all parameters that have a gradient, in creation order, of all processes' parts.

        Parts of one parameter are added in the order of ranks.
        """
        row = torch.tensor(
            [*(sums.get(slot, 0.0) for slot in self.slots), float(not_finite)], dtype=torch.float64, device="cpu"
        )
        rows = self.peers.world.collect(row)
        total = torch.zeros_like(row)
        for one in rows:
            total += one
        came = [slot.came for slot in self.slots]
        values = total.tolist()
        return tuple(value for value, has in zip(values, came, strict=False) if has), int(values[-1])
