"""Hooks on parameters that move each complete gradient into its chunk."""

from threading import get_ident
from typing import Any

import torch

from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._hardware.sigint_gate import deferring_sigint, managing
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.row_gradient import RowGradient
from patrickstar._step.gradients import Gradients
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import ModelError


def _gradient_hook(param: Any) -> None:
    """Post-accumulate hook. Holds no reference: autograd stores hooks where the garbage collector can't see them."""
    param._interceptor.gradient_hooks.on_gradient(param._managed_params[0], param)


class GradientHooks:
    """Moves gradients that autograd has completed into the chunks of one engine."""

    def __init__(self, gradients: Gradients, optimizer_in_backward: OptimizerInBackward, lock: EngineLock) -> None:
        self.shards, self.sharing = gradients.shards, gradients.sharing
        self.lock = lock
        self.optimizer_in_backward = optimizer_in_backward
        self.gradients = gradients
        self.backward_depth = 0
        """Number of running calls of `engine.backward`, which scales the loss."""
        self._hooks: dict[ManagedParam, Any] = {}

    def register(self, managed: ManagedParam) -> None:
        """Register the post-accumulate hook of a parameter that requires a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            if managed.param.requires_grad and managed not in self._hooks:
                self._hooks[managed] = managed.param.register_post_accumulate_grad_hook(_gradient_hook)

    def add_before(self, managed: ManagedParam, args: Any, kwargs: Any) -> Any:
        """Register a post-accumulate hook of the user, which runs before the one that takes the gradient away."""
        register: Any = torch.Tensor.register_post_accumulate_grad_hook
        handle = register(*args, **kwargs)
        self._move_last(managed)
        return handle

    def move_last(self) -> None:
        """Let hooks that were registered without `add_before`, in a compiled block, run before these."""
        with torch._C.DisableTorchFunctionSubclass():
            for managed in list(self._hooks):
                self._move_last(managed)

    def _move_last(self, managed: ManagedParam) -> None:
        hook = self._hooks.get(managed)
        hooks: Any = managed.param._post_accumulate_grad_hooks
        if hook is not None and next(reversed(hooks)) != hook.id:
            hook.remove()
            self._hooks[managed] = managed.param.register_post_accumulate_grad_hook(_gradient_hook)

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def on_gradient(self, managed: ManagedParam, param: torch.Tensor) -> None:
        """Move the gradient that autograd accumulated in `param.grad` into the chunk."""
        if self.lock.owner == get_ident():
            self._take(managed, param)
            return
        with self.lock:
            self._take(managed, param)

    def _take(self, managed: ManagedParam, param: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), managing() if torch.is_grad_enabled() else deferring_sigint():
            grad, param.grad = param.grad, None
            if grad is None:  # autograd completes the gradient of a parameter whose operators gave none, too
                return
            if managed.is_dtensor:
                from patrickstar._params.dtensor import local_gradient

                grad = local_gradient(param, grad)
            if grad.layout is not torch.strided:
                raise ModelError(
                    f"parameter {managed.name!r} got a gradient with layout {grad.layout}; chunks support dense "
                    f"gradients only: call its operator with sparse=False"
                )
            if managed.on_host and managed.stays_on_host:
                self.shards.manager.count_transfer(managed.lookups_in_graph_bytes, to_device=False)
                managed.lookups_in_graph_bytes = 0
            self._move(managed, grad, complete=True)

    def on_lookup_gradient(self, managed: ManagedParam, grad: torch.Tensor | RowGradient, lookup_bytes: int) -> None:
        """Move the gradient of one lookup on the host into the chunk. See [Note: lookups on the host].

        Args:
            grad: Gradient of the whole weight, on the host.
            lookup_bytes: Bytes of the lookup's output.
        """
        with self.lock, torch._C.DisableTorchFunctionSubclass(), managing():
            managed.lookups_in_graph_bytes = max(0, managed.lookups_in_graph_bytes - lookup_bytes)
            self._move(managed, grad, complete=managed.lookups_in_graph_bytes == 0)

    def _move(self, managed: ManagedParam, grad: torch.Tensor | RowGradient, complete: bool) -> None:
        if not self.backward_depth and self.gradients.scaler.enabled:
            self.gradients.unscaled.add(managed)
        if managed in self.gradients.zeros:
            grad = grad.to_dense() + 0  # which makes a negative zero positive
        updates = self.optimizer_in_backward.optimizer_step.updates
        if updates.queue.updates:
            updates.complete((managed,))
        self.sharing.accept_gradient(managed, grad)
        if complete:
            self.optimizer_in_backward.on_gradient_ready(managed)
