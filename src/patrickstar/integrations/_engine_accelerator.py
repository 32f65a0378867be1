"""Module and Accelerator that route calls of accelerate's loops to an engine."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar.errors import TrainingError
from patrickstar.integrations._barrier import barrier


class _Uncast:
    """Wrapper that protects a tensor from the engine's cast of inputs."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value.value if isinstance(value, _Uncast) else value for name, value in kwargs.items()}


class EngineModule(nn.Module):
    """Module whose forward runs in an engine; other attributes are those of `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Managed(EngineModule):
    """The trained model of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.module)
        self.engine = engine
        # Loss functions divide by num_items_in_batch; cast to 16 bits, 1023 tokens would become 1024.
        self.module.register_forward_pre_hook(_unpack, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(items := kwargs.get("num_items_in_batch"), torch.Tensor):
            kwargs["num_items_in_batch"] = _Uncast(items)
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.optimizer.zero_grad()


class EngineAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerator that delegates model, gradients and optimizer to an engine.

    Data sharding, gathering of metrics and counting of micro-batches remain accelerate's.
    """

    engine: Engine | None = None
    no_engine: str
    """Text of the error of calls that need an engine before there is one."""

    @property
    def _active_engine(self) -> Engine:
        if self.engine is None:
            raise TrainingError(self.no_engine)
        return self.engine

    def synchronize(self) -> None:
        """Wait for the other processes, and serve their requests meanwhile; see `barrier`."""
        barrier(self.engine)

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Return the model itself."""
        inner: nn.Module = super().unwrap_model(
            model.module if isinstance(model, EngineModule) else model, *args, **options
        )
        return inner

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a null context: `backward` decides whether gradients are averaged."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward through the engine, which averages over processes in the last one before a step."""
        every_batch = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self._active_engine.backward(loss, accumulate=not (self.sync_gradients or every_batch), **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients in the next step; return their 2-norm before. Raises TrainingError for other norms."""
        if norm_type != 2:
            raise TrainingError(f"norm_type={norm_type} is not supported: gradients are clipped by their 2-norm")
        return self._active_engine.clip_grad_norm_(max_norm)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last fp16 step was skipped because of non-finite gradients."""
        return self._active_engine.stats.last.overflows > 0
