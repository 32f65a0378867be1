"""Precision plugin of Lightning that runs backward and clipping through an engine."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

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


class EnginePrecision(Precision):
    """Precision plugin that delegates to an engine.

    Args:
        given: Plugin that Lightning has chosen by `Trainer(precision=...)`.
        engine: Returns the engine.
        accumulates: Returns True if another backward precedes the step.

    Raises:
        ConfigError: The engine has no such precision.
    """

    def __init__(self, given: Precision, engine: Callable[[], Engine], accumulates: Callable[[], bool]) -> None:
        name = str(given.precision)
        if name not in PRECISIONS:
            raise ConfigError(f"precision={name!r} is not supported: use {', '.join(map(repr, PRECISIONS))}")
        self.precision = given.precision
        self.engine_precision = PRECISIONS[name]
        self._engine, self._accumulates = engine, accumulates

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
