"""Fetch an operator's parameters before it runs, and again before its backward. See [Note: backward windows]."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import functional as F

from patrickstar._autograd.addresses import hold_for_address
from patrickstar._autograd.data_attribute import DataAttribute
from patrickstar._autograd.embedding_lookup import can_look_up_on_host, embedding_lookup
from patrickstar._autograd.engine_closer import EngineCloser
from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._autograd.param_attributes import WRITERS, GradientAttribute, check_written_precision, copied_in_full
from patrickstar._autograd.rounded_copies import MOVING, rounded_copy
from patrickstar._autograd.timed_product import TimedProduct
from patrickstar._autograd.transforms import run_on_copies
from patrickstar._autograd.windows import GraphSnapshot, HiddenNodes, Window
from patrickstar._checkpoint.background_save import BackgroundSave
from patrickstar._distributed.param_sharding import local_part
from patrickstar._hardware.sigint_gate import deferring_sigint, interruptible, managing
from patrickstar._params.interception import adopt_parameter, adopt_view
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.memory_functions import (
    EXPOSING,
    REPLACING,
    RESHAPING,
    UNVERSIONED,
    expose,
    versioned,
    written_by,
)
from patrickstar._params.model_data import ModelData
from patrickstar._params.out_of_memory import check_retry, run_again, saved_by_checkpoint
from patrickstar._params.precision import tensors_in
from patrickstar._params.split_lists import values_before
from patrickstar._params.tensor_subclass import (
    ADDRESSES,
    all_managed_params,
    descriptor,
    detached_view,
    managed_param_of,
)
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._step.full_state import FullState
from patrickstar._step.gradients import Gradients
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import BudgetError, DiskError, ModelError, MoveError

_GET_GRAD, _SET_GRAD = descriptor("grad").__get__, descriptor("grad").__set__
_GET_DATA, _SET_DATA = descriptor("data").__get__, descriptor("data").__set__
_ADD_HOOK = torch.Tensor.register_post_accumulate_grad_hook
_HOOKS_OF_SAVED = torch._C._autograd._top_saved_tensors_default_hooks
_FAILED: Any = object()
_SPECIAL = {torch.Tensor.view_as, _ADD_HOOK, _GET_GRAD, _SET_GRAD, _GET_DATA, _SET_DATA, torch.Tensor.detach}
_SPECIAL |= EXPOSING | UNVERSIONED | REPLACING | RESHAPING | ADDRESSES | MOVING


class Interceptor:
    """Intercepts operators on the parameters of one engine."""

    def __init__(
        self,
        data: ModelData,
        gradients: Gradients,
        optimizer_in_backward: OptimizerInBackward,
        full_state: FullState,
        background_save: BackgroundSave,
    ) -> None:
        self.data, self.background_save = data, background_save
        self.data_attribute = DataAttribute(full_state)
        self.gradient = GradientAttribute(gradients, optimizer_in_backward)
        self.optimizer_in_backward, self.full_state = optimizer_in_backward, full_state
        self.updates = optimizer_in_backward.optimizer_step.updates
        has_accelerator = self.data.manager.hardware.accelerator is not None
        self.lock = EngineLock(full_state.state.process, has_device_thread=has_accelerator)
        self.gradient_hooks = GradientHooks(gradients, optimizer_in_backward, self.lock)
        self.window: Window | None = None
        self.hidden_nodes = HiddenNodes()
        self._plain_backwards: dict[int, bool] = {}
        """Backwards that run outside of `engine.backward`, by number; True for those that hold the lock."""
        self.listed: dict[tuple[int, ManagedParam], torch.Tensor] = {}
        """Entries of the state dict that a module is about to fill, in a thread, by `detach`: it fetches nothing."""
        self.addressed: tuple[ManagedParam, ...] = ()
        """Parameters whose addresses were taken since the last operator. See [Note: addresses of parameters]."""
        parts = optimizer_in_backward, self.gradient_hooks, background_save, self.lock
        self.closer = EngineCloser(data, full_state.state, *parts)

    @property
    def in_backward(self) -> bool:
        """True while autograd runs, in `engine.backward` or otherwise."""
        return self.gradient_hooks.backward_depth > 0 or self.window is not None

    # Parameters

    def intercept(self, managed: ManagedParam) -> None:
        """Start to intercept a parameter's operators and its gradients."""
        adopt_parameter(managed, self)
        self.gradient_hooks.register(managed)

    # Operators

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Any], native: bool = False) -> Any:
        """Run an operator that takes managed tensors. `native`: native code has called it, and its node is not seen."""
        if outside := self.lock.owner != get_ident():
            self.lock.acquire(f"parameter {tensors[0]._managed_params[0].name!r}")
        try:
            if native and torch.is_grad_enabled() and not self.in_backward:
                self._note_hidden(all_managed_params(tensors), native=True)
            return self._operate(func, args, kwargs, tensors)
        except (DiskError, MoveError) as error:
            if not self.data.tracer.in_iteration_now:  # otherwise the engine's own call handles it
                self.closer.close_engine(error)
            raise
        finally:
            if outside:
                self.lock.release()

    def full_precision(self, managed: ManagedParam) -> torch.Tensor:
        """Return a host copy of a parameter in full precision; every process must call it."""
        with self.closer.close_on_data_loss():
            return self.full_state.read(managed, managed.full_kind)

    def _operate(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        managed_params: tuple[ManagedParam, ...] = tensors[0]._managed_params
        if len(tensors) > 1:
            managed_params = all_managed_params(tensors)
        if func in _SPECIAL:
            if func in ADDRESSES:
                hold_for_address(self, managed_params)
                return func(*args, **kwargs)
            if func is torch.Tensor.view_as:
                # A custom Function that returns its input, as `DTensor.from_local` does: the copy is not intercepted.
                func, args = (torch.Tensor.clone, args[:1]) if args[0] is args[1] else (func, args)
                return self._operate_plainly(func, args, kwargs, tensors, managed_params)
            if func in EXPOSING:
                copied = partial(self.operate, torch.Tensor.clone, args[:1], {}, tensors)
                return expose(func, f"parameter {managed_params[0].name!r}", copied, args[1:], kwargs)
            if func in MOVING:
                return rounded_copy(self._operate_plainly(func, args, kwargs, tensors, managed_params), args[0])
            if func in UNVERSIONED:
                return self._operate_plainly(versioned(func), args, kwargs, tensors, managed_params)
            if func in REPLACING or (func in RESHAPING and managed_param_of(args[0]) is not None):
                return self.data_attribute.replace(self, func, managed_params[0], args, kwargs)
            if func in RESHAPING:
                return self._operate_plainly(func, args, kwargs, tensors, managed_params)
            if func is _ADD_HOOK:
                return self.gradient_hooks.add_before(managed_params[0], args, kwargs)
            if func in (_GET_GRAD, _SET_GRAD, _SET_DATA):
                return self._operate_attribute(func, args, managed_params[0])
            key = get_ident(), managed_params[0]
            if key in self.listed and managed_param_of(tensors[0]) is not None:
                return self.listed.pop(key)
            return detached_view(self._operate_plainly(func, args, kwargs, tensors, managed_params))
        return self._operate_plainly(func, args, kwargs, tensors, managed_params)

    def _operate_plainly(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[Any],
        managed_params: tuple[ManagedParam, ...],
    ) -> Any:
        """Run an operator while its parameters are on the device."""
        if torch._C._are_functorch_transforms_active():
            return run_on_copies(func, args, kwargs, self._operate_plainly)
        if self.background_save.start is not None and not torch.is_grad_enabled():
            with managing():
                self.background_save.begin()  # before an in-place write, while nothing is pinned
        self.addressed = ()
        for managed in managed_params:
            if managed.on_host:
                if not can_look_up_on_host(func, args, kwargs, managed):
                    self.data.move_embedding_to_device(managed)
                elif managed.tied and self._has_copy(managed):
                    return embedding_lookup(args, kwargs, managed, self.data.manager, self.gradient_hooks, in_copy=True)
        if self.covers(managed_params):
            self.note(managed_params)
            out = self._run(func, args, kwargs, tensors, managed_params, held=True)
            if self.updates.queue.updates or self.optimizer_in_backward.speculation.assumption is not None:
                with managing():
                    self._progress()
            return out
        with deferring_sigint():
            suspended = self.access(managed_params)
            try:
                with interruptible():
                    out = self._run(func, args, kwargs, tensors, managed_params, held=False)
            except BaseException:
                self.end_uses(managed_params, suspended)
                raise
            self.end_operator(managed_params, suspended)
            return out

    def _has_copy(self, managed: ManagedParam) -> bool:
        """Finish a parameter's update; return whether its values are on the host, and no backward runs."""
        self.note((managed,))
        with managing():
            self.updates.complete((managed,))
        return managed.chunk.host.valid and not managed.state.overlays_param and not self.in_backward

    def _operate_attribute(self, func: Callable[..., Any], args: Sequence[Any], managed: ManagedParam) -> Any:
        """Read or assign `grad`, or assign `data`."""
        tensor = args[0]
        if func == _SET_DATA:
            return self.data_attribute.assign(self, tensor, args[1])
        # While autograd accumulates, the gradient is an ordinary tensor.
        if managed_param_of(tensor) is not None and (func != _GET_GRAD or tensor.grad is None):
            with managing():
                if func == _GET_GRAD:
                    return self.gradient.read(managed, self.closer)
                return self.gradient.assign(managed, tensor, args[1])
        return func(*args)

    def _run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[Any],
        managed_params: tuple[ManagedParam, ...],
        held: bool,
    ) -> Any:
        """Run an operator whose parameters are on the device; follow its in-place writes and its outputs."""
        # After the access: once its parameter was written, a view's node is made anew, from where the parameter is.
        before, copied = GraphSnapshot.now(args, kwargs), None
        if func in WRITERS:
            check_written_precision(func, args, tensors[0])
            if func is torch.Tensor.copy_:
                args, copied = copied_in_full(args)
        old = values_before(written_by(func, args, kwargs)) if self.optimizer_in_backward.always else {}
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        recorded = self.data.manager.timeline is not None
        timed = TimedProduct.begin(func, args, managed_params, self.data.manager) if recorded else None
        if func is F.embedding and managed_params[0].embedding:
            out = embedding_lookup(args, kwargs, managed_params[0], self.data.manager, self.gradient_hooks)
        else:
            hooks, out = _HOOKS_OF_SAVED(True), _FAILED
            saved = None if hooks is None else saved_by_checkpoint(hooks[0])
            try:
                out = func(*args, **kwargs)
            except RuntimeError as error:
                check_retry(error, func, managed_params[0], self.data.shards, saved)
            if out is _FAILED:  # not in the handler, where the error holds what the operator has allocated
                out = run_again(func, args, kwargs, managed_params[0], self.data.shards)
        if written := [
            t for t, version in zip(tensors, versions, strict=True) if version >= 0 and t._version != version
        ]:
            with managing():
                for managed in dict.fromkeys(managed for tensor in written for managed in tensor._managed_params):
                    self.data_attribute.follow(managed)
                    self.full_state.follow_write(managed, copied, old.get(managed))
        if func is not F.embedding:  # its backward reads only the indices
            self.track_outputs(out, managed_params, before, held)
        if timed is not None:  # after the hooks that open its window
            timed.end(out, before)
        return out

    def end_operator(self, managed_params: Sequence[ManagedParam], suspended: Window | None) -> None:
        """End an access, and the operator that it was for."""
        belongs = torch.is_grad_enabled() or self.in_backward
        with managing():
            self.end_uses(managed_params, suspended)
            self.data.op_boundary(belongs)
            self._progress()

    def _progress(self) -> None:
        """Advance updates and a checkpoint in progress after an operator."""
        speculation, updates = self.optimizer_in_backward.speculation, self.updates
        if speculation.assumption is not None and self.in_backward:
            speculation.progress()
        if updates.queue.updates or updates.disk is not None:
            updates.progress()
        if self.background_save.saving is not None:
            self.background_save.saving.progress()

    def end_uses(self, managed_params: Sequence[ManagedParam], suspended: Window | None = None) -> None:
        """End an access, and open the window again that it suspended."""
        self.data.release(managed_params, TensorState.HOLD if self.in_backward else TensorState.HOLD_AFTER_FWD)
        if suspended is not None:
            with managing():
                self._open(suspended, None)

    def access(self, managed_params: Sequence[ManagedParam]) -> Window | None:
        """Access `managed_params`; return the window that was suspended for them, if any.

        See [Note: recomputation inside a window].
        """
        belongs, window = torch.is_grad_enabled() or self.in_backward, self.window
        self.note(managed_params)
        with managing():
            if self.updates.queue.updates:
                self.updates.complete(managed_params)
            try:
                # Suspend the window rather than evict an optimizer chunk, for which the host may have no room.
                self.data.access(managed_params, belongs, gently=window is not None)
                return None
            except BudgetError:
                if window is None:
                    raise
                self._close(suspends=True)
                self.data.access(managed_params, None)
                return window

    def covers(self, managed_params: Sequence[ManagedParam]) -> bool:
        """Finish updates of the parameters; return whether they can then be read without an access."""
        if self.updates.queue.updates:
            with managing():
                self.updates.complete(managed_params)
        return self.data.residency.active and self.data.residency.covers(managed_params)

    def note(self, managed_params: Sequence[ManagedParam]) -> None:
        """Remember the parameters of an operator that may be inside a custom Function."""
        if self.data.tracer.in_iteration_now and not torch.is_grad_enabled() and not self.in_backward:
            self._note_hidden(managed_params)

    def _note_hidden(self, managed_params: Sequence[ManagedParam], *, native: bool = False) -> None:
        self.hidden_nodes.note(managed_params, native=native)
        if self.optimizer_in_backward.first:
            self.optimizer_in_backward.expect_reads(managed_params)

    def open_function_windows(self, loss: torch.Tensor) -> None:
        """Open windows before nodes of custom Functions that read parameters. See `HiddenNodes`."""
        for node, managed_params in self.hidden_nodes.drain(loss):
            node.register_prehook(self._window_prehook(managed_params))

    def _window_prehook(self, managed_params: tuple[ManagedParam, ...]) -> Callable[[Any], None]:
        window = Window(managed_params)
        if self.optimizer_in_backward.first and not self.in_backward:
            window.expected = True
            self.optimizer_in_backward.expect_reads(managed_params)
        return lambda _: self.enter_backward(window)

    def track_outputs(
        self, out: Any, managed_params: tuple[ManagedParam, ...], before: GraphSnapshot, held: bool = False
    ) -> None:
        """Intercept views among an operator's outputs, and open its window before the nodes it added to the graph.

        `held`: see [Note: windows on held chunks].
        """
        storages, outputs, every = [], [], not held
        for chunk in [managed.chunk for managed in managed_params]:
            storages.append((chunk.storage if chunk.device.valid else chunk.read_storage)._cdata)
        for tensor in (out,) if type(out) is torch.Tensor else tensors_in(out):
            if managed_param_of(tensor) is not None:
                continue
            local = tensor if type(tensor) is torch.Tensor else local_part(tensor)
            if local.layout is torch.strided and local.untyped_storage()._cdata in storages:
                adopt_view(tensor, managed_params, self)
            elif (node := tensor.grad_fn) is not None:
                outputs.append(node)
                every = every or tensor._is_view()
        if outputs:
            enter = self._window_prehook(managed_params)
            for node in before.added_nodes(outputs) if every else before.added(outputs):
                node.register_prehook(enter)

    @contextmanager
    def accessed(self, managed: ManagedParam) -> Iterator[None]:
        """Hold a parameter on the device, as during an operator."""
        if managed.on_host:
            self.data.move_embedding_to_device(managed)
        with deferring_sigint():
            suspended = self.access((managed,))
            try:
                with managing():
                    yield
            except BaseException:
                self.end_uses((managed,), suspended)
                raise
            self.end_operator((managed,), suspended)

    # Backward windows

    def enter_backward(self, window: Window) -> None:
        """Open an operator's window before one of its nodes runs."""
        if self.lock.owner == get_ident():
            self._enter(window)
            return
        with self.lock:
            self._enter(window)

    def _enter(self, window: Window) -> None:
        if window is self.window:
            return
        if torch.is_grad_enabled():
            raise ModelError(
                f"parameter {window.managed_params[0].name!r} is used by an operator that is differentiated twice "
                f"(create_graph=True), which is not supported: the second backward would read weights without "
                f"interception"
            )
        with torch._C.DisableTorchFunctionSubclass(), managing():
            if self.window is None and not self.gradient_hooks.backward_depth:
                self.optimizer_in_backward.check_inactive("another backward")
                self._begin_plain_backward()
            self._close()
            self._open(window)
            if window.expected:
                window.expected = False
                self.optimizer_in_backward.note_reads(window.managed_params)

    def _begin_plain_backward(self) -> None:
        """Begin a backward outside of `engine.backward`; it ends with autograd's callback, or when that is freed."""
        holds = self.lock.begin_backward()
        self.data.begin_backward()
        end = partial(self._end_plain_backward, self.data.shards.backward_id)
        self._plain_backwards[self.data.shards.backward_id] = holds
        Variable._execution_engine.queue_callback(end)
        weakref.finalize(end, self._end_plain_backward, self.data.shards.backward_id).atexit = False

    def _end_plain_backward(self, number: int) -> None:
        holds = self._plain_backwards.pop(number, None)
        if holds is not None:
            try:
                self.end_backward()
            finally:
                self.lock.end_backward(holds)

    def end_backward(self) -> None:
        """End a backward: close the open window."""
        with torch._C.DisableTorchFunctionSubclass(), managing():
            self._close()
            if not self.gradient_hooks.backward_depth:
                self.data.finish_backward_gradients()

    def _open(self, window: Window, belongs: bool | None = True) -> None:
        window.held = self.covers(window.managed_params)
        if window.held:
            for managed in window.managed_params:
                managed.chunk.pins += 1
        else:
            self.data.access(window.managed_params, belongs)
        self.window = window

    def _close(self, *, suspends: bool = False) -> None:
        """Close the open window. `suspends`: it will be opened again, so that its parameters are not updated."""
        window, self.window = self.window, None
        if window is None or self.closer.closed:
            return
        accessed = () if window.held else window.managed_params
        if window.held:
            for managed in window.managed_params:
                managed.chunk.pins -= 1
        else:
            self.data.release(accessed, TensorState.HOLD)
        self.data.sharing.end_window(accessed)
        if not suspends:
            self.optimizer_in_backward.progress()
        if self.updates.queue.updates or self.updates.disk is not None:
            self.updates.progress()
        if self.background_save.saving is not None:
            self.background_save.saving.progress()
