"""Blocks whose operators can't announce themselves: one window around the whole block.

Such are blocks under `torch.compile`, which traces through operators, and PyTorch's attention layers in inference,
which take another path, of other bits, as soon as an argument has `__torch_function__`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.interceptor import Interceptor, ModuleUse
from patrickstar._params.managed_param import ManagedParam

FAST_PATH_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _managed_params_of(block: nn.Module) -> tuple[ManagedParam, ...]:
    # Also inside another block's window, where these are disguised as plain parameters.
    return tuple(param._managed_params[0] for param in block.parameters() if hasattr(param, "_managed_params"))


class ModuleHooks:
    """Watches these blocks for as long as an engine manages the model."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self._undo: list[Callable[[], None]] = []
        self._known: set[nn.Module] = set()

    def notice(self, module: nn.Module) -> None:
        """Watch blocks that are not yet watched; a user may compile them at any time."""
        for block in module.modules():
            if block in self._known:
                continue
            if isinstance(block, FAST_PATH_LAYERS):
                self._hook(block, lambda layer: not layer.training and not torch.is_grad_enabled())
            elif isinstance(block, torch._dynamo.OptimizedModule):
                self._hook(block, lambda layer: True)
            elif block._compiled_call_impl is not None:
                self._wrap_call(block)
            else:
                continue
            self._known.add(block)

    def _hook(self, block: nn.Module, applies: Callable[[nn.Module], bool]) -> None:
        uses: list[ModuleUse] = []

        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if layer is block and applies(layer):  # a deep copy takes hooks along, and is nobody's
                uses.append(self.interceptor.open_block(_managed_params_of(block), (args, kwargs)))

        def leave(layer: nn.Module, args: Any, out: Any) -> None:
            if layer is block and uses:
                self.interceptor.close_block(uses.pop(), out)

        self._undo.append(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        self._undo.append(block.register_forward_hook(leave, always_call=True).remove)

    def _wrap_call(self, block: nn.Module) -> None:
        """`block.compile()` compiles hooks too, so the window goes around the compiled call."""
        compiled: Any = block._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            use = self.interceptor.open_block(_managed_params_of(block), (args, kwargs))
            out = None
            try:
                out = compiled(*args, **kwargs)
            finally:
                self.interceptor.close_block(use, out)
            return out

        block._compiled_call_impl = call
        self._undo.append(lambda: setattr(block, "_compiled_call_impl", compiled))

    def close(self) -> None:
        """Leave the blocks as they were."""
        for undo in self._undo:
            undo()
