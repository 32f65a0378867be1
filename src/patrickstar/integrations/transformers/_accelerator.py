"""What the Trainer calls in the model's place, and what its Accelerator does with it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar.errors import TrainingError
from patrickstar.integrations.transformers._save_weights import make_savable


class _AsIs:
    """A number in a tensor, which is no input of the model: the engine's cast of inputs passes it by."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value.value if isinstance(value, _AsIs) else value for name, value in kwargs.items()}


class Managed(nn.Module):
    """The engine as a module: a forward of it is one of the engine, what it does not have itself is the model's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        # Loss functions divide by it: rounded to 16 bits, 1023 tokens would be 1024.
        self.module.register_forward_pre_hook(_unpack, with_kwargs=True)
        make_savable(engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model by its engine."""
        if isinstance(items := kwargs.get("num_items_in_batch"), torch.Tensor):
            kwargs["num_items_in_batch"] = _AsIs(items)
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were not used for a step."""
        self.engine.optimizer.zero_grad()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class EngineAccelerator(Accelerator):  # type: ignore[misc]
    """The Trainer's Accelerator, which leaves model, gradients and optimizer to the engine, and keeps the rest.

    What the rest is: sharding the data, gathering metrics, and counting micro-batches.
    """

    engine: Engine | None

    @classmethod
    def taking_over(cls, accelerator: Accelerator, engine: Engine | None) -> "EngineAccelerator":
        """The accelerator that the Trainer has made, and bound methods of, as one of this class."""
        accelerator.__class__ = cls
        accelerator.engine = engine
        taken: EngineAccelerator = accelerator
        return taken

    @property
    def _open(self) -> Engine:
        if self.engine is None:
            raise TrainingError("there is no engine yet: it is made when train(), evaluate() or predict() begin")
        return self.engine

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """The model itself."""
        inner: nn.Module = super().unwrap_model(model.module if isinstance(model, Managed) else model, *args, **options)
        return inner

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Nothing is wrapped or moved."""
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Nothing is wrapped: it is the engine's."""
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Whether processes average is said in `backward`."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backward by the engine, which averages over processes in the last one before a step."""
        each = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self._open.backward(loss, accumulate=not (self.sync_gradients or each), **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Have the next step clip by the norm of all gradients; returns the norm before. Raises for other norms."""
        if norm_type != 2:
            raise TrainingError(f"gradients are clipped by their 2-norm; norm_type={norm_type} is not offered")
        return self._open.clip_grad_norm_(max_norm)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step found gradients that were not finite, with fp16."""
        return self._open.stats.last.overflows > 0
