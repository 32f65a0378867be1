"""The lists of which this process has its part: parameters, masters, states and gradients, in memory or on disk."""

from collections.abc import Iterator

import torch

from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.update_rule import Gradient
from patrickstar._layout.schema import GRAD32, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import Manager
from patrickstar._memory.defer_sigint import uninterrupted
from patrickstar._params.managed_param import Slot
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.tensor_state import TensorState


def follow_rounded(master: torch.Tensor, written: torch.Tensor) -> None:
    """Take over what was written to a rounded copy of `master`; elements left alone keep their full precision."""
    written = written.to(master.device)
    master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))


def copy_rounded(master: torch.Tensor, payload: torch.Tensor) -> None:
    """Write `master` into `payload` in its dtype, with the bits of an update; what crosses devices is rounded first."""
    if master.device == payload.device:
        round_into(payload, master)
    else:
        payload.copy_(canonical_nan_(master.to(payload.dtype, copy=True)))


class OwnLists:
    """Reads and writes a slot's part of each list, wherever it lies."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager

    def follow_moves(self) -> None:
        """Chunks may have moved."""

    def parts(
        self, slot: Slot, kind: str, *, write: bool = False, within: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """A parameter's elements of one list, in a row: in memory all at once, of what lies on disk a page at a time.

        Each part comes with its place among the parameter's elements. With `write` parts are written back. `within`:
        of these elements alone.
        """
        first, stop = (0, slot.place.numel) if within is None else (within.start, within.stop)
        chunk = self.manager[kind, slot.place.chunk]
        self.manager.moves.settle(chunk)
        self.follow_moves()
        if chunk.in_memory:
            yield slice(first, stop), slot.flat(chunk)[first:stop]
            if write:
                self.manager.mark_written(chunk, on_device=chunk.device_valid)
            return
        offset = slot.place.offset
        for at, page in self.manager.transit.pages_of(chunk, offset + first, stop - first, write):
            begin, end = max(at, offset + first), min(at + page.numel(), offset + stop)
            yield slice(begin - offset, end - offset), page[begin - at : end - at]

    def gradient(self, slot: Slot) -> Gradient:
        """A parameter's gradient where it lies. Its two parts, if there are two, may lie on two tiers."""
        dtype = getattr(torch, slot.scheme.master_dtype)
        if not slot.in_list:
            return Gradient(slot.flat(slot.own), None, dtype)
        earlier = slot.flat(self.manager[GRAD32, slot.place.chunk])
        if not slot.over_own:
            return Gradient(earlier, None, dtype)
        return Gradient(slot.flat(slot.own), earlier, dtype)

    @uninterrupted
    def give_up(self, slot: Slot) -> None:
        """An update failed on the way: what lies over the parameter may be anything, and becomes the rounded master."""
        self._round_master(slot)
        torch.autograd.graph.increment_version(slot.param)
        self.manager.mark_written(slot.own, on_device=slot.own.device_valid)
        slot.over_param, slot.in_list, slot.unfinished, slot.pending = False, False, None, False
        slot.reduced = False
        if slot.uses == 0:
            slot.move_to(TensorState.HOLD)

    @uninterrupted
    def follow_master(self, slot: Slot) -> None:
        """A master, or a frozen parameter, was replaced: the parameter is what it rounds to."""
        torch.autograd.graph.increment_version(slot.param)
        if slot.scheme.trained and slot.place.numel:
            self._round_master(slot)
            self.manager.mark_written(slot.own, on_device=slot.own.device_valid)

    def _count(self, source: Chunk, target: Chunk, nbytes: int) -> None:
        if source.device_valid != target.device_valid and source.in_memory and target.in_memory:
            self.manager.count_move(nbytes, to_device=target.device_valid)

    @uninterrupted
    def have_own(self, slot: Slot) -> None:
        """The same of the chunk that has this process's part."""
        self.manager.have(slot.own)
        self.follow_moves()

    def gradient_on_disk(self, slot: Slot) -> bool:
        """Whether a part of a parameter's gradient has to be read from disk, as `gradient_parts` does."""
        return slot.in_list and not self.manager[GRAD32, slot.place.chunk].in_memory

    def gradient_parts(self, slot: Slot) -> Iterator[tuple[slice, Gradient]]:
        """A parameter's gradient, part by part: what was accumulated may lie on disk."""
        dtype = getattr(torch, slot.scheme.master_dtype)
        for where, earlier in self.parts(slot, GRAD32):
            last = slot.flat(slot.own)[where] if slot.over_own else None
            yield where, Gradient(earlier, None, dtype) if last is None else Gradient(last, earlier, dtype)

    def _round_master(self, slot: Slot) -> None:
        """Put the rounded master over whatever lies there."""
        self.have_own(slot)  # in memory, and read by no copy in flight: making room for a list may have evicted it
        payload = slot.flat(slot.own)
        for where, part in self.parts(slot, PARAM32):
            copy_rounded(part, payload[where])

    def _restore_own(self, slot: Slot) -> None:
        """Have the parameter again where a gradient lies over this process's part."""
        master = self.manager[PARAM32, slot.place.chunk]
        self._round_master(slot)
        self._count(master, slot.own, slot.place.numel * slot.own.dtype.itemsize)
        self.manager.mark_written(slot.own, on_device=slot.own.device_valid)

    def _accumulate(self, slot: Slot) -> None:
        """Add the gradient over a parameter to the gradient list, whose chunk is made when it is first needed."""
        index = slot.place.chunk
        self._have_list(slot)
        self.have_own(slot)  # again: making room for the list may have evicted it
        self._count(slot.own, self.manager[GRAD32, index], slot.place.numel * slot.own.dtype.itemsize)
        self._add_to_list(slot, slot.flat(slot.own))

    def _have_list(self, slot: Slot) -> None:
        """Have a chunk of the gradient list for a parameter."""
        index = slot.place.chunk
        if (GRAD32, index) not in self.manager.chunks:
            beside = self.manager[PARAM32, index]
            self.manager.new_chunk(GRAD32, index, beside.numel, slot.scheme.master_dtype, self._list_tier(beside))

    def _list_tier(self, beside: Chunk) -> Tier:
        """Where a chunk of the gradient list is made: where the masters lie."""
        tier = Tier.DEVICE if beside.device_valid else Tier.HOST if beside.host_valid else Tier.DISK
        if tier is Tier.HOST and self.manager.disk is not None and beside.nbytes > self.manager.host.free_bytes:
            tier = Tier.DISK
        return tier

    def _add_to_list(self, slot: Slot, grad: torch.Tensor) -> None:
        """Add a gradient to the gradient list."""
        self._have_list(slot)
        for where, total in self.parts(slot, GRAD32, write=True):
            if slot.in_list:
                total.add_(grad[where].to(total.device, total.dtype))
            else:
                total.copy_(grad[where])
        slot.in_list = True
