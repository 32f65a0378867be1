"""Modules that a Trainer only reads, such as a reference model, in the chunks of its engine."""

from collections.abc import Callable
from typing import Any

from torch import nn

from patrickstar._engine.engine import Engine


class FrozenModule(nn.Module):
    """Module whose forward runs in an engine without gradients; other attributes are those of the module.

    Args:
        module: The module.
        name: Its name in the engine.
        engine: Returns the engine, and creates it at the first call.
    """

    def __init__(self, module: nn.Module, name: str, engine: Callable[[], Engine]) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self._engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine().call_frozen(self.name, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
