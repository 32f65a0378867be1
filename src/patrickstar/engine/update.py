"""The update, chunk by chunk, each where its optimizer chunks lie (PatrickStar's hybrid Adam, §8.2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from patrickstar.engine.model_data import ModelData, copy_rounded
from patrickstar.engine.slot import Slot
from patrickstar.engine.workspace import Workspace
from patrickstar.kernels.adam import AdamStep, adam_update
from patrickstar.layout.lists import EXP_AVG, EXP_AVG_SQ, GRAD32, PARAM32
from patrickstar.memory.chunk import Chunk
from patrickstar.schedule.states import TensorState


@dataclass(frozen=True)
class Scaling:
    """Factors that gradients are multiplied by before the update, one after the other, each rounded."""

    unscale: float | None = None
    clips: tuple[torch.Tensor, ...] = ()

    def apply(self, grad: torch.Tensor) -> torch.Tensor:
        """Scale a gradient in place."""
        if self.unscale is not None:
            grad.mul_(self.unscale)
        for factor in self.clips:
            grad.mul_(factor.to(grad.device))
        return grad


class Update:
    """Runs one optimizer step over all chunks that hold gradients."""

    def __init__(self, data: ModelData) -> None:
        self.data = data
        self.on_device: set[int] = set()

    def run(self, hyper_of: Callable[[Slot], AdamStep | None], scaling: Scaling) -> None:
        """Update every parameter that has a gradient and belongs to a param group."""
        manager, workspace = self.data.manager, self.data.workspace()
        for index, slots in self.data.by_chunk.items():
            if not slots[0].scheme.trained:
                continue
            self._place(index, slots)
            updated = False
            for slot in slots:
                hyper = hyper_of(slot) if slot.has_gradient else None
                if hyper is not None:
                    self._step(slot, hyper, scaling, workspace)
                    updated = True
            if updated:
                for chunk in (slots[0].chunk, *self._optimizer_chunks(index, slots)):
                    manager.mark_written(chunk, on_device=chunk.device_valid)

    def stuck(self) -> set[int]:
        """Indices whose optimizer chunks are on the device and find no room on the host.

        Going down must leave the host what `param16` needs to change places.
        """
        manager = self.data.manager
        exchange = 2 * max(slots[0].chunk.nbytes for slots in self.data.by_chunk.values())
        free = manager.host_budget_bytes - manager.host_used - manager.host_non_model_bytes - exchange
        found = set()
        for index, slots in self.data.by_chunk.items():
            chunks = self._optimizer_chunks(index, slots)
            if chunks and chunks[0].device_valid and not chunks[0].host_valid:
                nbytes = sum(chunk.nbytes for chunk in chunks)
                if nbytes > free:
                    found.add(index)
                else:
                    free -= nbytes
        return found

    def _optimizer_chunks(self, index: int, slots: list[Slot]) -> list[Chunk]:
        """The chunks of one index that only the update touches, as its scheme lists them."""
        return [self.data.manager[spec.kind, index] for spec in slots[0].scheme.optimizer_lists]

    def _place(self, index: int, slots: list[Slot]) -> None:
        """Bring the chunks of one index to the tier where its optimizer chunks are to live.

        Below, `param16` comes along where it would have to leave the device anyway, or lies there already. Where all of
        it fits above, it stays: gradients stream down and parameters up.
        """
        manager = self.data.manager
        chunks = self._optimizer_chunks(index, slots)
        if (GRAD32, index) in manager.chunks:
            chunks.append(manager[GRAD32, index])
        on_device = index in self.on_device
        read = slots[0].chunk
        if any(slot.has_gradient for slot in slots):
            has_place = read.host_bytes > 0 or manager.free_host_room(read.nbytes)
            if on_device or (manager.keep_duplicates and has_place):
                chunks.append(read)
        if on_device:
            manager.bring(chunks)
        for chunk in chunks:
            manager.settle(chunk, on_device)
        self.data.follow_moves()

    def _step(self, slot: Slot, hyper: AdamStep, scaling: Scaling, workspace: Workspace) -> None:
        manager, index = self.data.manager, slot.place.chunk
        lists = [slot.in_chunk(manager[kind, index]) for kind in (PARAM32, EXP_AVG, EXP_AVG_SQ)]
        grad = scaling.apply(self.data.gradient(slot, workspace, lists[0].device))
        adam_update([lists[0]], [grad], [lists[1]], [lists[2]], [slot.steps], hyper)
        slot.steps += 1
        copy_rounded(lists[0], slot.payload())
        if slot.chunk.device_valid and not manager[PARAM32, index].device_valid:
            for to_device in (False, True):
                manager.count_move(slot.payload().nbytes, to_device=to_device)
                slot.chunk.moved_bytes += slot.payload().nbytes
        torch.autograd.graph.increment_version(slot.param)
        slot.over_param = slot.in_list = False
        slot.move_to(TensorState.HOLD)
