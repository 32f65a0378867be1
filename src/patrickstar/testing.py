"""Law 1 for everyone: the plain-PyTorch reference, and assertions that the engine equals it bit for bit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar._kernels.grad_norm import GradStats, block_sums, fold
from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._params.local_shards import follow_rounded
from patrickstar._params.precision import LossScaler, cast_inputs, clip_coefficient, compute_dtypes
from patrickstar.config import Config
from patrickstar.optim import Optimizer, TorchOptimizer

Script = Callable[[Any, Any], Sequence[torch.Tensor]]
"""What both trainers run: takes a trainer and its optimizer, returns tensors to compare."""


class NoMeter:
    """A meter that finds no non-model data, so that tests of tiny models don't depend on the process around them."""

    source = "nothing"
    counts_freed = False
    caching = False

    def calibrate(self, chunk_bytes: int) -> None:
        """Nothing to take note of."""

    def now(self, chunk_bytes: int) -> int:
        return 0

    def peak(self, chunk_bytes: int) -> int:
        return 0

    def restart(self) -> None:
        """Nothing to forget."""

    def reclaim(self) -> None:
        """Nothing to give back."""

    def set_caching(self, allowed: bool) -> None:
        """Nothing is kept."""


class PlainOptimizer(torch.optim.Optimizer):
    """A rule of this package as an optimizer over ordinary tensors: its list of operations, one parameter at a time."""

    def __init__(self, groups: list[dict[str, Any]], spec: Optimizer) -> None:
        self.spec = spec
        super().__init__(groups, spec.defaults())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros((), device="cpu")) + 1
                rule = self.spec.rule(group, int(state["step"]), {})
                for kind in dict.fromkeys((*self.spec.states, *rule.kinds)):
                    if kind not in state:
                        state[kind] = torch.zeros_like(param)
                # Gradients in the order in which the parameter lies in memory.
                grad = torch.empty_like(param).copy_(param.grad)
                states = [state[kind] for kind in rule.kinds]
                rule.apply(param, grad, states)
                for values in (param, *states):
                    canonical_nan_(values)


class ReferenceOptimizer:
    """An optimizer over fp32 masters, cast back to what operators read: the protocol in thirty lines."""

    def __init__(self, trainer: "ReferenceTrainer") -> None:
        spec = trainer.config.optimizer
        self.trainer = trainer
        module = trainer.module
        groups: list[dict[str, Any]] = [{"params": list(module.parameters())}]
        if spec.param_groups is not None:
            groups = [dict(group) for group in spec.param_groups(module)]
        masters = [group | {"params": [trainer.master(p) for p in group["params"]]} for group in groups]
        self.inner: torch.optim.Optimizer
        if isinstance(spec, TorchOptimizer):
            self.inner = spec.over(masters)
        else:
            self.inner = PlainOptimizer(masters, spec)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        """Unscale, update the masters, cast back."""
        trainer = self.trainer
        trainer.follow_writes()
        trainer.unscale()
        overflow = trainer.scaler.enabled and any(
            not torch.isfinite(master.grad).all() for master in trainer.masters.values() if master.grad is not None
        )
        if not overflow:
            self.inner.step()
            with torch.no_grad():
                for param, master in trainer.masters.items():
                    if master.grad is not None:
                        round_into(param, master)
                        trainer.versions[param] = param._version
        trainer.scaler.update(overflow)
        trainer.unscaled = False
        self.inner.zero_grad()

    def zero_grad(self) -> None:
        """Drop gradients."""
        self.trainer.unscaled = False
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The states of `torch.optim`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        self.inner.load_state_dict(state_dict)


class ReferenceTrainer:
    """The same mixed-precision protocol by plain PyTorch: no chunks, everything in memory, one process.

    Parameters are cast to the dtype they compute in; gradients are added up in fp32 per parameter; `torch.optim`
    updates fp32 masters; parameters are cast back. A frozen parameter has no master but its own value.
    """

    def __init__(self, model: nn.Module | Callable[[], nn.Module], config: Config) -> None:
        self.config = config
        self.device = config.find_device()
        self.module = model if isinstance(model, nn.Module) else model()
        self.scaler = LossScaler(config.precision == "fp16")
        self.unscaled = False
        self.versions: dict[nn.Parameter, int] = {}
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        dtypes = compute_dtypes(self.module, config.compute_dtype)
        for name, param in self.module.named_parameters():
            value = param.data.to(self.device)
            param.data = value.to(dtypes[name])
            full = value if param.requires_grad else param.data
            wanted = torch.float64 if param.dtype == torch.float64 else torch.float32
            self.versions[param] = param._version
            self.masters[param] = full.to(wanted, copy=True) if param.is_floating_point() else param.data
        for module in self.module.modules():
            module._buffers.update({k: b.to(self.device) for k, b in module._buffers.items() if b is not None})
        self.trained = {param for param in self.masters if param.requires_grad}
        self.optimizer = ReferenceOptimizer(self)

    def master(self, param: nn.Parameter) -> torch.Tensor:
        """The full-precision copy that the optimizer updates."""
        return self.masters[param]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.trained.update(param for param in self.masters if param.requires_grad)
        self.follow_writes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ReferenceTrainer":
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "ReferenceTrainer":
        """Set the model's evaluation mode."""
        return self.train(False)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, *, update: bool = False, accumulate: bool = False
    ) -> None:
        """Gradients, added to the masters' in fp32. When the engine updates makes no difference to results."""
        scaled = loss * self.scaler.scale if self.scaler.enabled else loss
        try:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
        finally:
            self._collect()

    def _collect(self) -> None:
        for param, master in self.masters.items():
            if param.grad is not None:
                grad = param.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None

    def follow_writes(self) -> None:
        """Take over into the masters what the user wrote to parameters in place."""
        with torch.no_grad():
            for param, master in self.masters.items():
                if param._version != self.versions.get(param, 0):
                    follow_rounded(master, param.detach())
                self.versions[param] = param._version

    def unscale(self) -> None:
        """Divide the loss scale out of the masters' gradients, once per step."""
        if self.scaler.enabled and not self.unscaled:
            for master in self.masters.values():
                if master.grad is not None:
                    master.grad.mul_(1.0 / self.scaler.scale)
        self.unscaled = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the masters, squares summed in double precision and in fixed order."""
        self.unscale()
        grads = [torch.empty_like(m).copy_(m.grad) for m in self.masters.values() if m.grad is not None]
        sums = tuple(float(fold(block_sums(grad.as_strided((grad.numel(),), (1,))))) for grad in grads)
        total, factor = clip_coefficient(GradStats(sums).norm, max_norm)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)
        return torch.tensor(total, dtype=torch.float32, device=self.device)

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient so far, in fp32."""
        grad = self.masters[dict(self.module.named_parameters())[name]].grad
        if grad is None:
            return None
        return grad * (1.0 / self.scaler.scale) if self.scaler.enabled and not self.unscaled else grad.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters and buffers under the model's names."""
        self.follow_writes()
        state = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            state[name] = self.masters[tensor].clone() if tensor in self.trained else tensor.detach().clone()
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        with torch.no_grad():
            for name, tensor in self.module.state_dict(keep_vars=True).items():
                tensor.copy_(state_dict[name])
                if isinstance(tensor, nn.Parameter):
                    self.masters[tensor].copy_(state_dict[name])
                    self.versions[tensor] = tensor._version


def stressed(model: nn.Module | Callable[[], nn.Module], config: Config) -> Engine:
    """An engine that evicts whatever may leave at every access, and fills what it frees with NaN."""
    return Engine(model, config, meter=NoMeter(), evict_everything=True, poison=True)


def compare(
    model_func: Callable[[], nn.Module], config: Config, script: Script, *, stress: bool = True, seed: int = 0
) -> None:
    """Run `script` with the reference and with the engine, from the same seed; assert that all bits agree.

    Compared are the tensors the script returns, the final parameters and buffers, and the optimizer's states.
    """
    torch.manual_seed(seed)
    reference = ReferenceTrainer(model_func, config)
    expected = script(reference, reference.optimizer)
    torch.manual_seed(seed)
    engine = stressed(model_func, config) if stress else Engine(model_func, config, meter=NoMeter(), poison=True)
    try:
        found = script(engine, engine.optimizer)
        assert_same_bits(list(expected), list(found), "what the script returned")
        assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters and buffers")
        _assert_same_states(reference.optimizer.state_dict(), engine.optimizer.state_dict())
    finally:
        engine.close()


def assert_exact(
    model_func: Callable[[], nn.Module],
    batches: Iterable[Mapping[str, Any] | Sequence[Any]],
    config: Config,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    max_norm: float | None = None,
    accumulation: int = 1,
    scheduler: Callable[[Any], Any] | None = None,
    stress: bool = True,
    seed: int = 0,
) -> None:
    """Assert that your model trains under the engine, bit for bit, as it does in plain PyTorch.

    model_func builds the model (it is called twice, from the same seed). batches: dictionaries of keyword arguments or
    tuples of positional ones. loss_fn(output, batch) gives the scalar loss; the default takes `output.loss`, or the
    mean square of a tensor. scheduler(optimizer) builds a learning-rate scheduler, stepped once per update. With
    `stress` everything that may be evicted is evicted at every access, and freed memory is filled with NaN.
    Raises AssertionError naming the first tensor that differs.
    """
    batches = list(batches)
    loss_of = loss_fn if loss_fn is not None else _default_loss

    def script(trainer: Any, optimizer: Any) -> list[torch.Tensor]:
        schedule = scheduler(getattr(optimizer, "inner", optimizer)) if scheduler is not None else None
        seen = []
        for number, batch in enumerate(batches, start=1):
            out = trainer(**batch) if isinstance(batch, Mapping) else trainer(*batch)
            loss = loss_of(out, batch)
            trainer.backward(loss / accumulation)
            seen.append(loss.detach().clone())
            if number % accumulation and number < len(batches):
                continue
            if max_norm is not None:
                seen.append(trainer.clip_grad_norm_(max_norm).clone())
            for name, param in trainer.module.named_parameters():
                if max_norm is None and param.requires_grad and (grad := trainer.gradient(name)) is not None:
                    seen.append(grad)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        return seen

    compare(model_func, config, script, stress=stress, seed=seed)


def assert_same_bits(expected: Any, found: Any, what: str) -> None:
    """Assert that two collections of tensors are equal bit for bit; NaNs equal NaNs of the same bits."""
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    assert len(expected) == len(found), f"{what}: {len(expected)} tensors expected, {len(found)} found"
    for key, tensor in pairs:
        other = found[key]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, (
            f"{what}: {key} is {other.dtype} {tuple(other.shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
        )
        same = _bits(tensor) == _bits(other)
        assert same.all(), f"{what}: {key} differs in {int((~same).sum())} bytes of {same.numel()}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.Tensor.clone(tensor.detach()).cpu().contiguous().reshape(-1)
    return flat if flat.dtype == torch.bool else flat.view(torch.uint8)


def _assert_same_states(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected["state"].keys() == found["state"].keys(), (
        f"parameters with optimizer states: {sorted(expected['state'])} expected, {sorted(found['state'])} found"
    )
    for position, state in expected["state"].items():
        assert_same_bits(state, found["state"][position], f"optimizer states of parameter {position}")


def _default_loss(out: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = out.float().pow(2).mean() if isinstance(out, torch.Tensor) else out.loss
    return loss
