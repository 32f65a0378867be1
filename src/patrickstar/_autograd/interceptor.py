"""Windows: an operator's parameters are there when it runs, and again when its backward does.

The only file that touches autograd's machinery.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.out_of_memory import explain, is_out_of_memory
from patrickstar._params.precision import tensors_in
from patrickstar._params.tensor_subclass import (
    ChunkParameter,
    ChunkView,
    adopt_parameter,
    adopt_view,
    descriptor,
)
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import BudgetError, DiskError, ModelError, MoveError, TrainingError

# [Note: windows]
# An operator's parameters must be there again when its backward runs. Every node that the operator added to the graph
# gets a pre-hook which opens the operator's window: its parameters are accessed and stay pinned until another window
# opens or backward ends. All added nodes, not just the output's: an in-place operator on a view output replaces the
# output's node, and an LSTM adds hundreds. Autograd runs later nodes first, so the nodes of one operator run together.
#
# [Note: recomputing inside a window]
# Under checkpointing a node's saved tensors are recomputed after its pre-hook ran. The recomputed operators access
# parameters while the window is open. Where both do not fit, the window's pins are lifted for the length of the
# operator and put back after it, so that one operator's chunks are all that ever has to be there at once.

_GET_GRAD, _SET_GRAD = descriptor("grad").__get__, descriptor("grad").__set__
_SET_DATA = descriptor("data").__set__
_COPIED = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
"""What hands the memory itself out of PyTorch's sight; it gets a copy."""


def _hand_over(param: Any) -> None:
    """The hook on every parameter. It holds nothing: autograd keeps it where the garbage collector can't look."""
    param._interceptor.on_gradient(param._managed_params[0], param)


def _version(tensor: torch.Tensor) -> int:
    """Counts writes in place; tensors made in inference mode don't."""
    return -1 if tensor.is_inference() else tensor._version


class Window:
    """The parameters that one operator reads, and must find again in its backward."""

    __slots__ = ("managed_params",)

    def __init__(self, managed_params: Sequence[ManagedParam]) -> None:
        self.managed_params = managed_params


class GraphSnapshot(NamedTuple):
    """The graph as it was before an operator: what its own nodes are told from.

    A number tells them apart within a thread; where a recompute runs in a thread of autograd's own, counting anew, the
    nodes of the operands do.
    """

    number: int
    operands: frozenset[Any]

    @classmethod
    def now(cls, args: Any, kwargs: Any) -> "GraphSnapshot":
        operands = {tensor.grad_fn for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
        return cls(torch._C._autograd._get_sequence_nr(), frozenset(operands))

    def contains(self, node: Any) -> bool:
        """Whether a node was there already, or is a leaf's, which has no turn of its own."""
        return node in self.operands or hasattr(node, "variable") or node._sequence_nr() < self.number


class ModuleUse(NamedTuple):
    """A block that is running under one window."""

    managed_params: tuple[ManagedParam, ...]
    original_classes: list[ManagedParam]
    before: "GraphSnapshot"
    suspended: Window | None


@contextmanager
def managing() -> Iterator[None]:
    """What is made or moved here outlives the mode the user is in, and no graph is made of it."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
        yield


class Interceptor:
    """Stands between operators and the parameters of one engine."""

    def __init__(self, data: ModelData, early: OptimizerInBackward, loss_scaled: bool) -> None:
        self.data = data
        self.optimizer_in_backward = early
        self.loss_scaled = loss_scaled
        self.backward_depth = 0
        self.window: Window | None = None
        self.hooks: dict[ManagedParam, Any] = {}
        self.pending_functions: dict[int, tuple[ManagedParam, ...]] = {}
        self.release: weakref.finalize[Any, Any] | None = None
        """What closes the engine."""

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running, under `engine.backward` or otherwise."""
        return self.backward_depth > 0 or self.window is not None

    # Parameters

    def adopt(self, managed: ManagedParam) -> None:
        """Have a parameter announce itself, and hand its gradients over."""
        adopt_parameter(managed, self)
        self.hook_gradient(managed)

    def hook_gradient(self, managed: ManagedParam) -> None:
        """Take the gradient of `managed` when all its uses are summed, if it asks for one."""
        with torch._C.DisableTorchFunctionSubclass():
            if managed.param.requires_grad and managed not in self.hooks:
                self.hooks[managed] = managed.param.register_post_accumulate_grad_hook(_hand_over)

    def close(self) -> None:
        """Take no gradients any more."""
        for hook in self.hooks.values():
            hook.remove()
        self.hooks.clear()

    def on_gradient(self, managed: ManagedParam, param: torch.Tensor) -> None:
        """Autograd has summed a gradient into `param.grad`."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if not self.backward_depth and self.loss_scaled:
                raise TrainingError(
                    "with fp16 the loss has to be scaled: call engine.backward(loss), not loss.backward()"
                )
            grad, param.grad = param.grad, None
            assert grad is not None
            if grad.layout is not torch.strided:
                raise ModelError(
                    f"parameter {managed.name!r} got a gradient of layout {grad.layout}; chunks hold dense gradients "
                    f"only, so its operator must be called with sparse=False"
                )
            if managed.stays_on_host:
                self.data.manager.count_transfer(managed.lookups_in_graph_bytes, to_device=False)
                managed.lookups_in_graph_bytes = 0
            self.optimizer_in_backward.optimizer_step.complete((managed,))
            self.data.accept_gradient(managed, grad)
            self.optimizer_in_backward.on_gradient_ready(managed)

    # Operators

    def operate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        """Run an operator that takes managed tensors."""
        try:
            return self._operate(func, args, kwargs, tensors)
        except (DiskError, MoveError) as error:
            if not self.data.tracer.in_iteration_now:  # else the engine's own call tells of it
                self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Bytes of chunks are lost, since a disk or a thread has failed: give all back and close the engine."""
        if self.release is not None and self.release.alive:
            lost = self.release() or ()
            error.add_note(
                f"The engine is closed. {len(lost)} parameters could not be read back and are NaN"
                f"{': ' + ', '.join(lost) if lost else ''}. Go on from a saved state with a new engine."
            )

    def _operate(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]
    ) -> Any:
        managed_params = tuple(dict.fromkeys(managed for tensor in tensors for managed in tensor._managed_params))
        for tensor in tensors:
            if tensor._interceptor is not self:
                raise ModelError(
                    f"an operator mixes parameter {managed_params[0].name!r} with one of another engine; "
                    f"use .detach().clone() of one of them"
                )
        if func == _GET_GRAD:
            return self._read_gradient(managed_params[0], tensors[0])
        if func == _SET_GRAD:
            return self._set_gradient(managed_params[0], args[0], args[1])
        if func == _SET_DATA:
            return self._assign(managed_params[0], args[1])
        if func in _COPIED:
            return func(self.operate(torch.Tensor.clone, args[:1], {}, tensors), *args[1:], **kwargs)
        if func is not F.embedding:
            for managed in managed_params:
                if managed.on_host:
                    self.data.move_embedding_to_device(managed)
        before = GraphSnapshot.now(args, kwargs)
        suspended = self._access(managed_params)
        versions = [_version(tensor) for tensor in tensors]
        try:
            if func is F.embedding and managed_params[0].embedding:
                out = self._embedding_lookup(args, kwargs, managed_params[0])
            else:
                out = self._run(func, args, kwargs, managed_params)
            written = [t for t, version in zip(tensors, versions, strict=True) if _version(t) != version]
            if written:
                with managing():
                    for managed in dict.fromkeys(managed for tensor in written for managed in tensor._managed_params):
                        self.data.on_in_place_write(managed)
            if func is not F.embedding:  # whose backward reads indices alone
                self._track_outputs(out, managed_params, before)
        except BaseException:
            self._end_uses(managed_params, suspended)
            raise
        self._release(managed_params, suspended)
        return out

    def _release(self, managed_params: Sequence[ManagedParam], suspended: Window | None) -> None:
        belongs = torch.is_grad_enabled() or self.in_backward
        with managing():
            self._end_uses(managed_params, suspended)
            self.data.op_boundary(belongs)
            self.optimizer_in_backward.optimizer_step.progress()

    def _end_uses(self, managed_params: Sequence[ManagedParam], suspended: Window | None) -> None:
        self.data.release(managed_params, TensorState.HOLD if self.in_backward else TensorState.HOLD_AFTER_FWD)
        if suspended is not None:
            self._open(suspended)

    def open_block(self, managed_params: tuple[ManagedParam, ...], inputs: Any) -> ModuleUse:
        """Have all parameters of a block there, as plain ones, until `close_block`."""
        before = GraphSnapshot.now((), inputs)
        suspended = self._access(managed_params)
        original_classes = [managed for managed in managed_params if type(managed.param) is ChunkParameter]
        for managed in original_classes:
            managed.param.__class__ = nn.Parameter
        return ModuleUse(managed_params, original_classes, before, suspended)

    def close_block(self, use: ModuleUse, out: Any) -> None:
        """The block has returned `out`: open its window again before each node it added to the graph."""
        for managed in use.original_classes:
            managed.param.__class__ = ChunkParameter
        self._track_outputs(out, use.managed_params, use.before)
        self._release(use.managed_params, use.suspended)

    def _access(self, managed_params: Sequence[ManagedParam]) -> Window | None:
        """Access `managed_params`; returns the window that had to make way, if one had.

        See [Note: recomputing inside a window].
        """
        belongs = torch.is_grad_enabled() or self.in_backward
        window = self.window
        if self.data.tracer.in_iteration_now and not torch.is_grad_enabled() and not self.in_backward:
            # Perhaps inside a custom Function, whose node was the last to be made. See `open_function_windows`.
            number = torch._C._autograd._get_sequence_nr() - 1
            self.pending_functions[number] = tuple(
                dict.fromkeys((*self.pending_functions.get(number, ()), *managed_params))
            )
        with managing():
            self.optimizer_in_backward.optimizer_step.complete(managed_params)
            try:
                # Rather than an optimizer chunk, which the host may have no room for, the window makes way.
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

    def _run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        managed_params: Sequence[ManagedParam],
    ) -> Any:
        """Run an operator; where that finds no memory, once more after every idle chunk has left the device."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        with managing():
            self.data.manager.free_memory()
            self.data.update_param_views()
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            name = getattr(func, "__name__", func)
            raise explain(f"{name} on parameter {managed_params[0].name!r}, tried twice,", self.data, error) from None

    def open_function_windows(self, loss: torch.Tensor) -> None:
        """Open windows before custom Functions that read parameters: `Function.apply` itself announces nothing.

        Under checkpointing what such a Function saved comes back as a bare tensor, which announces nothing either.
        Checkpointing's own Function is passed over: what it recomputes announces itself.
        """
        if not self.pending_functions:
            return
        seen, nodes = set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes.extend(follower for follower, _ in node.next_functions)
            if isinstance(node, BackwardCFunction) and not isinstance(node, CheckpointFunction):
                managed_params = self.pending_functions.get(node._sequence_nr())
                if managed_params is not None:
                    node.register_prehook(self._entry_window(managed_params))
        self.pending_functions.clear()

    def _entry_window(self, managed_params: tuple[ManagedParam, ...]) -> Callable[[Any], None]:
        window = Window(managed_params)

        def enter(_: Any) -> None:
            self.enter_backward(window)

        return enter

    def _embedding_lookup(self, args: Sequence[Any], kwargs: dict[str, Any], managed: ManagedParam) -> torch.Tensor:
        """An embedding's lookup, on the host if its weight stays there: then its output moves, not the weight."""
        if not managed.stays_on_host:
            found = F.embedding(*args, **kwargs)
        else:
            host = self.data.manager.hardware.host_device
            moved: Any = [value.to(host) if isinstance(value, torch.Tensor) else value for value in args]
            found = F.embedding(*moved, **kwargs).to(self.data.manager.device)
            self.data.manager.count_transfer(found.nbytes, to_device=True)
        if found.requires_grad:
            managed.lookup_bytes += found.nbytes
            managed.lookups_in_graph_bytes += found.nbytes
        return found

    def _track_outputs(self, out: Any, managed_params: tuple[ManagedParam, ...], before: GraphSnapshot) -> None:
        """Class the views among an operator's outputs, and open its window before each node it added to the graph."""
        storages = {managed.chunk.read_storage._cdata for managed in managed_params}
        nodes = []
        for tensor in (out,) if type(out) is torch.Tensor else tensors_in(out):
            if isinstance(tensor, ChunkParameter):
                continue
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages:
                adopt_view(tensor, managed_params, self)
            elif tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
        if not nodes:
            return
        enter, seen = self._entry_window(managed_params), set()
        while nodes:
            node = nodes.pop()
            if node in seen or before.contains(node):
                continue
            seen.add(node)
            node.register_prehook(enter)
            nodes.extend(follower for follower, _ in node.next_functions if follower is not None)

    def _read_gradient(self, managed: ManagedParam, tensor: torch.Tensor) -> torch.Tensor | None:
        if managed.has_gradient and isinstance(tensor, ChunkParameter):
            raise TrainingError(
                f"the gradient of {managed.name!r} lies in its chunk; read it with engine.gradient({managed.name!r}), "
                f"clip with engine.clip_grad_norm_(max_norm), drop it with optimizer.zero_grad()"
            )
        return tensor.grad

    def _set_gradient(self, managed: ManagedParam, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None and isinstance(tensor, ChunkParameter):
            raise TrainingError(
                f"the gradient of {managed.name!r} can't be assigned: the step takes what "
                f"engine.backward(loss) computes; "
                f"put the change into the loss"
            )
        if isinstance(tensor, ChunkParameter):
            self.optimizer_in_backward.check_inactive("dropping gradients")
            with managing():
                self.data.discard_gradient(managed)
        tensor.grad = value

    def _assign(self, managed: ManagedParam, value: torch.Tensor) -> None:
        """`parameter.data = value`: a value of the same kind is written into the chunk."""
        chunk = managed.chunk
        if (
            isinstance(value, ChunkView | ChunkParameter)
            and value._managed_params == (managed,)
            and value.dtype == chunk.dtype
        ):
            return
        if value.dtype != chunk.dtype or value.shape != managed.shape or value.device != chunk.device:
            raise ModelError(
                f"parameter {managed.name!r} is kept in a chunk as {chunk.dtype}, {managed.shape}, on "
                f"{chunk.device} and "
                f"can't become {value.dtype}, {tuple(value.shape)}, on {value.device}; choose precision and device in "
                f"ps.Config, or take engine.state_dict() to another model"
            )
        self._access((managed,))
        with managing():
            managed.payload().copy_(value)
            self.data.on_in_place_write(managed)
        self._release((managed,), None)

    # Backward windows

    def enter_backward(self, window: Window) -> None:
        """A node of an operator is about to run: open the operator's window."""
        if window is self.window:
            return
        if torch.is_grad_enabled():
            raise ModelError(
                f"parameter {window.managed_params[0].name!r} is used by an operator that is differentiated twice "
                f"(create_graph=True), which is not supported: the second backward would read weights unannounced"
            )
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.window is None and not self.backward_depth:
                self.optimizer_in_backward.check_inactive("another backward")
                self.data.begin_backward()
                Variable._execution_engine.queue_callback(self.end_backward)
            self._close()
            self._open(window)

    def abandon(self) -> None:
        """Close what a backward that failed, and was not `engine.backward`, left open."""
        if self.window is not None and not self.backward_depth:
            self.end_backward()

    def end_backward(self) -> None:
        """No node will run any more: close the window that is open."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._close()
            if not self.backward_depth:
                self.data.finish_backward_gradients()

    def _open(self, window: Window) -> None:
        with torch.no_grad():
            self.optimizer_in_backward.optimizer_step.complete(window.managed_params)
            self.data.access(window.managed_params, belongs=True)
        self.window = window

    def _close(self) -> None:
        if self.window is not None:
            self.data.release(self.window.managed_params, TensorState.HOLD)
            self.window = None
            self.data.progress()
            self.optimizer_in_backward.progress()
            self.optimizer_in_backward.optimizer_step.progress()
