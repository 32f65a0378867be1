"""Blocks under `torch.compile`: one window around the whole block, since its operators can't announce themselves."""

from collections.abc import Callable
from typing import Any

from torch import nn

from patrickstar.engine.intercept import Interceptor


class CompiledModules:
    """Wraps the compiled blocks of a model for as long as an engine manages it."""

    def __init__(self, module: nn.Module, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self._undo: list[Callable[[], None]] = []
        for block in module.modules():
            if block._compiled_call_impl is not None:
                self._wrap(block, "_compiled_call_impl")
            elif hasattr(block, "_orig_mod") and hasattr(block, "dynamo_ctx"):
                self._wrap(block, "forward")

    def _wrap(self, block: nn.Module, attribute: str) -> None:
        compiled = getattr(block, attribute)
        slots = tuple(param._slots[0] for param in block.parameters() if hasattr(param, "_slots"))

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.interceptor.run_block(compiled, args, kwargs, slots)

        setattr(block, attribute, call)
        self._undo.append(lambda: setattr(block, attribute, compiled))

    def close(self) -> None:
        """Leave the blocks as they were."""
        for undo in self._undo:
            undo()
