"""Plain-PyTorch reference of the engine's training."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patrickstar._autograd.tiled_rows import tile
from patrickstar._autograd.uncomputed_logits import tiled_output
from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar._kernels.grad_norm import GradStats, block_sums, fold
from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.update_rule import Rule
from patrickstar._params.param_values import follow_written
from patrickstar._params.precision import LossScaler, cast_inputs, clip_coefficient, compute_dtypes
from patrickstar.config import Config
from patrickstar.optim import Optimizer, TorchOptimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, which shares its memory; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: torch.Tensor = tensor.to_local().detach()
    return part


def local_gradient(param: nn.Parameter) -> torch.Tensor:
    """Return the gradient of this process's part of a parameter.

    The gradient of a DTensor may be a sum that is still distributed, or larger than the parameter.
    """
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def set_values(param: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the values of a parameter by others, of any dtype and on any device."""
    if isinstance(param, DTensor):
        # Assigning to `data` would leave the DTensor's local tensor as it is.
        torch.utils.swap_tensors(param, nn.Parameter(values, requires_grad=param.requires_grad))
    else:
        param.data = values


class PlainOptimizer(torch.optim.Optimizer):
    """Optimizer of this package over ordinary tensors: applies the rule of `spec` to one parameter at a time."""

    def __init__(self, groups: list[dict[str, Any]], spec: Optimizer) -> None:
        self.spec = spec
        self.memories: dict[torch.Tensor, dict[str, Any]] = {}
        """Small states of each parameter: see `Optimizer.rule`."""
        super().__init__(groups, spec.defaults())

    def prepare(self, param: torch.Tensor, group: Mapping[str, Any], step: int) -> Rule:
        """Return the rule of an update of a parameter, and create the states that it lacks."""
        state, memory = self.state[param], self.memories.setdefault(param, {})
        rule = self.spec.rule(group, step, memory).for_param(tuple(param.shape), param.stride(), param.device)
        state.update(memory)
        for kind in dict.fromkeys((*self.spec.lists_for(group), *rule.kinds)):
            if kind not in state:
                name = self.spec.state_dtypes.get(kind)
                state[kind] = torch.zeros_like(param, dtype=param.dtype if name is None else getattr(torch, name))
        return rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros((), device="cpu")) + 1
                rule = self.prepare(param, group, int(state["step"]))
                grad = torch.empty_like(param).copy_(param.grad)
                flat = [each.as_strided((each.numel(),), (1,)) for each in (param, grad, *map(state.get, rule.kinds))]
                rule.apply(flat[0], flat[1], flat[2:])
                for values in (flat[0], *flat[2:]):
                    canonical_nan_(values)
            group.update(self.spec.written_options(group, any(param.grad is not None for param in group["params"])))


class ReferenceOptimizer:
    """Optimizer over fp32 master parameters, which are cast back to the compute dtype after each step."""

    def __init__(self, trainer: "ReferenceTrainer") -> None:
        spec = trainer.config.optimizer
        self.trainer = trainer
        module = trainer.module
        masters = [group | {"params": [trainer.master(p) for p in group["params"]]} for group in spec.groups(module)]
        self.inner: torch.optim.Optimizer
        if isinstance(spec, TorchOptimizer):
            self.inner = spec.over(masters)
        else:
            self.inner = PlainOptimizer(masters, spec)
        self.param_groups = self.inner.param_groups
        self.steps = 0
        self.delayed: list[nn.Parameter] = []
        """Parameters whose master an update has changed, and which have not followed it yet."""

    def step(self) -> None:
        """Unscale gradients, update the masters, and cast them back. Skip the update on an fp16 overflow.

        If updates are delayed, the parameters follow the masters of the update before this one: see `ps.Delayed`.
        """
        trainer, update = self.trainer, self.trainer.config.late_update
        self.steps += 1
        trainer.follow_writes()
        self._follow_masters(self.delayed)
        trainer.unscale()
        overflow = trainer.scaler.enabled and not trainer.gradients_are_finite()
        if not overflow:
            for master in trainer.masters.values():
                if master.grad is not None and master.grad.stride() != master.stride():
                    # Sums run in memory order, which is that of the parameter.
                    master.grad = torch.empty_like(master).copy_(master.grad)
            self.inner.step()
            updated = [param for param, master in trainer.masters.items() if master.grad is not None]
            if update is not None and self.steps >= update.after:
                self.delayed = updated
            else:
                self._follow_masters(updated)
        trainer.scaler.update(overflow)
        trainer.drop_gradients()

    def complete(self) -> None:
        """Make all updates for which there are gradients: they have been made by `step`."""

    def flush(self) -> None:
        """End the delay of the last update."""
        self._follow_masters(self.delayed)

    def _follow_masters(self, params: Iterable[nn.Parameter]) -> None:
        """Round parameters from their masters."""
        with torch.no_grad():
            for param in params:
                round_into(local(param), self.trainer.masters[param])
                self.trainer.versions[param] = param._version
        self.delayed = []

    def zero_grad(self) -> None:
        """Drop gradients. If there are any, the delay of the last update ends."""
        if any(master.grad is not None for master in self.trainer.masters.values()):
            self.flush()
        self.trainer.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the inner `torch.optim` optimizer."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict` into the inner `torch.optim` optimizer."""
        self.inner.load_state_dict(state_dict)


class ReferenceTrainer:
    """Reference of the engine's mixed-precision training in plain PyTorch: no chunks, all in memory, one process.

    Parameters are cast to the compute dtype; gradients are accumulated in fp32; the optimizer updates fp32 master
    parameters, which are cast back. A frozen parameter is its own master. Of a DTensor everything is this process's
    part.

    Args:
        model: Model, or function that builds it.
        config: Configuration.
        optimizer: Class of its optimizer.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        config: Config,
        optimizer: Callable[["ReferenceTrainer"], ReferenceOptimizer] = ReferenceOptimizer,
    ) -> None:
        self.device = config.find_device()
        config = self.config = settle_precision(config, model, self.device)
        self.module = model if isinstance(model, nn.Module) else model()
        self.scaler = LossScaler(config.precision == "fp16")
        self.unscaled = False
        self.versions: dict[nn.Parameter, int] = {}
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        dtypes = compute_dtypes(self.module, config.compute_dtype, config.keep_fp32)
        for name, param in self.module.named_parameters():
            value = param.data.to(self.device)
            set_values(param, value.to(dtypes[name]))
            source = local(value if param.requires_grad else param.data)
            master_dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            self.versions[param] = param._version
            self.masters[param] = source.to(master_dtype, copy=True) if param.is_floating_point() else source
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        if config.tiled_loss:
            output = tiled_output(self.module)
            output.layer.forward = output  # type: ignore[assignment, method-assign]
        for tiled in tile(self.module) if config.tiled_mlp else ():
            tiled.module.forward = tiled
        self.trained = {param for param in self.masters if param.requires_grad}
        self.optimizer = optimizer(self)

    def master(self, param: nn.Parameter) -> torch.Tensor:
        """Return the master of `param`, which the optimizer updates."""
        return self.masters[param]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.trained.update(param for param in self.masters if param.requires_grad)
        self.follow_writes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ReferenceTrainer":
        """Set the model's training mode to `mode`, and return the trainer."""
        self.module.train(mode)
        return self

    def eval(self) -> "ReferenceTrainer":
        """Set the model's evaluation mode, and return the trainer."""
        return self.train(False)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, *, update: bool = False, accumulate: bool = False
    ) -> None:
        """Compute gradients and accumulate them in fp32.

        Args:
            loss: As for `Engine.backward`.
            retain_graph: As for `Engine.backward`.
            update: No effect; see `Engine.backward`.
            accumulate: No effect; see `Engine.backward`.
        """
        scaled = loss * self.scaler.scale if self.scaler.enabled else loss
        try:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
        finally:
            self._collect()

    def _collect(self) -> None:
        for param, master in self.masters.items():
            if param.grad is not None:
                grad = local_gradient(param).to(master.dtype)
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None

    def follow_writes(self) -> None:
        """Copy the user's in-place writes from the parameters to the masters."""
        with torch.no_grad():
            for param, master in self.masters.items():
                if param._version != self.versions.get(param, 0):
                    follow_written(master, local(param.detach()))
                self.versions[param] = param._version

    def drop_gradients(self) -> None:
        """Drop all gradients, also of parameters in no param group."""
        self.unscaled = False
        for master in self.masters.values():
            master.grad = None

    def unscale(self) -> None:
        """Multiply the gradients by the inverse loss scale, once per step."""
        if self.scaler.enabled and not self.unscaled:
            for master in self.masters.values():
                if master.grad is not None:
                    master.grad.mul_(1.0 / self.scaler.scale)
        self.unscaled = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_`, with squares summed in fp64 and in a fixed order.

        Args:
            max_norm: Maximum global norm.

        Returns:
            The norm before clipping, an fp32 scalar on the compute device.
        """
        self.unscale()
        squares = self.squares()
        total, factor = clip_coefficient(GradStats(tuple(squares.values())).norm, max_norm)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)
        return torch.tensor(total, dtype=torch.float32, device=self.device)

    def squares(self) -> dict[nn.Parameter, float]:
        """Return the sum of squares of each gradient, in the order of parameters."""
        grads = {p: torch.empty_like(m).copy_(m.grad) for p, m in self.masters.items() if m.grad is not None}
        return {p: float(fold(block_sums(grad.as_strided((grad.numel(),), (1,))))) for p, grad in grads.items()}

    def gradients_are_finite(self) -> bool:
        """Return whether no gradient has an infinity or a NaN."""
        return all(bool(m.grad.isfinite().all()) for m in self.masters.values() if m.grad is not None)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return an unscaled copy of the accumulated gradient of parameter `name` in the master's dtype, or None."""
        grad = self.masters[dict(self.module.named_parameters())[name]].grad
        if grad is None:
            return None
        return grad * (1.0 / self.scaler.scale) if self.scaler.enabled and not self.unscaled else grad.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the master parameters and buffers by name."""
        self.follow_writes()
        self.optimizer.complete()
        state = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            state[name] = self.masters[tensor].clone() if tensor in self.trained else local(tensor).detach().clone()
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load master parameters and buffers from `state_dict`."""
        with torch.no_grad():
            for name, tensor in self.module.state_dict(keep_vars=True).items():
                local(tensor).copy_(state_dict[name])
                if isinstance(tensor, nn.Parameter):
                    self.masters[tensor].copy_(state_dict[name])
                    self.versions[tensor] = tensor._version
