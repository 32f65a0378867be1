"""Precision plugins of Lightning that run backward and clipping through an engine."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError, TrainingError

PRECISIONS = {
    "32-true": "fp32",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
}
"""Precisions of the engine by the names of Lightning. All have fp32 masters, and none uses autocast."""


def engine_precision(given: FabricPrecision) -> str:
    """Return the engine's precision for a plugin of Lightning. Raises ConfigError if the engine has none such."""
    name = str(given.precision)
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name!r} is not supported: use {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[name]


class _DelegatesToEngine(FabricPrecision):
    """Base of the precision plugins, which delegate to an engine.

    Args:
        given: Plugin that Lightning has chosen by the argument `precision`.
        engine: Returns the engine.
        accumulates: Returns True if another backward precedes the step.

    Raises:
        ConfigError: The engine has no such precision.
    """

    def __init__(self, given: FabricPrecision, engine: Callable[[], Engine], accumulates: Callable[[], bool]) -> None:
        self.engine_precision = engine_precision(given)
        self.precision = given.precision
        self._engine, self._accumulates = engine, accumulates


class EngineFabricPrecision(_DelegatesToEngine):
    """Precision plugin of Fabric that delegates to an engine."""

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, **options: Any) -> None:
        """Run backward of a loss through the engine. `options`: keyword arguments of `Engine.backward`."""
        self._engine().backward(tensor, **{"accumulate": self._accumulates()} | options)

    def convert_output(self, data: Any) -> Any:
        """Convert outputs of a forward in 16 bits to the default dtype, as Fabric's own plugins do."""
        return data if self.engine_precision == "fp32" else apply_to_collection(data, torch.Tensor, _to_default_dtype)


def _to_default_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


class EnginePrecision(_DelegatesToEngine, Precision):
    """Precision plugin of the Trainer that delegates to an engine."""

    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward of a loss through the engine.

        Raises:
            ConfigError: The module has a `backward` of its own.
        """
        if type(model).backward is not LightningModule.backward:
            raise ConfigError(
                f"{type(model).__name__}.backward is not called: the engine runs backward. Remove the method, or use "
                f"manual optimization and self.manual_backward(loss)"
            )
        self._engine().backward(tensor, *args, accumulate=self._accumulates(), **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip gradients by their global 2-norm in the next step."""
        self._engine().clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Raise TrainingError: chunks store gradients until they are reduced."""
        raise TrainingError("gradient_clip_algorithm='value' is not supported: use 'norm', the 2-norm")
