"""Access to this rank's shards of the chunk lists: parameters, masters, optimizer states and gradients."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.process_group import Processes
from patrickstar._hardware.storage_guard import refuse_access, storage_guard
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.update_rule import Gradient
from patrickstar._layout.schema import BUFFERED16, DELAYED16, GRAD32, ITEMSIZE, LOW16, PARAM32
from patrickstar._params.device_arithmetic import add_gradient, round_to_device
from patrickstar._params.managed_param import ManagedParam, refusal
from patrickstar._params.split_lists import restored_parts
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import TrainingError

# [Note: placeholders]
# The user's Parameter views its chunk's storage while its values are there. When the chunk is evicted, or a gradient is
# written over the values, the Parameter gets a placeholder of the same shape that expands a single NaN. Operators never
# see it, since they are intercepted first; code that bypasses interception gets an error that names the parameter, by
# the flag of the placeholder's storage ([Note: storages that refuse to be read]), or NaN where there is no such flag.


def copy_rounded(master: torch.Tensor, payload: torch.Tensor) -> None:
    """Round `master` into `payload` with the same bits as an update; round before a copy between devices."""
    if master.device == payload.device:
        round_into(payload, master)
    else:
        payload.copy_(canonical_nan_(master.to(payload.dtype, copy=True)))


class LocalShards:
    """Managed parameters of one engine, and this rank's shards of their chunk lists, on any tier."""

    def __init__(self, manager: ChunkManager, tracer: Tracer, world: Processes) -> None:
        self.manager, self.tracer, self.world = manager, tracer, world
        self.managed_params: list[ManagedParam] = []
        self.by_chunk: dict[int, list[ManagedParam]] = {}
        self.in_backward = False
        self.backward_id = self.backwards_in_step = 0
        self.more_backwards = False
        """True if further backwards follow the last one before the step."""
        self.accumulates = False
        """True if the last step had several backwards."""
        self.lists_gradients = False
        """True if gradients of delayed parameters go to the gradient list. See [Note: delayed updates]."""
        self.reads: dict[int, Transfer] = {}
        """Reads of masters, states and frozen parameters by a checkpoint in progress, by chunk index."""
        self.closed = False
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}

    def add(self, managed: ManagedParam) -> None:
        """Register a parameter whose values are already in its chunk."""
        self.managed_params.append(managed)
        self.by_chunk.setdefault(managed.location.chunk, []).append(managed)
        managed.state.hold = TensorState.HOLD
        self._prepare_refusals(managed)
        managed.show_values()

    def update_param_views(self) -> None:
        """Point the Parameters of moved chunks at their device memory, or at a placeholder after eviction."""
        if self.manager.moved:
            self._update_param_views()

    def _update_param_views(self) -> None:
        moved = list(self.manager.moved)
        self.manager.moved.clear()
        self.set_param_views(moved)

    def set_param_views(self, chunks: Iterable[Chunk]) -> None:
        """Point the Parameters of `chunks` at the current memory of these; do nothing once the engine is closed."""
        for chunk in () if self.closed else chunks:
            for managed in self.by_chunk.get(chunk.index, ()):
                if managed.chunk is chunk:
                    managed.show_values()

    def _prepare_refusals(self, managed: ManagedParam) -> None:
        """Create a parameter's placeholder, and the errors of native code that reads it or views of its chunk."""
        names = [each.name for each in self.by_chunk[managed.location.chunk]]
        managed.chunk.refusal = refusal(names, whole=False)
        if storage_guard() is None:
            managed.absent_view = self.placeholder(managed.chunk.dtype).expand(managed.shape)
            return
        one = torch.empty((), dtype=managed.chunk.dtype, device=self.manager.device)
        managed.absent_view = one.expand(managed.shape)
        if self.manager.hardware.has_gpu:
            one.untyped_storage().resize_(0)  # otherwise each parameter takes a block of its allocator
        refuse_access(one.untyped_storage(), refusal([managed.name], whole=True))

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        """Return one element that stands for values that are lost or absent: NaN, or zero for integers."""
        if dtype not in self._placeholders:
            fill = float("nan") if dtype.is_floating_point else 0
            self._placeholders[dtype] = torch.full((), fill, dtype=dtype, device=self.manager.device)
        return self._placeholders[dtype]

    def parts(
        self, managed: ManagedParam, kind: str, *, write: bool = False, within: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield this rank's elements of a parameter in list `kind`: one part if in memory, page by page from disk.

        Each part is yielded with its slice of the shard's elements. `write`: write the parts back. `within`: yield
        only these elements.
        """
        if managed.restores(kind):
            whole = slice(0, managed.location.numel)
            yield from restored_parts(self, managed, kind, write, whole if within is None else within)
        else:
            yield from self.stored_parts(managed, kind, write=write, within=within)

    def stored_parts(
        self, managed: ManagedParam, kind: str, *, write: bool = False, within: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield elements as `parts` does, as they are stored: with the marks of ties, if masters are split."""
        first, stop = (0, managed.location.numel) if within is None else (within.start, within.stop)
        chunk = self.manager[kind, managed.location.chunk]
        self.manager.transfers.settle(chunk)
        self.update_param_views()
        if chunk.in_memory:
            yield slice(first, stop), managed.flat(chunk)[first:stop]
            if write:
                self.manager.mark_written(chunk, on_device=chunk.device.valid)
            return
        offset = managed.location.offset
        for page_start, page in self.manager.io_dispatch.pages_of(chunk, offset + first, stop - first, write):
            begin, end = max(page_start, offset + first), min(page_start + page.numel(), offset + stop)
            yield slice(begin - offset, end - offset), page[begin - page_start : end - page_start]

    def chunk_of(self, managed: ManagedParam, kind: str) -> Chunk:
        """Return the chunk of a list of this rank; of split masters that of the lower halves."""
        splits = kind == PARAM32 and managed.schema.splits
        return self.manager[LOW16 if splits else kind, managed.location.chunk]

    def dtype_of(self, managed: ManagedParam, kind: str) -> torch.dtype:
        """Return the dtype of the elements of a list, as `parts` yields them."""
        return managed.full_dtype if kind == managed.full_kind else self.chunk_of(managed, kind).dtype

    def before_update(self, index: int) -> None:
        """Let a checkpoint in progress end its reads of masters, states or frozen parameters, which will change."""
        if (reads := self.reads.pop(index, None)) is not None:
            reads.wait()

    def optimizer_chunks(self, index: int) -> list[Chunk]:
        """Return the chunks of one index that only the update uses, in the order of the parameter schema."""
        return [self.manager[spec.kind, index] for spec in self.by_chunk[index][0].schema.optimizer_lists]

    def state_chunks(self, index: int) -> list[Chunk]:
        """Return the chunks of the masters and optimizer states of one index, in the order of the parameter schema."""
        return [self.manager[spec.kind, index] for spec in self.by_chunk[index][0].schema.state_lists]

    def gradient_sums(self, index: int) -> list[Chunk]:
        """Return the chunk of accumulated gradients of an index, if there is one."""
        sums = self.manager.chunks.get((GRAD32, index))
        return [] if sums is None else [sums]

    def add_gradient_list(self, managed: ManagedParam, tier: Tier) -> Chunk:
        """Allocate the gradient-list chunk of a parameter."""
        numel = self.state_chunks(managed.location.chunk)[0].numel
        return self.manager.new_chunk(GRAD32, managed.location.chunk, numel, managed.schema.gradient_dtype, tier)

    def free_gradients(self, index: int) -> None:
        """Wait for the update of gradients beside their parameters, and free them unless there are new ones."""
        for managed in self.by_chunk.get(index, ())[:1]:
            managed.shard_chunk.complete_update()
        if not any(managed.state.accumulated for managed in self.by_chunk.get(index, ())):
            for chunk in self.gradient_sums(index):
                self.manager.remove(chunk)

    def scale_gradient(self, managed: ManagedParam, scales: Sequence[float]) -> None:
        """Write a parameter's gradient, with the accumulated part and scaled, into the gradient list on the host."""
        self.ensure_local(managed)
        scaled, sums = self.gradient(managed).together().scaled(scales), self.manager[GRAD32, managed.location.chunk]
        managed.flat(sums).copy_(scaled)
        self.count_transfer(managed, managed.shard_chunk, sums)
        self.manager.mark_written(sums, on_device=False)

    def gradient(self, managed: ManagedParam, *, in_order: bool = False) -> Gradient:
        """Return a parameter's gradient without moving it. Its accumulated part may be on another tier.

        `in_order`: see `Chunk.flat`.
        """
        dtype = getattr(torch, managed.schema.master_dtype)
        if not managed.state.accumulated:
            return Gradient(managed.flat(managed.shard_chunk, in_order=in_order), None, dtype)
        earlier = managed.flat(self.manager[GRAD32, managed.location.chunk], in_order=in_order)
        if not managed.overlays_shard:
            return Gradient(earlier, None, dtype)
        return Gradient(managed.flat(managed.shard_chunk, in_order=in_order), earlier, dtype)

    def end_update(self, managed_params: Collection[ManagedParam]) -> None:
        """Mark parameters whose gradients an update has replaced by new values."""
        torch.autograd.graph.increment_version([managed.param for managed in managed_params])
        timeline = self.manager.timeline
        for managed in managed_params:
            managed.state.consume()
            managed.show_values()
            if timeline is not None:
                timeline.holds_gradients(managed.location.chunk, False)

    def give_up(self, managed: ManagedParam) -> None:
        """Restore the parameter from its master after a failed update, and drop its gradient."""
        self._round_master(managed)
        torch.autograd.graph.increment_version(managed.param)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
        managed.steps -= managed.state.update_pending
        managed.state.consume()
        managed.show_values()

    def follow_master(self, managed: ManagedParam) -> None:
        """Round the parameter from its replaced master; a frozen parameter only gets a new version."""
        torch.autograd.graph.increment_version(managed.param)
        if managed.schema.trained and managed.location.numel:
            self._round_master(managed)
            self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)

    def count_transfer(self, managed: ManagedParam, source: Chunk, target: Chunk) -> None:
        nbytes = managed.location.numel * min(source.dtype.itemsize, target.dtype.itemsize)
        if source.device.valid != target.device.valid and source.in_memory and target.in_memory:
            self.manager.count_transfer(nbytes, to_device=target.device.valid)

    def ensure_local(self, managed: ManagedParam) -> None:
        """Ensure that the chunk with this rank's shard is in memory and writable."""
        self.manager.ensure_in_memory(managed.shard_chunk)
        self.update_param_views()

    def gradient_on_device(self, managed: ManagedParam) -> bool:
        """Return whether a parameter's gradient is on the device, the accumulated part included, and is not leaving."""
        chunks = [managed.shard_chunk] if managed.overlays_shard or not managed.state.accumulated else []
        if managed.state.accumulated:
            chunks.append(self.manager[GRAD32, managed.location.chunk])
        return all(chunk.device.present and chunk.device.reader is None for chunk in chunks)

    def gradient_on_disk(self, managed: ManagedParam) -> bool:
        """Return whether the accumulated gradient is on disk, so that `gradient_parts` must be used."""
        return managed.state.accumulated and not self.manager[GRAD32, managed.location.chunk].in_memory

    def gradient_parts(self, managed: ManagedParam) -> Iterator[tuple[slice, Gradient]]:
        """Yield a parameter's gradient in parts; the accumulated gradient may be on disk."""
        dtype = getattr(torch, managed.schema.master_dtype)
        for part_slice, earlier in self.parts(managed, GRAD32):
            last = managed.flat(managed.shard_chunk)[part_slice] if managed.overlays_shard else None
            yield part_slice, Gradient(earlier, None, dtype) if last is None else Gradient(last, earlier, dtype)

    def agree_on_steps(self) -> None:
        """Let each parameter have as many updates as that of its parts, on any rank, which has had most."""
        own = [managed.steps if managed.location.numel else 0 for managed in self.managed_params]
        rows = self.world.all_gather(torch.tensor(own, device="cpu"))
        for managed, steps in zip(self.managed_params, rows.amax(0).tolist(), strict=True):
            managed.steps = steps or managed.steps

    def write_gradient(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        """Replace the gradient of this rank's shard, in one place or two, by `flat`."""
        if not managed.has_gradient:
            return
        if managed.overlays_shard:
            self.ensure_local(managed)
            payload = managed.flat(managed.shard_chunk)
            payload.zero_() if managed.state.accumulated else payload.copy_(flat)
            self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
        if managed.state.accumulated:
            for part_slice, part in self.parts(managed, GRAD32, write=True):
                part.copy_(flat[part_slice])

    def _round_master(self, managed: ManagedParam) -> None:
        """Overwrite this rank's shard with the rounded master, unless it is a part of the master itself."""
        # Making room for a gradient list may have evicted the shard, and no copy in flight may still read it.
        self.ensure_local(managed)
        if managed.schema.splits:
            if not managed.schema.gradients_beside:
                self.renew(managed)
            return
        payload, master = managed.flat(managed.shard_chunk), self.manager[PARAM32, managed.location.chunk]
        if self.is_computed_on_device(master, on_device=managed.shard_chunk.device.valid):
            round_to_device(payload, managed.flat(master, in_order=True))
            master.host.reader = self.manager.io_dispatch.copies.issued(repr(master))
            self.manager.count_transfer(managed.location.numel * master.dtype.itemsize, to_device=True)
            return
        for part_slice, part in self.parts(managed, PARAM32):
            copy_rounded(part, payload[part_slice])
        self.count_transfer(managed, master, managed.shard_chunk)

    def renew(self, managed: ManagedParam) -> None:
        """Overwrite this rank's shard, on its tier, with the newest values of a parameter with lock-free updates."""
        newest = self.manager[BUFFERED16, managed.location.chunk]
        for part, values in self.stored_parts(managed, managed.shard_chunk.kind, write=True):
            values.copy_(managed.flat(newest)[part])
        self.count_transfer(managed, newest, managed.shard_chunk)

    def is_computed_on_device(self, listed: Chunk, *, on_device: bool) -> bool:
        """Return whether the device computes on `listed`, beside values that are on the device or on the host.

        See [Note: lists on the host beside an accelerator].
        """
        self.manager.transfers.settle(listed, in_order=True)
        on_host = listed.host.valid and not listed.device.present
        return on_host and on_device and self.manager.hardware.has_gpu

    def restore_own(self, managed: ManagedParam) -> None:
        """Restore the parameter where a gradient is stored in place of this rank's shard."""
        self.check_restorable(managed)
        self._round_master(managed)
        self.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)

    @staticmethod
    def check_restorable(managed: ManagedParam) -> None:
        """Raise TrainingError if a gradient has replaced the only copy of a parameter. See [Note: delayed updates]."""
        if managed.state.late:
            raise TrainingError(
                f"parameter {managed.name!r} is read again after its gradient has replaced it, or the gradient is "
                f"changed, while its update is late (update=... in ps.Config): its old values are gone. For several "
                f"backwards per step call "
                f"engine.backward(loss, accumulate=True) for all but the last one; before any other use call "
                f"optimizer.flush() or optimizer.step()"
            )

    def check_writable(self, managed: ManagedParam) -> None:
        """Raise TrainingError if a parameter was written in place while newer values of it exist."""
        if managed.state.late:
            raise TrainingError(
                f"parameter {managed.name!r} was written in place while newer values of it exist, or are being "
                f"computed (update=... in ps.Config): the next step will replace what was written; call "
                f"optimizer.flush() before"
            )
        self._complete_delayed(managed)

    def _complete_delayed(self, managed: ManagedParam) -> None:
        """Wait for the delayed update of a parameter, which may read the gradient list, if there is one."""
        if (delayed := self.manager.chunks.get((DELAYED16, managed.location.chunk))) is not None:
            delayed.complete_update()

    def list_gradient(self, managed: ManagedParam) -> None:
        """Add the gradient stored in place of a parameter to the gradient list."""
        self.ensure_list(managed)
        self.ensure_local(managed)  # making room for the list may have evicted it
        self.add_to_list(managed, managed.shard_chunk)

    def ensure_list(self, managed: ManagedParam) -> None:
        """Allocate the gradient-list chunk of a parameter if needed."""
        if (GRAD32, managed.location.chunk) not in self.manager.chunks:
            self.add_gradient_list(managed, self.grad_list_tier(managed))

    def grad_list_tier(self, managed: ManagedParam) -> Tier:
        """Return the tier for a gradient-list chunk: the masters' tier, or disk if the host has no room.

        With several processes one that needs no eviction, since an eviction may wait for other ranks.
        """
        master_chunk = self.chunk_of(managed, PARAM32)
        nbytes = master_chunk.numel * ITEMSIZE[managed.schema.gradient_dtype]
        if master_chunk.device.valid:
            cache = self.manager.cache
            limit_bytes = 0 if cache.evict_everything else cache.device_tier.soft_chunkable_bytes - cache.queued_bytes
            # Whether there are earlier gradients differs between linked processes.
            waits = managed.chunk.sharded or managed.schema.gradients_beside
            if not waits or (not cache.decides_alike and cache.finish_evictions(nbytes, limit_bytes)):
                return Tier.DEVICE
        host = self.manager.host_tier
        if managed.schema.gradients_beside:
            return Tier.HOST if self.manager.disk_tier is None or host.has_room(nbytes) else Tier.DISK
        fits = self.manager.disk_tier is None or nbytes <= host.free_bytes
        return Tier.HOST if master_chunk.in_memory and fits else Tier.DISK

    def add_to_list(self, managed: ManagedParam, source: Chunk) -> None:
        """Add a parameter's gradient, which is in `source`, to the gradient list."""
        self.ensure_list(managed)
        chunk = self.manager[GRAD32, managed.location.chunk]
        self.add_to(chunk, managed, managed.flat(source), on_device=source.device.valid)

    def add_to(self, chunk: Chunk, managed: ManagedParam, grad: torch.Tensor, *, on_device: bool) -> None:
        """Add the elements of a gradient, which is on the device or on the host, to a chunk of the gradient list."""
        if not managed.state.accumulated:
            self._complete_delayed(managed)
        if self.is_computed_on_device(chunk, on_device=on_device):
            if chunk.host.writer is not None:  # it may be on a stream of its own
                self.manager.io_dispatch.order(chunk.host.writer)
            add_gradient(managed.flat(chunk, in_order=True), grad, first=not managed.state.accumulated)
            chunk.host.writer = self.manager.io_dispatch.copies.issued(repr(chunk))
            nbytes = managed.location.numel * chunk.dtype.itemsize
            self.manager.count_transfer(nbytes, to_device=False)
            if managed.state.accumulated:
                self.manager.count_transfer(nbytes, to_device=True)
            self.manager.mark_written(chunk, on_device=False)
        else:
            if on_device != chunk.device.valid and chunk.in_memory:
                nbytes = managed.location.numel * min(grad.element_size(), chunk.dtype.itemsize)
                self.manager.count_transfer(nbytes, to_device=chunk.device.valid)
            for part_slice, total in self.parts(managed, GRAD32, write=True):
                if managed.state.accumulated:
                    total.add_(grad[part_slice].to(total.device, total.dtype))
                else:
                    total.copy_(grad[part_slice])
        managed.state.accumulated = True
