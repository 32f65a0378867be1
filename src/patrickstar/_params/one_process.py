"""Gradients of a process that shares its chunks with no other: stored in place of their parameters (§6.2, Figure 7)."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from patrickstar._hardware.transfer import Transfer
from patrickstar._layout.schema import GRAD32, PARAM16, PARAM32
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam, check_not_updated
from patrickstar._params.param_values import follow_written
from patrickstar._params.row_gradient import RowGradient
from patrickstar._schedule.coordination import Request
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, ModelError, TrainingError


class OneProcess:
    """Sharing of chunks with no other process. Has the interface of `SeveralProcesses`."""

    comm = None
    batches = 1
    written: frozenset[Chunk] = frozenset()

    def __init__(self, shards: LocalShards) -> None:
        self.shards, self.manager = shards, shards.manager
        self._leaving: deque[tuple[Transfer, torch.Tensor]] = deque()
        """Copies to the host of the last gradients beside their parameters, and these on the device."""

    # Operators

    def restore_params(self, managed_params: Sequence[ManagedParam]) -> None:
        """Move out gradients that are stored in place of these parameters, and restore the parameters."""
        for managed in managed_params:
            if managed.state.overlays_param:
                self._move_out_gradient(managed)

    def _move_out_gradient(self, managed: ManagedParam) -> None:
        """Move a gradient out of its parameter's chunk, and restore the parameter.

        The rounded master has the same bits as the parameter had, so the version counter is reset too: saved tensors
        of autograd are valid again. A gradient of an earlier backward is added to the gradient list; one of the
        running backward may still grow and is kept apart until that backward ends.
        """
        if may_grow := self.shards.in_backward and managed.state.backward_id == self.shards.backward_id:
            managed.state.may_grow = True
        self.shards.check_restorable(managed)
        self.ensure_in_memory(managed)
        if may_grow:
            managed.state.keep_partial(managed.payload().clone())
        else:
            self.shards.list_gradient(managed)
        self._restore(managed)

    def _restore(self, managed: ManagedParam) -> None:
        self.shards.restore_own(managed)
        torch._C._autograd._unsafe_set_version_counter((managed.param,), (managed.state.version_before,))
        managed.state.remove_overlay()
        managed.show_values()

    def on_in_place_write(
        self, managed: ManagedParam, values: torch.Tensor | None = None, before: torch.Tensor | None = None
    ) -> None:
        """Update the master after an in-place write to a parameter by the user.

        Args:
            values: The written values in full precision, if they are known.
            before: With a split master, a copy of the parameter before the write.

        Raises:
            ModelError: The master is split, and neither is known.
        """
        self.shards.check_writable(managed)
        self.shards.before_update(managed.location.chunk)
        self.manager.mark_written(managed.chunk, on_device=managed.chunk.device.valid)
        if not managed.schema.trained:
            return
        if managed.schema.gradients_beside and values is None and before is None:
            raise ModelError(
                f"parameter {managed.name!r} was written in place by a function that PatrickStar does not know as one "
                f"that writes, and its old value is needed with update=ps.InBackward(): write it by a method of "
                f"torch.Tensor, such as copy_(), or load a checkpoint and leave that option out"
            )
        self.shards.count_transfer(managed, managed.chunk, self.shards.chunk_of(managed, PARAM32))
        written = managed.flat(managed.chunk) if values is None else managed.flattened(values)
        old = None if before is None else managed.flattened(before)
        for where, part in self.shards.parts(managed, PARAM32, write=True):
            earlier = None if old is None else old[where]
            follow_written(part, written[where], exactly=values is not None, before=earlier)

    def ensure_in_memory(self, managed: ManagedParam) -> None:
        """Ensure that a parameter's chunk is in memory and writable."""
        self.manager.ensure_in_memory(managed.chunk)
        self.shards.update_param_views()

    # Gradients

    def accept_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient) -> None:
        """Store a complete gradient in place of its parameter.

        Reentrant checkpointing completes a gradient several times in one backward; as in plain PyTorch these are added
        in the compute dtype. Gradients of earlier backwards are accumulated in the gradient list.
        """
        state, shards = managed.state, self.shards
        if shards.in_backward and state.updated_in_backward == shards.backward_id:
            check_not_updated((managed,), shards.backward_id)
        if state.partial is not None:
            state.partial.add_(grad.to_dense())
            return
        lists = shards.lists_gradients or (shards.in_backward and state.may_grow)
        if managed.schema.gradients_beside or (lists and state.late and not state.overlays_param):
            self._list_at_once(managed, grad.to_dense())
            return
        grows = state.overlays_param and state.backward_id == shards.backward_id
        if state.overlays_param and not grows:
            self._move_out_gradient(managed)
        version = managed.param._version
        self._write_gradient(managed, grad, add=grows)
        state.overlay(shards.backward_id, version)
        managed.set_data(managed.absent_view)
        if self.manager.timeline is not None:
            self.manager.timeline.holds_gradients(managed.location.chunk, True)

    def _list_at_once(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Add a gradient to the gradient list.

        One that may grow is added to a list in fp32 once its backward has ended, and to one in the compute dtype as
        often as it grows: as in plain PyTorch.
        """
        state, shards = managed.state, self.shards
        if shards.in_backward and state.may_grow and not managed.schema.gradients_beside:
            state.keep_partial(grad.clone())
            return
        if state.listed_in == shards.backward_id:
            state.may_grow = True
            shards.check_restorable(managed)
        elif managed.schema.gradients_beside and state.accumulated:
            raise TrainingError(
                f"parameter {managed.name!r} got a gradient in a second backward before optimizer.step(), and "
                f"update=ps.InBackward() in ps.Config promises one backward for each step: leave it out to accumulate "
                f"gradients"
            )
        shards.ensure_list(managed)
        chunk, on_device = self.manager[GRAD32, managed.location.chunk], grad.device.type == self.manager.device.type
        flat, first = managed.flattened(grad), managed.schema.gradients_beside and not state.accumulated
        if first and shards.is_computed_on_device(chunk, on_device=on_device):
            self._start_to_leave(managed, flat, chunk)
        else:
            shards.add_to(chunk, managed, flat, on_device=on_device)
        state.listed_in = shards.backward_id

    def _start_to_leave(self, managed: ManagedParam, grad: torch.Tensor, chunk: Chunk) -> None:
        """Start to copy a gradient to its list on the host, beside operators.

        Those whose copies may not have ended stay on the device, up to the bytes of two chunks: one is copied while
        another one is computed.
        """
        self._end_copies(2 * chunk.nbytes - grad.nbytes)
        target = managed.flat(chunk, in_order=True)
        copy = chunk.host.writer = self.manager.io_dispatch.copy_part(target, grad, repr(chunk), to_device=False)
        self._leaving.append((copy, grad))
        self.manager.mark_written(chunk, on_device=False)
        managed.state.accumulated = True

    def _end_copies(self, nbytes: int) -> None:
        """Let the device's later work wait for copies of gradients, whose memory it may use, until so many are left."""
        while self._leaving and sum(grad.nbytes for _, grad in self._leaving) > nbytes:
            copy, grad = self._leaving.popleft()
            self.manager.io_dispatch.order(copy)
            del grad  # not before

    def _write_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient, add: bool) -> None:
        """Write a gradient over its parameter; fetch its chunk from disk, or write page by page if there is no room."""
        if not managed.chunk.held:
            with suppress(BudgetError):
                self.ensure_in_memory(managed)
        if managed.chunk.in_memory:
            managed.write_over(grad, add=add)
            self.manager.mark_written(managed.chunk, on_device=managed.chunk.device.valid)
            return
        flat = managed.flattened(grad.to_dense())
        for part_slice, part in self.shards.parts(managed, PARAM16, write=True):
            part.add_(flat[part_slice].to(part.device)) if add else part.copy_(flat[part_slice])
        torch.autograd.graph.increment_version(managed.param)

    def discard_gradients(self) -> None:
        """Discard all gradients, and restore the parameters that they replaced."""
        for managed in [each for each in self.shards.managed_params if each.state.has_any_gradient]:
            self.discard_gradient(managed)

    def discard_gradient(self, managed: ManagedParam) -> None:
        """Discard the gradient of a parameter, unless its deferred update is unfinished."""
        if managed.state.update_pending:
            return
        if managed.state.overlays_param:
            self.ensure_in_memory(managed)
            self._restore(managed)
        managed.state.discard_moved()

    def finish_backward(self) -> None:
        """Let the device's later work wait for the copies of the last gradients."""
        self._end_copies(0)

    # There is nothing to do without other processes

    def reduce_idle(self, protect: Sequence[Chunk]) -> bool:
        return False

    def drop_written(self) -> None: ...

    def end_window(self, managed_params: Sequence[ManagedParam]) -> None: ...

    def gradients_are_reduced(self, index: int) -> bool:
        return True

    def synchronize_processes(self, want: Request) -> None: ...

    def synchronize_gradients(self, want: Request) -> None: ...

    def synchronize_to_drop(self) -> bool:
        return any(managed.state.has_any_gradient for managed in self.shards.managed_params)

    def collective_section(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close_step(self, updated: Collection[ManagedParam], *, late: bool) -> None: ...

    def drop_gathered(self, indices: Iterable[int] | None = None) -> None: ...

    def share_optimizer_extra(self) -> None: ...

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None: ...
