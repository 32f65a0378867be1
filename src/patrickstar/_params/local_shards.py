"""The lists of which this process has its part: parameters, masters, states and gradients, in memory or on disk."""

from collections.abc import Iterator

import torch

from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.update_rule import Gradient
from patrickstar._layout.schema import GRAD32, PARAM32
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.managed_param import ManagedParam
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


class LocalShards:
    """Reads and writes a slot's part of each list, wherever it lies."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager

    def update_param_views(self) -> None:
        """Chunks may have moved."""

    def parts(
        self, managed: ManagedParam, kind: str, *, write: bool = False, within: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """A parameter's elements of one list, in a row: in memory all at once, of what lies on disk a page at a time.

        Each part comes with its place among the parameter's elements. With `write` parts are written back. `within`:
        of these elements alone.
        """
        first, stop = (0, managed.location.numel) if within is None else (within.start, within.stop)
        chunk = self.manager[kind, managed.location.chunk]
        self.manager.transfers.wait_idle(chunk)
        self.update_param_views()
        if chunk.in_memory:
            yield slice(first, stop), managed.flat(chunk)[first:stop]
            if write:
                self.manager.mark_written(chunk, on_device=chunk.device_valid)
            return
        offset = managed.location.offset
        for at, page in self.manager.io_dispatch.pages_of(chunk, offset + first, stop - first, write):
            begin, end = max(at, offset + first), min(at + page.numel(), offset + stop)
            yield slice(begin - offset, end - offset), page[begin - at : end - at]

    def gradient(self, managed: ManagedParam) -> Gradient:
        """A parameter's gradient where it lies. Its two parts, if there are two, may lie on two tiers."""
        dtype = getattr(torch, managed.schema.master_dtype)
        if not managed.in_grad_list:
            return Gradient(managed.flat(managed.shard_chunk), None, dtype)
        earlier = managed.flat(self.manager[GRAD32, managed.location.chunk])
        if not managed.overlays_shard:
            return Gradient(earlier, None, dtype)
        return Gradient(managed.flat(managed.shard_chunk), earlier, dtype)

    @defer_sigint
    def give_up(self, managed: ManagedParam) -> None:
        """An update failed on the way: what lies over the parameter may be anything, and becomes the rounded master."""
        self._round_master(managed)
        torch.autograd.graph.increment_version(managed.param)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device_valid)
        managed.overlays_param, managed.in_grad_list, managed.partial_grad, managed.update_pending = (
            False,
            False,
            None,
            False,
        )
        managed.reduced = False
        if managed.uses == 0:
            managed.move_to(TensorState.HOLD)

    @defer_sigint
    def follow_master(self, managed: ManagedParam) -> None:
        """A master, or a frozen parameter, was replaced: the parameter is what it rounds to."""
        torch.autograd.graph.increment_version(managed.param)
        if managed.schema.trained and managed.location.numel:
            self._round_master(managed)
            self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device_valid)

    def _count(self, source: Chunk, target: Chunk, nbytes: int) -> None:
        if source.device_valid != target.device_valid and source.in_memory and target.in_memory:
            self.manager.count_transfer(nbytes, to_device=target.device_valid)

    @defer_sigint
    def ensure_local(self, managed: ManagedParam) -> None:
        """The same of the chunk that has this process's part."""
        self.manager.ensure_in_memory(managed.shard_chunk)
        self.update_param_views()

    def gradient_on_disk(self, managed: ManagedParam) -> bool:
        """Whether a part of a parameter's gradient has to be read from disk, as `gradient_parts` does."""
        return managed.in_grad_list and not self.manager[GRAD32, managed.location.chunk].in_memory

    def gradient_parts(self, managed: ManagedParam) -> Iterator[tuple[slice, Gradient]]:
        """A parameter's gradient, part by part: what was accumulated may lie on disk."""
        dtype = getattr(torch, managed.schema.master_dtype)
        for where, earlier in self.parts(managed, GRAD32):
            last = managed.flat(managed.shard_chunk)[where] if managed.overlays_shard else None
            yield where, Gradient(earlier, None, dtype) if last is None else Gradient(last, earlier, dtype)

    def _round_master(self, managed: ManagedParam) -> None:
        """Put the rounded master over whatever lies there."""
        self.ensure_local(
            managed
        )  # in memory, and read by no copy in flight: making room for a list may have evicted it
        payload = managed.flat(managed.shard_chunk)
        for where, part in self.parts(managed, PARAM32):
            copy_rounded(part, payload[where])

    def _restore_own(self, managed: ManagedParam) -> None:
        """Have the parameter again where a gradient lies over this process's part."""
        master = self.manager[PARAM32, managed.location.chunk]
        self._round_master(managed)
        self._count(master, managed.shard_chunk, managed.location.numel * managed.shard_chunk.dtype.itemsize)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device_valid)

    def _accumulate(self, managed: ManagedParam) -> None:
        """Add the gradient over a parameter to the gradient list, whose chunk is made when it is first needed."""
        index = managed.location.chunk
        self._ensure_list(managed)
        self.ensure_local(managed)  # again: making room for the list may have evicted it
        self._count(
            managed.shard_chunk,
            self.manager[GRAD32, index],
            managed.location.numel * managed.shard_chunk.dtype.itemsize,
        )
        self._add_to_list(managed, managed.flat(managed.shard_chunk))

    def _ensure_list(self, managed: ManagedParam) -> None:
        """Have a chunk of the gradient list for a parameter."""
        index = managed.location.chunk
        if (GRAD32, index) not in self.manager.chunks:
            beside = self.manager[PARAM32, index]
            self.manager.new_chunk(
                GRAD32, index, beside.numel, managed.schema.master_dtype, self._grad_list_tier(beside)
            )

    def _grad_list_tier(self, beside: Chunk) -> Tier:
        """Where a chunk of the gradient list is made: where the masters lie."""
        tier = Tier.DEVICE if beside.device_valid else Tier.HOST if beside.host_valid else Tier.DISK
        if (
            tier is Tier.HOST
            and self.manager.disk_tier is not None
            and beside.nbytes > self.manager.host_tier.free_bytes
        ):
            tier = Tier.DISK
        return tier

    def _add_to_list(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Add a gradient to the gradient list."""
        self._ensure_list(managed)
        for where, total in self.parts(managed, GRAD32, write=True):
            if managed.in_grad_list:
                total.add_(grad[where].to(total.device, total.dtype))
            else:
                total.copy_(grad[where])
        managed.in_grad_list = True
