"""Modules that a Trainer only reads, such as a reference model, in the chunks of its engine."""

from collections.abc import Callable
from typing import Any

from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar.integrations._engine_accelerator import EngineModule


class FrozenModule(EngineModule):
    """Module that an engine only reads; its forward runs there without gradients.

    Args:
        module: The module.
        name: Its name in the engine.
        engine: Returns the engine, and creates it at the first call.
    """

    def __init__(self, module: nn.Module, name: str, engine: Callable[[], Engine]) -> None:
        super().__init__(module)
        self.name = name
        self._engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine().call_frozen(self.name, *args, **kwargs)
