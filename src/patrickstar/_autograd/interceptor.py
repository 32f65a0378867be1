"""Fetch an operator's parameters before it runs, and again before its backward. See [Note: backward windows]."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import functional as F

from patrickstar._autograd.data_attribute import DataAttribute
from patrickstar._autograd.embedding_lookup import can_look_up_on_host, embedding_lookup
from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._autograd.param_attributes import (
    WRITERS,
    GradientAttribute,
    check_written_precision,
    copied_in_full,
)
from patrickstar._autograd.windows import CustomFunctions, GraphSnapshot, ModuleUse, Window
from patrickstar._distributed.param_sharding import local_part
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.interception import adopt_parameter, adopt_view, intercept_parameter, let_through
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.memory_functions import EXPOSING, REPLACING, RESHAPING, UNVERSIONED, expose, versioned
from patrickstar._params.modes import managing
from patrickstar._params.out_of_memory import run_with_retry
from patrickstar._params.precision import tensors_in
from patrickstar._params.tensor_subclass import all_managed_params, descriptor, managed_param_of
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._step.full_state import FullState
from patrickstar._step.gradients import Gradients
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import BudgetError, DiskError, ModelError, MoveError, PeerError

_GET_GRAD, _SET_GRAD = descriptor("grad").__get__, descriptor("grad").__set__
_SET_DATA = descriptor("data").__set__
_ADD_HOOK = torch.Tensor.register_post_accumulate_grad_hook
_SPECIAL = {torch.Tensor.view_as, _ADD_HOOK, _GET_GRAD, _SET_GRAD, _SET_DATA, torch.Tensor.detach}
_SPECIAL |= EXPOSING | UNVERSIONED | REPLACING | RESHAPING


def _version(tensor: torch.Tensor) -> int:
    """Return the version counter, or -1 for tensors created in inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


class Interceptor:
    """Intercepts operators on the parameters of one engine."""

    def __init__(self, gradients: Gradients, optimizer_in_backward: OptimizerInBackward, full_state: FullState) -> None:
        self.data = gradients.data
        self.full_state = full_state
        self.data_attribute = DataAttribute(self, full_state)
        self.gradient = GradientAttribute(gradients, optimizer_in_backward)
        self.optimizer_in_backward = optimizer_in_backward
        self.gradient_hooks = GradientHooks(gradients, optimizer_in_backward)
        self.window: Window | None = None
        self.functions = CustomFunctions()
        self.listed: dict[ManagedParam, torch.Tensor] = {}
        """Entries of the state dict that a module is about to fill by `detach`, so that no parameter is fetched."""
        self.release: weakref.finalize[Any, Any] | None = None
        """Closes the engine."""

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

    def operate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        """Run an operator that takes managed tensors."""
        try:
            return self._operate(func, args, kwargs, tensors)
        except (DiskError, MoveError) as error:
            if not self.data.tracer.in_iteration_now:  # otherwise the engine's own call handles it
                self.close_engine(error)
            raise

    def close_engine(self, error: BaseException) -> None:
        """Close the engine after a disk or thread failure lost bytes of chunks."""
        if self.release is not None and self.release.alive:
            lost = self.release() or ()
            # Without the other processes nothing can be read back, so that the names say nothing.
            names = "" if isinstance(error, PeerError) or not lost else f": {', '.join(lost)}"
            partly = [name for name in self.optimizer_in_backward.optimizer_step.updated_in_part if name not in lost]
            error.add_note(
                f"The engine is closed. {len(lost)} parameters could not be read back and are NaN{names}. "
                + (f"{len(partly)} may be updated in part: {', '.join(partly)}. " if partly else "")
                + "Continue from a saved state with a new engine."
            )

    @contextmanager
    def close_on_data_loss(self) -> Iterator[None]:
        """Free everything and close the engine if a failed disk or thread has lost bytes of chunks."""
        try:
            yield
        except (DiskError, MoveError) as error:
            self.close_engine(error)
            raise

    def full_precision(self, managed: ManagedParam) -> torch.Tensor:
        """Return a host copy of a parameter in full precision; every process must call it."""
        with self.close_on_data_loss():
            return self.full_state.read(managed, managed.full_kind)

    def _operate(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]
    ) -> Any:
        managed_params: tuple[ManagedParam, ...] = tensors[0]._managed_params
        if len(tensors) > 1:
            managed_params = all_managed_params(tensors)
        if func in _SPECIAL:
            if func is torch.Tensor.view_as:
                # A custom Function that returns its input, as `DTensor.from_local` does: the copy is not intercepted.
                func, args = (torch.Tensor.clone, args[:1]) if args[0] is args[1] else (func, args)
                return self._operate_plainly(func, args, kwargs, tensors, managed_params)
            if func in EXPOSING:
                copied = partial(self.operate, torch.Tensor.clone, args[:1], {}, tensors)
                return expose(func, f"parameter {managed_params[0].name!r}", copied, args[1:], kwargs)
            if func in UNVERSIONED:
                return self._operate_plainly(versioned(func), args, kwargs, tensors, managed_params)
            if func in REPLACING or (func in RESHAPING and managed_param_of(args[0]) is not None):
                return self.data_attribute.replace(func, managed_params[0], args, kwargs)
            if func is _ADD_HOOK:
                return self.gradient_hooks.add_before(managed_params[0], args, kwargs)
            if func in (_GET_GRAD, _SET_GRAD, _SET_DATA):
                return self._operate_attribute(func, args, managed_params[0])
            if managed_params[0] in self.listed and managed_param_of(tensors[0]) is not None:
                return self.listed.pop(managed_params[0])
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
        for managed in managed_params:
            if managed.on_host and not can_look_up_on_host(func, args, kwargs, managed):
                self.data.move_embedding_to_device(managed)
        if self._covers(managed_params):
            self._note(managed_params)
            out = self._run(func, args, kwargs, tensors, managed_params, held=True)
            if self.optimizer_in_backward.updating:
                with managing():
                    self._progress()
            return out
        suspended = self._access(managed_params)
        try:
            out = self._run(func, args, kwargs, tensors, managed_params, held=False)
        except BaseException:
            self._end_uses(managed_params, suspended)
            raise
        self._release(managed_params, suspended)
        return out

    def _operate_attribute(self, func: Callable[..., Any], args: Sequence[Any], managed: ManagedParam) -> Any:
        """Read or assign `grad`, or assign `data`."""
        tensor = args[0]
        if func == _SET_DATA:
            return self.data_attribute.assign(tensor, args[1])
        # While autograd accumulates, the gradient is an ordinary tensor.
        if managed_param_of(tensor) is not None and (func != _GET_GRAD or tensor.grad is None):
            with managing():
                if func == _GET_GRAD:
                    return self.gradient.read(managed, self)
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
        before = GraphSnapshot.now(args, kwargs)
        copied = None
        if func in WRITERS:
            check_written_precision(func, args, tensors[0])
            if func is torch.Tensor.copy_:
                args, copied = copied_in_full(args)
        versions = [_version(tensor) for tensor in tensors]
        if func is F.embedding and managed_params[0].embedding:
            out = embedding_lookup(args, kwargs, managed_params[0], self.data.manager, self.gradient_hooks)
        else:
            out = run_with_retry(func, args, kwargs, managed_params[0], self.data)
        if versions != [_version(tensor) for tensor in tensors]:
            written = [t for t, version in zip(tensors, versions, strict=True) if _version(t) != version]
            with managing():
                for managed in dict.fromkeys(managed for tensor in written for managed in tensor._managed_params):
                    self.data.on_in_place_write(managed, copied)
                    self.data_attribute.follow(managed)
        if func is not F.embedding:  # its backward reads only the indices
            self._track_outputs(out, managed_params, before, held)
        return out

    def _release(self, managed_params: Sequence[ManagedParam], suspended: Window | None) -> None:
        belongs = torch.is_grad_enabled() or self.in_backward
        with managing():
            self._end_uses(managed_params, suspended)
            self.data.op_boundary(belongs)
            self._progress()

    def _progress(self) -> None:
        """Advance updates after an operator."""
        if self.in_backward:
            self.optimizer_in_backward.speculation.progress()
        self.optimizer_in_backward.optimizer_step.progress()

    def _end_uses(self, managed_params: Sequence[ManagedParam], suspended: Window | None) -> None:
        self.data.release(managed_params, TensorState.HOLD if self.in_backward else TensorState.HOLD_AFTER_FWD)
        if suspended is not None:
            with managing():
                self._open(suspended)

    def open_module_window(self, managed_params: tuple[ManagedParam, ...], inputs: Any) -> ModuleUse:
        """Fetch all parameters of a module, and make them plain Parameters until `close_module_window`."""
        before = GraphSnapshot.now(inputs, {})
        suspended = self._access(managed_params)
        let = [managed for managed in managed_params if managed_param_of(managed.param) is not None]
        for managed in let:
            let_through(managed)
        return ModuleUse(managed_params, let, before, suspended)

    def abandon_module_window(self, use: ModuleUse) -> None:
        """End a module call that raised an exception, which other processes may not have."""
        for managed in use.let_through:
            intercept_parameter(managed)
        self._end_uses(use.managed_params, use.suspended)

    def close_module_window(self, use: ModuleUse, out: Any) -> None:
        """End a module call that returned `out`, and register its window on each node that it added to the graph."""
        for managed in use.let_through:
            intercept_parameter(managed)
        self._track_outputs(out, use.managed_params, use.before)
        self._release(use.managed_params, use.suspended)

    def _access(self, managed_params: Sequence[ManagedParam]) -> Window | None:
        """Access `managed_params`; return the window that was suspended for them, if any.

        See [Note: recomputation inside a window].
        """
        belongs = torch.is_grad_enabled() or self.in_backward
        window = self.window
        self._note(managed_params)
        with managing():
            self.optimizer_in_backward.optimizer_step.complete(managed_params)
            try:
                # Suspend the window rather than evict an optimizer chunk, for which the host may have no room.
                self.data.access(managed_params, belongs, gently=window is not None)
                return None
            except BudgetError:
                if window is None:
                    raise
                self._close()
                self.data.restore_params(managed_params)
                self.data.fetch(self.data.chunks_to_fetch(managed_params))
                self.data.pin(managed_params)
                return window

    def _covers(self, managed_params: Sequence[ManagedParam]) -> bool:
        """Finish updates of the parameters; return whether they can then be read without an access."""
        optimizer_step = self.optimizer_in_backward.optimizer_step
        if optimizer_step.updating:
            with managing():
                optimizer_step.complete(managed_params)
        return self.data.residency.covers(managed_params)

    def _note(self, managed_params: Sequence[ManagedParam]) -> None:
        """Remember the parameters of an operator that may be inside a custom Function."""
        if self.data.tracer.in_iteration_now and not torch.is_grad_enabled() and not self.in_backward:
            self.functions.note(managed_params)

    def open_function_windows(self, loss: torch.Tensor) -> None:
        """Open windows before nodes of custom Functions that read parameters. See `CustomFunctions`."""
        for node, managed_params in self.functions.drain(loss):
            node.register_prehook(self._window_prehook(managed_params))

    def _window_prehook(self, managed_params: tuple[ManagedParam, ...]) -> Callable[[Any], None]:
        window = Window(managed_params)
        return lambda _: self.enter_backward(window)

    def _track_outputs(
        self, out: Any, managed_params: tuple[ManagedParam, ...], before: GraphSnapshot, held: bool = False
    ) -> None:
        """Intercept views among an operator's outputs, and open its window before the nodes it added to the graph.

        `held`: see [Note: windows on held chunks].
        """
        storages = [managed.chunk.read_storage._cdata for managed in managed_params]
        outputs, every = [], not held
        for tensor in (out,) if type(out) is torch.Tensor else tensors_in(out):
            if managed_param_of(tensor) is not None:
                continue
            local = local_part(tensor)
            if local.layout is torch.strided and local.untyped_storage()._cdata in storages:
                adopt_view(tensor, managed_params, self)
            elif (node := tensor.grad_fn) is not None:
                outputs.append(node)
                every = every or tensor._is_view()
        if not outputs:
            return
        enter = None
        for node in before.added_nodes(outputs) if every else before.added(outputs):
            enter = enter or self._window_prehook(managed_params)
            node.register_prehook(enter)

    @contextmanager
    def accessed(self, managed: ManagedParam) -> Iterator[None]:
        """Hold a parameter on the device, as during an operator."""
        if managed.on_host:
            self.data.move_embedding_to_device(managed)
        suspended = self._access((managed,))
        try:
            with managing():
                yield
        except BaseException:
            self._end_uses((managed,), suspended)
            raise
        self._release((managed,), suspended)

    # Backward windows

    @defer_sigint
    def enter_backward(self, window: Window) -> None:
        """Open an operator's window before one of its nodes runs."""
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
                self.data.begin_backward()
                Variable._execution_engine.queue_callback(self.end_backward)
            self._close()
            self._open(window)

    def abandon(self) -> None:
        """Close the window that a failed backward outside `engine.backward` left open."""
        if self.window is not None and not self.gradient_hooks.backward_depth:
            self.end_backward()

    @defer_sigint
    def end_backward(self) -> None:
        """End a backward: close the open window."""
        with torch._C.DisableTorchFunctionSubclass(), managing():
            self._close()
            if not self.gradient_hooks.backward_depth:
                self.data.finish_backward_gradients()

    def _open(self, window: Window) -> None:
        window.held = self._covers(window.managed_params)
        if window.held:
            for managed in window.managed_params:
                managed.chunk.pins += 1
        else:
            self.data.access(window.managed_params, belongs=True)
        self.window = window

    def _close(self) -> None:
        if self.window is None:
            return
        if self.window.held:
            for managed in self.window.managed_params:
                managed.chunk.pins -= 1
        else:
            self.data.release(self.window.managed_params, TensorState.HOLD)
            self.data.end_window(self.window.managed_params)
        self.window = None
        self.data.progress()
        self.optimizer_in_backward.progress()
        self.optimizer_in_backward.optimizer_step.progress()
